"""A bounded queue whose turns go round between callers, so that one that asks a lot cannot crowd out the others.

Pure bookkeeping: no threads, no clock. What is queued, and what a full queue means to whom, is up to its owner.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """At most ``capacity`` items, at most ``per_caller`` of them of one caller; each caller's in their order."""

    def __init__(self, *, capacity: int, per_caller: int) -> None:
        self._capacity = capacity
        self._per_caller = per_caller
        # In the order of their turns. A caller of whom nothing waits is not in it.
        self._waiting: OrderedDict[Hashable, deque[T]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def is_full(self, caller: Hashable) -> bool:
        """Whether nothing more of ``caller`` fits in as things are."""
        return self._length >= self._capacity or self.waiting_of(caller) >= self._per_caller

    def waiting_of(self, caller: Hashable) -> int:
        """How many items of ``caller`` wait."""
        return len(self._waiting.get(caller, ()))

    def put(self, caller: Hashable, item: T) -> None:
        """Queue ``item``; whether there is room is asked before, by :meth:`is_full` or :meth:`make_room`."""
        self._waiting.setdefault(caller, deque()).append(item)
        self._length += 1

    def make_room(self, caller: Hashable) -> T | None:
        """For a caller in a full queue: take out and return the newest item of whoever has most there.

        ``None``: nobody has more than ``caller`` would have then, so that its item is the one too many.
        """
        greediest, items = max(self._waiting.items(), key=lambda entry: len(entry[1]))
        own = self.waiting_of(caller)
        if own >= self._per_caller or len(items) <= own + 1:
            return None
        self._length -= 1
        item = items.pop()
        if not items:
            del self._waiting[greediest]
        return item

    def first(self) -> T:
        """The item whose turn it is. Raises :class:`LookupError` when there is none."""
        for items in self._waiting.values():
            return items[0]
        raise LookupError("nothing waits")

    def pop(self) -> T:
        """Take out the item whose turn it is; the next turn is another caller's. Raises :class:`LookupError`."""
        caller, items = self._waiting.popitem(last=False)
        self._length -= 1
        item = items.popleft()
        if items:
            self._waiting[caller] = items
        return item

    def discard(self, is_vain: Callable[[T], bool]) -> list[T]:
        """Take out and return all items that are vain."""
        vain: list[T] = []
        for caller, items in tuple(self._waiting.items()):
            kept: deque[T] = deque()
            for item in items:
                (vain if is_vain(item) else kept).append(item)
            if kept:
                self._waiting[caller] = kept
            else:
                del self._waiting[caller]
        self._length -= len(vain)
        return vain
