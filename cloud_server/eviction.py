"""Whose turn it is to make room when a worker has more memory than it may have: the tail that was idle for longest."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from cloud_server.served_tail import ServedTail
from cloud_server.workers.worker import Worker
from edge_sdk.sizes import format_size

_LOG = logging.getLogger(__name__)


def victim_of(worker: Worker, tails: Iterable[ServedTail], memory_bytes: int) -> ServedTail | None:
    """Which of ``tails`` has to leave ``worker``, as long as that has more than ``memory_bytes``.

    ``None``: none has to, or none can. The newest stays, so do those that are busy.
    """
    if not worker.up or worker.unloading or worker.rss_bytes() <= memory_bytes:
        return None
    here = [tail for tail in tails if tail.worker is worker and tail.loaded is not None]
    newest = max(here, key=lambda tail: tail.arrived_at, default=None)
    idle = [tail for tail in here if tail is not newest and tail.batcher.idle]
    has, may_have = format_size(worker.rss_bytes()), format_size(memory_bytes)
    if not idle:
        if len(here) == 1:
            worker.warn_once(
                f"has {has} with one tail alone, more than the {may_have} that it may have (--worker-memory)"
            )
        return None
    victim = min(idle, key=lambda tail: tail.used_at)
    _LOG.info(
        "the tail of bundle %s leaves %s, which has %s of %s; it comes back when it is asked for",
        victim.digest,
        worker,
        has,
        may_have,
    )
    return victim
