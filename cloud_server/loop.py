"""The event loop of the I/O thread: descriptors, timers, and what other threads post.

All methods but :attr:`Loop.mailbox`'s belong to the thread that calls :meth:`Loop.wait`. A callback that raises costs
itself, never the loop.
"""

from __future__ import annotations

import heapq
import logging
import math
import select
import time
from collections.abc import Callable
from itertools import count

from cloud_server.mailbox import Mailbox

_LOG = logging.getLogger(__name__)

Callback = Callable[[], None]
READ = select.EPOLLIN
WRITE = select.EPOLLOUT


class Timer:
    """A callback that is due at a time, unless it is cancelled."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """Have it not be called; does nothing when it was."""
        self.callback = None


class Loop:
    """Callbacks by what they wait for. ``clock`` is that of the timers, in s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.mailbox = Mailbox()
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._soon: list[Callback] = []
        self.watch(self.mailbox.descriptor, self._drain)

    def watch(self, descriptor: int, callback: Callable[[int], None], events: int = READ) -> None:
        """Call ``callback`` with what ``descriptor`` is ready for, as long as it is: :data:`READ`, :data:`WRITE`, or
        something else when it has ended.
        """
        self._watched[descriptor] = callback
        self._epoll.register(descriptor, events)

    def change(self, descriptor: int, events: int) -> None:
        """Wait for other events of a descriptor that is watched."""
        self._epoll.modify(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        """Forget a descriptor, before it is closed."""
        if self._watched.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        """Call ``callback`` once, ``delay_s`` from now."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (self.clock() + delay_s, next(self._order), timer))
        return timer

    def call_soon(self, callback: Callback) -> None:
        """Call ``callback`` once, in :meth:`run_soon`: after what came in together was taken in."""
        self._soon.append(callback)

    def run_soon(self) -> None:
        """Call what :meth:`call_soon` was told, and what that tells it."""
        while self._soon:
            callbacks, self._soon = self._soon, []
            for callback in callbacks:
                _guarded(callback)

    def wait(self, until: float) -> None:
        """Sleep until something is ready, a timer or the time ``until`` is due; call what is to be called then."""
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if self._timers:
            until = min(until, self._timers[0][0])
        # In whole ms, rounded up: a wait that returns too early would spin.
        timeout_ms = max(0, math.ceil((until - self.clock()) * 1000))
        for descriptor, events in self._epoll.poll(timeout_ms / 1000):
            callback = self._watched.get(descriptor)
            if callback is not None:
                try:
                    callback(events)
                except Exception:
                    _LOG.exception("unexpected failure in the I/O loop")
        if self._timers:
            now = self.clock()
            while self._timers and self._timers[0][0] <= now:
                timer = heapq.heappop(self._timers)[2]
                if timer.callback is not None:
                    due, timer.callback = timer.callback, None
                    _guarded(due)

    def close(self) -> None:
        """Forget everything; what is posted from now on is, too."""
        self.mailbox.close()
        self._epoll.close()
        self._watched.clear()
        self._timers.clear()
        self._soon.clear()

    def _drain(self, _: int) -> None:
        for entry in self.mailbox.drain():
            _guarded(entry)


def _guarded(callback: Callback) -> None:
    try:
        callback()
    except Exception:
        _LOG.exception("unexpected failure in the I/O loop")
