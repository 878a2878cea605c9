"""What a run works with: what is asked of it, and the parties that it talks to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cloud_server.allocation.candidates import Candidates
from cloud_server.allocation.fleet import Fleet
from cloud_server.allocation.observer import Observer
from cloud_server.allocation.settings import AllocationSettings
from cloud_server.allocation.task_data import TaskData
from cloud_server.registry import Registry


@dataclass(frozen=True, kw_only=True, eq=False)
class Means:
    """``abort`` makes everything fail that is under way on the fleet and among the candidates."""

    settings: AllocationSettings
    fleet: Fleet
    candidates: Candidates
    registry: Registry
    data: TaskData
    observer: Observer
    abort: Callable[[], None]
