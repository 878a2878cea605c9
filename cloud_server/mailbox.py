"""How other threads hand something to an I/O thread that sleeps in ``poll``: a queue and a file descriptor to wake it.

An eventfd costs one system call a wake-up, where a pair of inproc sockets costs a message.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import RLock

Entry = Callable[[], None]


class Mailbox:
    """Entries that any thread posts and one thread drains, in order. Poll :attr:`descriptor` for reading."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        # Reentrant, since a signal handler may wake the thread that it interrupted in here.
        self._lock = RLock()

    def post(self, entry: Entry) -> None:
        """Have ``entry`` called by the thread that drains; after :meth:`close` it is forgotten."""
        self._entries.append(entry)
        self.wake()

    def wake(self) -> None:
        """Let the poll return."""
        # A write after close could hit whatever got the same descriptor since.
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.descriptor, 1)

    def drain(self) -> Iterator[Entry]:
        """The entries posted so far and while they are worked through."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        while self._entries:
            yield self._entries.popleft()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.descriptor)
