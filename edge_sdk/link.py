"""The socket of a channel and what its monitor tells: whether it is connected, and if not, why.

ZeroMQ reconnects by itself, except after what it takes for a breach of its protocol: a server that refuses our key or
speaks another mechanism, or bytes that came over damaged, at any time. Then the socket never tries again and has to be
made anew. Which requests that concerns is the channel's business.
"""

from __future__ import annotations

import errno
import struct
from enum import Enum

import zmq

from edge_sdk.dealer import Context, Socket, open_dealer
from edge_sdk.errors import ConfigError, PeerUnreachableError, SplitfleetError, UnauthorizedError, UntrustedServerError
from edge_sdk.keys import CurveKeys

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
# The peer hung up in the middle of the handshake, as a server does whose key is not the one we were given.
_HUNG_UP = (errno.EPIPE, errno.ECONNRESET)


class Change(Enum):
    """What has happened to a link. ``REFUSED``: the handshake cannot succeed, as things are."""

    UP = "up"
    DOWN = "down"
    REFUSED = "refused"


class Link:
    """A DEALER to ``endpoint`` and its monitor; belongs to one thread."""

    def __init__(self, context: Context, endpoint: str, *, handshake_s: float, keys: CurveKeys | None) -> None:
        """Begin to connect. Raises :class:`ConfigError` for an endpoint that cannot be connected to."""
        self.connections = 0
        # Whether nothing tries to connect: for good, unless a new try is told of in a moment.
        self.idle = False
        self._context = context
        self._endpoint = endpoint
        self._handshake_s = handshake_s
        self._keys = keys
        self._error: type[SplitfleetError] | None = PeerUnreachableError
        self._reason = f"nothing listens at {endpoint}"
        self.socket, self.monitor = self._open()

    @property
    def outage(self) -> SplitfleetError | None:
        """Why there is no connection, as a new error; ``None`` while there is one."""
        return None if self._error is None else self._error(self._reason)

    @property
    def reason(self) -> str | None:
        """The text of :attr:`outage`."""
        return None if self._error is None else self._reason

    def fail(self, reason: str) -> None:
        """There is no connection, for a reason of the channel's own."""
        self._set(PeerUnreachableError, reason)

    def next_change(self) -> Change | None:
        """The next thing that has happened, ``None`` when nothing more has."""
        while True:
            try:
                # A 16-bit number in front of a 32-bit value. pyzmq's own parser would import asyncio with it, 7 MB
                # that a small device has better use for.
                event, value = struct.unpack("=Hi", self.monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return None
            change = self._take(event, value)
            if change is not None:
                return change

    def reopen(self) -> None:
        """Make the socket anew."""
        self.close()
        self.idle = False
        self.socket, self.monitor = self._open()

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)

    def _open(self) -> tuple[Socket, Socket]:
        socket = open_dealer(self._context, self._handshake_s, self._keys)
        # Made before the socket connects, so that no event is missed.
        monitor = socket.get_monitor_socket(_EVENTS)
        try:
            socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)
            raise ConfigError(f"{self._endpoint!r} is not an endpoint that can be connected to: {error}") from None
        return socket, monitor

    def _take(self, event: int, value: int) -> Change | None:
        at = self._endpoint
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connections += 1
            self._error = None
            self.idle = False
            return Change.UP
        if event == zmq.EVENT_CONNECT_RETRIED:
            self.idle = False
            return None
        if event == zmq.EVENT_DISCONNECTED:
            self.idle = True
            if self._error is not None:
                return None
            self._set(PeerUnreachableError, f"the connection to {at} was lost")
            return Change.DOWN
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and self._error is None:
            # Long past its handshake: what came was not what the server encrypted. ZeroMQ forgets over telling us that
            # this connection is to end, and would abort the whole process at the next heartbeat after a hang-up.
            self.socket.disconnect(at)
            self.idle = True
            self._set(PeerUnreachableError, f"the connection to {at} was lost: what came over it was damaged")
            return Change.DOWN
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._set(
                UnauthorizedError,
                f"the server at {at} does not allow our key{self._own_key()}: "
                "'splitfleet keys device allow' there allows it",
            )
            self.idle = True
            return Change.REFUSED
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._set(*self._broken(value))
            self.idle = True
            return Change.REFUSED
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._keys is not None and value in _HUNG_UP:
            self._set(
                UntrustedServerError,
                f"what listens at {at} breaks off the handshake: its key is another one than --server-key says, "
                f"{self._keys.server}, or it relays to a server that is away",
            )
        elif event == zmq.EVENT_CONNECTED and self._error is PeerUnreachableError:
            self._reason = f"something listens at {at} but does not shake hands"
        elif event == zmq.EVENT_CLOSED and self._error in (UntrustedServerError, UnauthorizedError):
            self._set(PeerUnreachableError, f"nothing listens at {at}")
        return None

    def _broken(self, value: int) -> tuple[type[SplitfleetError], str]:
        """What it means that the peer's side of the handshake cannot be understood."""
        at = self._endpoint
        if value != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            error = PeerUnreachableError if self._keys is None else UntrustedServerError
            return error, f"something listens at {at} but does not shake hands as a server of splitfleet does"
        if self._keys is None:
            return UnauthorizedError, f"the server at {at} asks for keys: name them with --key and --server-key"
        return UntrustedServerError, (
            f"what listens at {at} has CURVE off and cannot prove who it is: serve with --key, or connect without keys"
        )

    def _own_key(self) -> str:
        if self._keys is None:
            return ""
        return f" {self._keys.public}" + (f" ({self._keys.name})" if self._keys.name else "")

    def _set(self, error: type[SplitfleetError], reason: str) -> None:
        self._error, self._reason = error, reason
