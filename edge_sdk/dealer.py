"""The ZeroMQ socket of a channel, with the options without which a DEALER misbehaves."""

from __future__ import annotations

import zmq

from edge_sdk.keys import CurveKeys
from edge_sdk.wire import MAX_TENSOR_BYTES

RECONNECT_MS = 100
MAX_RECONNECT_MS = 2000
# A ping waits behind the features that are on their way: on a link of 1 Mbit/s a few of them take seconds.
HEARTBEAT_INTERVAL_MS = 2000
HEARTBEAT_TIMEOUT_MS = 10_000
HEARTBEAT_TTL_MS = 15_000
QUEUED_MESSAGES = 64

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


def open_dealer(context: Context, handshake_s: float, keys: CurveKeys | None = None) -> Socket:
    """A DEALER that is not connected yet; a handshake that takes longer than ``handshake_s`` is begun anew.

    With ``keys`` it speaks CURVE, else in the clear.
    """
    socket = context.socket(zmq.DEALER)
    # Without it a DEALER queues while the peer is away and floods it with stale requests when it is back.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
    # Without a bound: a connection that ZeroMQ holds up because its queue is full, and that is reset then, aborts the
    # process at its next ping (libzmq 4.3.5, "!_io_error"). Answers are as many as our requests, which are bounded.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_TENSOR_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, max(int(handshake_s * 1000), 1))
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
    # A silent partition closes no connection.
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TTL_MS)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
    return socket
