"""The workers of one server: who gets the next tail, and who is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cloud_server.loop import Loop
from cloud_server.workers.launch import Launch
from cloud_server.workers.worker import Backoff, Worker


@dataclass(frozen=True, kw_only=True)
class CrewLimits:
    """How many ``workers``, the ``memory_bytes`` of each, and how they are started again."""

    workers: int = 1
    memory_bytes: int = 2**63 - 1
    backoff: Backoff = field(default_factory=Backoff)


class Crew:
    """The workers, which start with :meth:`start`; the callbacks are those of a :class:`Worker`."""

    def __init__(
        self,
        loop: Loop,
        launch: Launch,
        limits: CrewLimits,
        *,
        on_up: Callable[[Worker], None],
        on_down: Callable[[Worker, str], None],
    ) -> None:
        self._on_up = on_up
        self._workers = [
            Worker(number, loop=loop, launch=launch, backoff=limits.backoff, on_up=self._up, on_down=on_down)
            for number in range(1, limits.workers + 1)
        ]
        self._waiting: list[Callable[[Worker], None]] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def start(self) -> None:
        """Start all of them."""
        for worker in self._workers:
            worker.start()

    def with_one(self, preferred: Worker | None, use: Callable[[Worker], None]) -> None:
        """Call ``use`` with ``preferred`` if it is up, else with whoever has least memory in use, at the latest when
        one is up.
        """
        up = [worker for worker in self._workers if worker.up]
        if preferred in up and preferred is not None:
            use(preferred)
        elif up:
            use(min(up, key=Worker.rss_bytes))
        else:
            self._waiting.append(use)

    def close(self, timeout_s: float) -> None:
        """End all of them; those that have not within ``timeout_s`` are killed."""
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def _up(self, worker: Worker) -> None:
        waiting, self._waiting = self._waiting, []
        for use in waiting:
            self.with_one(worker, use)
        self._on_up(worker)
