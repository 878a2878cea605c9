"""The ROUTER socket: bound once, owned by one thread, never blocking; open to other machines only with CURVE on.

Framing is ``edge_sdk.wire``'s; what messages mean is the server's.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple

import zmq

from cloud_server.connections import Connections
from cloud_server.curve import ServerCurve
from edge_sdk.endpoints import check_bind_endpoint, host_and_port
from edge_sdk.errors import ConfigError
from edge_sdk.wire import MAX_TENSOR_BYTES, Frame, Message, encode

# A pong waits behind the features that are on their way: on a link of 1 Mbit/s a few of them take seconds.
HEARTBEAT_INTERVAL_MS = 2000
HEARTBEAT_TIMEOUT_MS = 10_000
HEARTBEAT_TTL_MS = 15_000
# How much may be queued to one peer before it counts as not reading.
QUEUED_MESSAGES = 256
LINGER_MS = 1000
# Not to copy a frame takes longer for one that is small.
_COPIED_BYTES = 1 << 16
# Numbers, not members of an enumeration, and a method that checks no arguments: each message takes several calls.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_SRCFD = int(zmq.SRCFD)
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_send: Callable[..., object] = zmq.backend.Socket.send

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator


class Arrival(NamedTuple):
    """A message that came in: the routing id of its peer, its frames, the public key of its connection (CURVE), and
    whether that connection still ``stands``: else nobody can be answered.
    """

    peer: bytes
    frames: list[Frame]
    key: str | None
    stands: bool


class Delivery(Enum):
    """What became of a message that was sent."""

    SENT = "sent"
    GONE = "gone"
    FULL = "full"


class Router:
    """A ROUTER bound to ``endpoint``; the property of the same name tells the port that was picked for ``*``.

    ``guard`` is that of ``curve``; there is none without.

    Raises :class:`ConfigError` when it cannot be bound there, or must not be, since it would ask nobody who they are.
    """

    def __init__(self, endpoint: str, *, curve: ServerCurve | None = None) -> None:
        tcp = host_and_port(check_bind_endpoint(endpoint))
        if tcp is not None and curve is None and not _is_loopback(tcp[0]):
            raise ConfigError(
                f"{endpoint} is open to other machines, and without CURVE the server would ask nobody who they are: "
                "make its key with 'splitfleet keys server new' and name it with --key, or bind to "
                f"tcp://127.0.0.1:{tcp[1]}"
            )
        self.guard = None if curve is None else curve.guard
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            # A stranger cannot take over the routing id of a device that is connected.
            (zmq.ROUTER_HANDOVER, 0),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.HEARTBEAT_TTL, HEARTBEAT_TTL_MS),
            (zmq.MAXMSGSIZE, MAX_TENSOR_BYTES),
            # Without a bound: a connection that ZeroMQ holds up because its queue is full, and that is reset then,
            # aborts the process at its next ping (libzmq 4.3.5, "!_io_error"). What came is taken in at once anyway.
            (zmq.RCVHWM, 0),
            (zmq.SNDHWM, QUEUED_MESSAGES),
            (zmq.LINGER, LINGER_MS),
        ):
            self.socket.setsockopt(option, value)
        if curve is not None:
            self._authenticator = curve.secure(self._context, self.socket)
        self.connections = Connections(self._context, self.socket)
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
        # Ready for reading when something may have changed: then, and after each send, ask :meth:`readable`.
        self.descriptor = int(self.socket.getsockopt(zmq.FD))

    def readable(self) -> bool:
        """Whether a message is there."""
        return int(self.socket.getsockopt(_EVENTS)) & _POLLIN != 0

    def receive(self) -> Arrival | None:
        """The next message; ``None`` when nothing is there."""
        # Frames, since only they tell whether more follow, and whose they are, without a call for each question.
        try:
            frame = self.socket.recv(_NOBLOCK, copy=False)
        except zmq.Again:
            return None
        peer = frame.bytes
        # All of a message come over one connection.
        key = None if self._authenticator is None else str(frame.get("User-Id"))
        stands = self.connections.carries(int(frame.get(_SRCFD)), peer)
        frames: list[Frame] = []
        while frame.more:
            frame = self.socket.recv(_NOBLOCK, copy=False)
            frames.append(frame.bytes if len(frame) < _COPIED_BYTES else frame.buffer)
        return Arrival(peer, frames, key, stands)

    def send(self, peer: bytes, message: Message) -> Delivery:
        """Send without waiting. Tensors must not change afterwards. Raises what :func:`~edge_sdk.wire.encode` does."""
        *frames, last = encode(message)
        try:
            _send(self.socket, peer, _NOBLOCK_MORE)
            for frame in frames:
                _send(self.socket, frame, _NOBLOCK_MORE, len(frame) < _COPIED_BYTES)
            _send(self.socket, last, _NOBLOCK, len(last) < _COPIED_BYTES)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Delivery.GONE
            raise
        return Delivery.SENT

    def close(self) -> None:
        """Close the socket; what is queued to peers that read goes out within the linger time."""
        self.connections.close()
        self.socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
