"""A bounded queue whose turns go round between callers, so that one that asks a lot cannot crowd out the others.

Pure bookkeeping: no threads, no clock. What is queued, and what a full queue means to whom, is up to its owner.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """How many items may wait, and how many bytes they may have together: of all callers, and of each.

    The bytes are bounded from the second item on: one alone may have any size.
    """

    items: int
    items_per_caller: int
    size_bytes: int
    size_bytes_per_caller: int


@dataclass(eq=False, slots=True)
class _Share(Generic[T]):
    """What waits of one caller: items, each with its bytes."""

    items: deque[tuple[T, int]] = field(default_factory=deque)
    size_bytes: int = 0


class FairQueue(Generic[T]):
    """Items within ``limits``; each caller's in their order."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        # In the order of their turns. A caller of whom nothing waits is not in it.
        self._waiting: OrderedDict[Hashable, _Share[T]] = OrderedDict()
        self._length = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return self._length

    def is_full(self, caller: Hashable, size_bytes: int) -> bool:
        """Whether an item of ``caller`` of that size does not fit in as things are."""
        limits = self._limits
        if self._length >= limits.items or (self._length and self.size_bytes + size_bytes > limits.size_bytes):
            return True
        return self._is_share_full(caller, size_bytes)

    def waiting_of(self, caller: Hashable) -> int:
        """How many items of ``caller`` wait."""
        share = self._waiting.get(caller)
        return 0 if share is None else len(share.items)

    def put(self, caller: Hashable, item: T, size_bytes: int) -> None:
        """Queue ``item``; whether there is room is asked before, by :meth:`is_full`, and made by :meth:`make_room`."""
        share = self._waiting.get(caller)
        if share is None:
            share = self._waiting[caller] = _Share()
        share.items.append((item, size_bytes))
        share.size_bytes += size_bytes
        self.size_bytes += size_bytes
        self._length += 1

    def make_room(self, caller: Hashable, size_bytes: int) -> list[T]:
        """For an item of ``caller`` in a full queue: take out and return the newest items of those who have most there.

        Only of such as have more, by what the queue is full of, than ``caller`` would have then; nothing where that
        does not make room enough.
        """
        if self._is_share_full(caller, size_bytes):
            return []
        taken: list[tuple[Hashable, T, int]] = []
        while self.is_full(caller, size_bytes):
            greedier = self._greedier(caller, size_bytes)
            if greedier is None:
                for other, item, item_bytes in reversed(taken):
                    self.put(other, item, item_bytes)
                return []
            item, item_bytes = self._remove(greedier, newest=True)
            taken.append((greedier, item, item_bytes))
        for other, _, _ in taken:
            self._forget_if_empty(other)
        return [item for _, item, _ in taken]

    def first(self) -> T:
        """The item whose turn it is. Raises :class:`LookupError` when there is none."""
        for share in self._waiting.values():
            return share.items[0][0]
        raise LookupError("nothing waits")

    def pop(self) -> T:
        """Take out the item whose turn it is; the next turn is another caller's. Raises :class:`LookupError`."""
        for caller in self._waiting:
            item, _ = self._remove(caller, newest=False)
            self._waiting.move_to_end(caller)
            self._forget_if_empty(caller)
            return item
        raise LookupError("nothing waits")

    def discard(self, is_vain: Callable[[T], bool]) -> list[T]:
        """Take out and return all items that are vain."""
        vain: list[T] = []
        for caller, share in tuple(self._waiting.items()):
            kept: deque[tuple[T, int]] = deque()
            for item, size_bytes in share.items:
                if is_vain(item):
                    vain.append(item)
                    share.size_bytes -= size_bytes
                    self.size_bytes -= size_bytes
                else:
                    kept.append((item, size_bytes))
            share.items = kept
            self._forget_if_empty(caller)
        self._length -= len(vain)
        return vain

    def _is_share_full(self, caller: Hashable, size_bytes: int) -> bool:
        share, limits = self._waiting.get(caller), self._limits
        return share is not None and (
            len(share.items) >= limits.items_per_caller or share.size_bytes + size_bytes > limits.size_bytes_per_caller
        )

    def _greedier(self, caller: Hashable, size_bytes: int) -> Hashable | None:
        """Who has most of what the queue is full of, if that is more than ``caller`` would have."""
        own = self._waiting.get(caller)
        if self._length >= self._limits.items:
            greediest, share = max(self._waiting.items(), key=lambda entry: len(entry[1].items))
            more = len(share.items) > self.waiting_of(caller) + 1
        else:
            greediest, share = max(self._waiting.items(), key=lambda entry: entry[1].size_bytes)
            more = share.size_bytes > (0 if own is None else own.size_bytes) + size_bytes
        return greediest if more else None

    def _remove(self, caller: Hashable, *, newest: bool) -> tuple[T, int]:
        share = self._waiting[caller]
        item, size_bytes = share.items.pop() if newest else share.items.popleft()
        share.size_bytes -= size_bytes
        self.size_bytes -= size_bytes
        self._length -= 1
        return item, size_bytes

    def _forget_if_empty(self, caller: Hashable) -> None:
        share = self._waiting.get(caller)
        if share is not None and not share.items:
            del self._waiting[caller]
