"""How another thread has something done in the I/O thread, and waits for what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Any, TypeVar

from cloud_server.mailbox import Mailbox
from edge_sdk.errors import GoingAwayError

T = TypeVar("T")


class Handover:
    """Questions to the thread that drains ``mailbox``. From :meth:`close` on they end in :class:`GoingAwayError`."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._lock = Lock()
        self._open: set[Future[Any]] = set()
        self._closed = False

    def ask(self, begin: Callable[[Future[T]], None]) -> T:
        """Have ``begin`` called in that thread, and wait for the result that it, or what it begins, gives its future.

        Never to be called in that thread itself.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise _stopping()
            self._open.add(future)

        def guarded() -> None:
            try:
                begin(future)
            except Exception as error:
                future.set_exception(error)

        self._mailbox.post(guarded)
        try:
            return future.result()
        finally:
            self._open.discard(future)

    def close(self) -> None:
        """Nobody waits any more; to be called in that thread."""
        with self._lock:
            self._closed = True
            for future in tuple(self._open):
                if not future.done():
                    future.set_exception(_stopping())


def _stopping() -> GoingAwayError:
    return GoingAwayError("the server is stopping; ask again when it is back")
