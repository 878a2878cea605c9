"""Whether a worker is alive: ZeroMQ heartbeats, which a thread of ZeroMQ's own answers in the worker.

No message ever crosses. That thread needs neither the interpreter nor a turn of TensorFlow's, so that only a process
that is frozen as a whole (stopped, or in the depths of a swap) is silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from cloud_server.loop import Loop, Timer


@dataclass(frozen=True, kw_only=True)
class PulseLimits:
    """A heartbeat is asked for every ``interval_s``; after ``silence_s`` without one the connection is given up, and
    after ``again_s`` without a new one the worker is. It may take ``start_s`` for the first.
    """

    interval_s: float = 1.0
    silence_s: float = 8.0
    again_s: float = 2.0
    start_s: float = 120.0


class Pulse:
    """The server's end at ``endpoint``; ``on_silence`` is called once when the worker is given up."""

    def __init__(
        self,
        loop: Loop,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        limits: PulseLimits,
        *,
        on_silence: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._limits = limits
        self._on_silence = on_silence
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, round(limits.interval_s * 1000))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(limits.silence_s * 1000))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._descriptor = int(self._monitor.getsockopt(zmq.FD))
        self._timer: Timer = loop.call_later(limits.start_s, on_silence)
        loop.watch(self._descriptor, self._look)
        self._socket.bind(endpoint)
        # The descriptor tells of something new only to those who know what there was.
        self._look(0)

    def close(self) -> None:
        """Ask no more."""
        self._timer.cancel()
        self._loop.unwatch(self._descriptor)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()

    def _look(self, _: int) -> None:
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._timer.cancel()
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                # A live one connects again at once: perhaps it was this process that was frozen.
                self._timer = self._loop.call_later(self._limits.again_s, self._on_silence)


def answer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """The worker's end, to be kept as long as it lives."""
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    return socket
