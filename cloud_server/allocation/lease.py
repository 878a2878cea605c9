"""The sign of life of a run: a thread that renews its lease in the registry, so that a killed allocator is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from cloud_server.registry import Registry
from edge_sdk.errors import SplitfleetError

LEASE_S = 10.0
RENEW_EVERY_S = 2.0


class Lease:
    """Renew the lease of a run until the context is left.

    If someone took the run for dead, ``on_loss`` is called, and ``lost`` is true from then on.
    """

    def __init__(self, registry: Registry, run_id: int, *, on_loss: Callable[[], None]) -> None:
        self._registry = registry
        self._run_id = run_id
        self._on_loss = on_loss
        self.lost = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="allocation-lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._done.wait(RENEW_EVERY_S):
            try:
                alive = self._registry.renew_run(self._run_id, lease_s=LEASE_S, now=datetime.now(UTC))
            except SplitfleetError:
                # Out of reach, or unreadable for now: it may be back before the lease runs out; if not, the loop's own
                # next write tells.
                continue
            if not alive:
                self.lost = True
                self._on_loss()
                return
