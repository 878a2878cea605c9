"""Histograms as Prometheus counts them, for one thread that counts often, and others that read now and then.

The client library's own take a lock for each number, and several of them for each request.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence


class Distribution:
    """How many numbers fell below each of ``bounds``, which is ascending and includes a bound in what is below it."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, number: float) -> None:
        """Count a number."""
        self._counts[bisect_left(self._bounds, number)] += 1
        self._sum += number

    def read(self) -> tuple[list[tuple[float, int]], float]:
        """Each bound, infinity at last, with how many numbers are at most as large; and the sum of all."""
        buckets, below = [], 0
        for bound, count in zip((*self._bounds, math.inf), tuple(self._counts), strict=True):
            below += count
            buckets.append((bound, below))
        return buckets, self._sum
