"""Who may do what: the decision about one message, by the key that its connection has shown.

Asked for every message, since a handshake is checked once and a key may be revoked at any time. Never by routing id,
which a peer may choose. Without CURVE there is no guard.
"""

from __future__ import annotations

import logging

from cloud_server.allow_list import AllowList, Holder, Role
from edge_sdk.errors import UnauthorizedError
from edge_sdk.protocol import FetchBlob, Heartbeat, Register, StatBlob
from edge_sdk.wire import Message, MessageType

_LOG = logging.getLogger(__name__)
_OWN = frozenset((Register.method, Heartbeat.method))
_DEVICE_METHODS = _OWN | {StatBlob.method, FetchBlob.method}
# Strangers must not fill the log.
_STRANGERS_TOLD = 256


class Guard:
    """Decides by ``allow_list``, and by the keys of ``guests``, which are allowed while this process runs."""

    def __init__(self, allow_list: AllowList, guests: tuple[Holder, ...] = ()) -> None:
        self._allow_list = allow_list
        self._guests = {guest.public: guest for guest in guests}
        self._told: set[str] = set()

    def holder(self, key: str | None) -> Holder | None:
        """Who holds the key now; ``None``: nobody who is allowed. May be asked from any thread."""
        if key is None:
            return None
        return self._guests.get(key) or self._allow_list.holder(key)

    def admits(self, key: str) -> bool:
        """Whether a connection may be made with the key. A key that may not is logged, once."""
        if self.holder(key) is not None:
            return True
        if key not in self._told and len(self._told) < _STRANGERS_TOLD:
            self._told.add(key)
            _LOG.warning("refused a connection: the public key %s is not allowed", key)
        return False

    def identify(self, key: str | None) -> Holder:
        """Who sends with that key. Raises :class:`UnauthorizedError` for a key that is not allowed (any more)."""
        holder = self.holder(key)
        if holder is None:
            raise UnauthorizedError(
                "this key is not allowed at the server, or not any more; 'splitfleet keys device allow' there allows it"
            )
        return holder

    @staticmethod
    def check(holder: Holder, message: Message) -> None:
        """Raises :class:`UnauthorizedError` for a message that this holder may not send."""
        if message.type is not MessageType.CALL:
            # Whose answer a REPLY or an ERROR is, is known where the question is.
            return
        method = message.method or ""
        if holder.role is Role.OPERATOR:
            if method in _OWN:
                raise UnauthorizedError(f"{method} takes a device's key, and {holder.name!r} is an operator's")
        elif method not in _DEVICE_METHODS:
            raise UnauthorizedError(f"{method[:80]} takes an operator's key, and that of {holder.name!r} is a device's")
        elif method in _OWN and message.body.get("device_id") != holder.name:
            raise UnauthorizedError(
                f"this key is that of the device {holder.name!r}, not of {str(message.body.get('device_id'))[:160]!r}: "
                f"run it with --device-id {holder.name}"
            )
