"""Which peers of a ROUTER are connected: ZeroMQ itself tells nobody, and delivers what a peer left behind.

Its monitor names connections by their descriptor, and so does each message; together they tell whose connection has
ended. A descriptor is given out again right after: so what the monitor has told is always taken in before a message
of a peer that is new is believed.
"""

from __future__ import annotations

import struct
from collections import OrderedDict

import zmq

_ADDRESS = "inproc://connections"
# No more than these: over telling of a failed handshake libzmq 4.3.5 forgets that it failed, and keeps the connection.
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
# A peer is remembered for as long as messages of it may still come out of the socket.
_MAX_REMEMBERED = 4096

Socket = zmq.Socket[bytes]


class Connections:
    """The connections of ``socket``, which is not bound yet; belongs to the thread of that."""

    def __init__(self, context: zmq.Context[Socket], socket: Socket) -> None:
        self._socket = socket
        socket.monitor(_ADDRESS, _EVENTS)
        self._monitor: Socket = context.socket(zmq.PAIR)
        # A full queue would hold up ZeroMQ's own thread.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(_ADDRESS)
        self._open: set[int] = set()
        self._peers: dict[int, bytes] = {}
        self._lost: list[bytes] = []
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        # Ready for reading when connections may have come or gone: then call :meth:`take_in`.
        self.descriptor = int(self._monitor.getsockopt(zmq.FD))

    @property
    def count(self) -> int:
        """How many there are, as far as was taken in; also such as have not shaken hands yet."""
        return len(self._open)

    def carries(self, descriptor: int, peer: bytes) -> bool:
        """A message of ``peer`` came over ``descriptor``: whether that connection still stands."""
        if self._peers.get(descriptor) == peer:
            return True
        self.take_in()
        if descriptor not in self._open or (peer in self._gone and not _is_chosen(peer)):
            return False
        self._peers[descriptor] = peer
        self._gone.pop(peer, None)
        return True

    def lost(self) -> list[bytes]:
        """The peers whose end was taken in since it was asked last, of those that have sent something."""
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)

    def take_in(self) -> None:
        """Hear what the monitor has to tell."""
        while True:
            try:
                # A 16-bit number in front of a 32-bit value.
                event, descriptor = struct.unpack("=Hi", self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_ACCEPTED:
                self._open.add(descriptor)
            else:
                self._end(descriptor)

    def _end(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        peer = self._peers.pop(descriptor, None)
        if peer is not None:
            self._lost.append(peer)
            self._gone[peer] = None
            if len(self._gone) > _MAX_REMEMBERED:
                self._gone.popitem(last=False)


def _is_chosen(peer: bytes) -> bool:
    """Whether a peer gave itself its routing id, and so may be back with it; those that ZeroMQ gives are used once."""
    return not peer.startswith(b"\0")
