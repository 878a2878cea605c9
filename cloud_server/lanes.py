"""A lane: a bounded queue and the threads that work it off, so that nothing slow runs where sockets are served.

Work in one lane of one thread runs in the order in which it was submitted. What a lane is for, and who hears of the
outcome, is up to its owner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from edge_sdk.errors import OverloadedError

_LOG = logging.getLogger(__name__)
_LEAST_RETRY_S = 0.05
_SMOOTHING = 0.1

T = TypeVar("T")
Job = tuple[Callable[[], Any], Callable[[Any], None]]


class Lane:
    """``threads`` workers behind a queue of at most ``capacity`` waiting jobs."""

    def __init__(self, name: str, *, threads: int = 1, capacity: int) -> None:
        self.name = name
        self._capacity = capacity
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closed = False
        self._lock = Lock()
        self._mean_s = 0.0
        # Daemons: a job that never returns must not keep the process from ending.
        self._threads = [Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> bool:
        """Run ``work`` in a thread, then ``done`` there with its result or its exception; ``done`` must not raise.

        ``False``: the lane is closed, nothing will happen. Raises :class:`OverloadedError` when the queue is full.
        """
        waiting = self._jobs.qsize()
        if waiting >= self._capacity:
            retry_after_s = max(_LEAST_RETRY_S, waiting * self._mean_s / len(self._threads))
            raise OverloadedError(
                f"{self.name}: {waiting} requests are waiting, which is the limit; retry in {retry_after_s:.2f} s",
                retry_after_s=retry_after_s,
            )
        # A job behind the end marks would never be run.
        with self._lock:
            if not self._closed:
                self._jobs.put((work, done))
            return not self._closed

    def close(self) -> None:
        """End the threads once all that was submitted is done; does not wait for it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether all threads ended within ``timeout_s`` after :meth:`close`."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            began = time.perf_counter()
            outcome: Any
            try:
                outcome = work()
            except Exception as error:
                outcome = error
            self._mean_s += _SMOOTHING * (time.perf_counter() - began - self._mean_s)
            try:
                done(outcome)
            except Exception:
                _LOG.exception("lane %s: the outcome of a job could not be delivered", self.name)
            # Else this thread keeps the last job's tensors alive until the next one comes.
            del job, work, done, outcome


def log_failure(what: str) -> Callable[[object], None]:
    """A ``done`` for work that nobody waits for: an exception is logged, ``what`` failed; a result is ignored."""

    def done(outcome: object) -> None:
        if isinstance(outcome, Exception):
            _LOG.error("%s failed", what, exc_info=outcome)

    return done
