"""CURVE at the server's socket: it proves its own key, and lets only keys in that are allowed.

A handshake is checked here, once for each connection; each message is checked by the server, with the same guard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq

from cloud_server.guard import Guard

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

_DOMAIN = "splitfleet"


@dataclass(frozen=True, kw_only=True)
class ServerCurve:
    """``secret``: the server's secret key; ``guard`` knows which keys are allowed."""

    secret: str = field(repr=False)
    guard: Guard

    def secure(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> ThreadAuthenticator:
        """Turn CURVE on for a socket that is not bound yet; to be stopped before the context ends."""
        # Imports asyncio, which a server without CURVE does not need.
        from zmq.auth.thread import ThreadAuthenticator

        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=_Provider(self.guard))
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        # Should the authenticator ever be gone, nobody gets in; without this everybody would.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        return authenticator


class _Provider:
    """What pyzmq asks about a key, in the authenticator's thread."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002
        return self._guard.admits(key.decode())
