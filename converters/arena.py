"""Where activations lie: tensors that are not alive together share memory.

Both TensorFlow Lite and XNNPACK place the largest tensor first, each into the smallest gap that it fits into among
those already placed that it shares a moment with (``tensorflow/lite/simple_memory_arena.cc``, XNNPACK's
``memory-planner.c``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

ALIGNMENT_BYTES = 64


class Use(NamedTuple):
    """``size_bytes`` are needed from step ``first`` to step ``last``, both included."""

    size_bytes: int
    first: int
    last: int


def arena_bytes(needed: Sequence[Use]) -> int:
    """The size of the arena for ``needed``, whose sizes are aligned."""
    return _planned_bytes(tuple(sorted(_decisive(needed), key=lambda use: -use.size_bytes)), from_start=True)


def drifting_bytes(needed: Sequence[Use]) -> int:
    """The same where nothing is ever placed before the first of those that it shares a moment with, free or not.

    So a chain of equal tensors takes the sum of them. That is how XNNPACK did in 2023.
    """
    return _planned_bytes(tuple(sorted(needed, key=lambda use: -use.size_bytes)), from_start=False)


def align(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _decisive(needed: Sequence[Use]) -> list[Use]:
    """Those that may decide how large the arena is. Most of a model's activations are so small that they cannot, even
    stacked upon all that they share a moment with; to plan these too would take most of the time.
    """
    steps = max((use.last for use in needed), default=0) + 2
    begun, ended = [0] * steps, [0] * steps
    for size, first, last in needed:
        begun[first] += size
        ended[last + 1] += size
    begun, ended = list(accumulate(begun)), list(accumulate(ended))
    least = max(born - gone for born, gone in zip(begun, ended, strict=True))
    return [use for use in needed if begun[use.last] - ended[use.first] >= least]


# The heads of neighbouring cut points mostly have the same decisive activations.
@lru_cache(maxsize=1024)
def _planned_bytes(largest_first: tuple[Use, ...], *, from_start: bool) -> int:
    steps = max((use.last for use in largest_first), default=0) + 1
    placed_at: list[list[tuple[int, int]]] = [[] for _ in range(steps)]
    top = 0
    for size, first, last in largest_first:
        neighbours = sorted({block for step in range(first, last + 1) for block in placed_at[step]})
        start = _best_gap(neighbours, size, 0 if from_start or not neighbours else neighbours[0][0])
        for step in range(first, last + 1):
            placed_at[step].append((start, start + size))
        top = max(top, start + size)
    return top


def _best_gap(neighbours: list[tuple[int, int]], size: int, free_from: int) -> int:
    """The start of the smallest gap between sorted blocks, from ``free_from`` on, that ``size`` fits into, else the end
    of the last.
    """
    best: tuple[int, int] | None = None
    for start, end in neighbours:
        gap = start - free_from
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, free_from)
        free_from = max(free_from, end)
    return best[1] if best else free_from
