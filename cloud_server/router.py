"""The ROUTER socket: bound once, owned by one thread, never blocking.

Framing is ``edge_sdk.wire``'s; what messages mean is the server's.
"""

from __future__ import annotations

import re
from enum import Enum

import zmq

from edge_sdk.errors import ConfigError
from edge_sdk.wire import MAX_TENSOR_BYTES, Message, encode

# A pong waits behind the features that are on their way: on a link of 1 Mbit/s a few of them take seconds.
HEARTBEAT_INTERVAL_MS = 2000
HEARTBEAT_TIMEOUT_MS = 10_000
HEARTBEAT_TTL_MS = 15_000
# How much one peer may have queued in either direction before it is held back, or counted as not reading.
QUEUED_MESSAGES = 256
LINGER_MS = 1000
_TCP = re.compile(r"tcp://[^/\s]+:(\*|\d+)")


class Delivery(Enum):
    """What became of a message that was sent."""

    SENT = "sent"
    GONE = "gone"
    FULL = "full"


class Router:
    """A ROUTER bound to ``endpoint``; the property of the same name tells the port that was picked for ``*``.

    Raises :class:`ConfigError` when it cannot be bound there.
    """

    def __init__(self, endpoint: str) -> None:
        tcp = _TCP.fullmatch(endpoint)
        # ZeroMQ would take port 70000 for 4464.
        if not (tcp and (tcp[1] == "*" or int(tcp[1]) < 2**16)) and not endpoint.startswith("ipc://"):
            raise ConfigError(
                f"{endpoint!r} is no endpoint to bind to: expected tcp://ADDRESS:PORT (PORT may be *) or ipc://PATH"
            )
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            # A stranger cannot take over the routing id of a device that is connected.
            (zmq.ROUTER_HANDOVER, 0),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.HEARTBEAT_TTL, HEARTBEAT_TTL_MS),
            (zmq.MAXMSGSIZE, MAX_TENSOR_BYTES),
            (zmq.RCVHWM, QUEUED_MESSAGES),
            (zmq.SNDHWM, QUEUED_MESSAGES),
            (zmq.LINGER, LINGER_MS),
        ):
            self.socket.setsockopt(option, value)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            if error.errno == zmq.EADDRINUSE:
                raise ConfigError(
                    f"{endpoint} is in use: another server runs there? Name another port with --bind, or let "
                    "tcp://127.0.0.1:* pick one"
                ) from None
            raise ConfigError(
                f"cannot bind to {endpoint!r} ({error.strerror}): expected something like tcp://127.0.0.1:5555"
            ) from None
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The routing id of a peer and the frames that it sent; ``None`` when nothing is there."""
        try:
            peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return peer, frames

    def send(self, peer: bytes, message: Message) -> Delivery:
        """Send without waiting. Tensors must not change afterwards. Raises what :func:`~edge_sdk.wire.encode` does."""
        frames = encode(message)
        try:
            self.socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Delivery.GONE
            raise
        return Delivery.SENT

    def close(self) -> None:
        """Close the socket; what is queued to peers that read goes out within the linger time."""
        self.socket.close()
        self._context.term()
