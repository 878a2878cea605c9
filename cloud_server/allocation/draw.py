"""Which model a device tries next: the strategy, a seam of the allocation core.

A strategy sees one device's own history and nothing of the fleet, so its choice cannot depend on the order in which
devices register or answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cloud_server.allocation.trial import Trial


@dataclass(frozen=True, kw_only=True)
class History:
    """What a device has behind it, and before it: ``models`` are those it has not had, sorted, never empty.

    A trial that was broken off is not among ``trials``, so its model is drawn again.
    """

    device_id: str
    trials: Sequence[Trial]
    models: Sequence[str]


class Strategy(Protocol):
    """Chooses among ``history.models``."""

    def choose(self, history: History) -> str: ...


@dataclass(frozen=True, kw_only=True)
class RandomDraw:
    """Draw uniformly; the draw depends on (seed, device id, trial number) alone.

    A hash instead of a generator: there is no state that the order of the draws could move.
    """

    seed: int

    def choose(self, history: History) -> str:
        number = len(history.trials) + 1
        digest = hashlib.sha256(f"{self.seed}/{number}/{history.device_id}".encode()).digest()
        return history.models[int.from_bytes(digest[:16], "big") % len(history.models)]
