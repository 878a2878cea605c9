"""Batches of one tail: a bounded, fair queue of requests, and the thread that runs what waits there together.

An engine that becomes free takes what is waiting, up to the largest batch. It waits for more only when there were
several requests as it ended its last batch, and then at most for a moment: a lone caller is never held up. What is
computed, and how requests become one batch, is the tail's business (:mod:`cloud_server.tails`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

from cloud_server.fair_queue import FairQueue
from edge_sdk.errors import OverloadedError
from edge_sdk.wire import Tensor

_LOG = logging.getLogger(__name__)
_LEAST_RETRY_S = 0.05
_SMOOTHING = 0.1

Features = Sequence[Tensor]
Result = tuple[Tensor, ...]
Compute = Callable[[Sequence[Features]], Sequence[Result]]


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """``max_batch`` samples run together; ``delay_s`` is how long a free engine waits for them at most.

    ``queued`` requests wait for one tail, ``queued_per_device`` of them of one device; beyond it they are refused.
    """

    max_batch: int = 32
    delay_s: float = 0.002
    queued: int = 128
    queued_per_device: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """The outputs of one request and where its time went: ``batch_wait_s`` for others to join it while the engine was
    free, ``compute_s`` in the engine, together with ``batch`` samples in all.
    """

    outputs: Result
    batch_wait_s: float
    compute_s: float
    batch: int


Done = Callable[[Computed | Exception], None]


@dataclass(eq=False, kw_only=True, slots=True)
class _Member:
    features: Features
    begin: Callable[[], None]
    done: Done
    flush: Callable[[], None]
    joined_at: float

    @property
    def samples(self) -> int:
        return int(self.features[0].data.shape[0])

    def refusal(self) -> Exception | None:
        """Why it must not run any more."""
        try:
            self.begin()
        except Exception as error:
            return error
        return None


class Batcher:
    """The queue of one tail and the thread that works it off with ``compute``.

    ``compute`` gives each of several requests its own outputs, or raises; then they are run one by one, so that only
    those that fail by themselves do.
    """

    def __init__(self, name: str, compute: Compute, limits: BatchLimits) -> None:
        self.name = name
        self._compute = compute
        self._limits = limits
        self._queue: FairQueue[_Member] = FairQueue(capacity=limits.queued, per_caller=limits.queued_per_device)
        self._changed = Condition()
        self._closed = False
        self._last: Callable[[], None] = lambda: None
        # How many requests may be there in the next turn, and how many it takes to wake the thread.
        self._together = 1
        self._wanted = 1
        self._mean_s = 0.0
        # A daemon: a tail that never returns must not keep the process from ending.
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def submit(
        self,
        caller: Hashable,
        features: Features,
        *,
        begin: Callable[[], None],
        done: Done,
        flush: Callable[[], None],
    ) -> bool:
        """Queue a request of ``caller``. ``begin`` is called right before it runs, and raises to prevent that; ``done``
        gets the outcome, in some thread, exactly once, and ``flush`` comes after the outcomes of a batch: whoever is to
        be woken is so once. None may block or take long; ``done`` and ``flush`` must not raise.

        ``False``: closed, nothing will happen. Raises :class:`OverloadedError` when too many wait already.
        """
        member = _Member(features=features, begin=begin, done=done, flush=flush, joined_at=time.monotonic())
        ended: list[tuple[_Member, Exception]] = []
        with self._changed:
            if self._closed:
                return False
            if self._queue.is_full(caller):
                ended = self._make_room(caller)
            refusal = self._overloaded() if self._queue.is_full(caller) else None
            if refusal is None:
                self._queue.put(caller, member)
                if len(self._queue) >= self._wanted:
                    self._changed.notify()
        for other, error in ended:
            self._end(other, error)
            other.flush()
        if refusal is not None:
            raise refusal
        return True

    def close(self, last: Callable[[], None]) -> None:
        """Run what is queued, then ``last``, then end the thread; does not wait for it."""
        with self._changed:
            self._closed = True
            self._last = last
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread ended within ``timeout_s`` after :meth:`close`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _make_room(self, caller: Hashable) -> list[tuple[_Member, Exception]]:
        """Take out those that nobody waits for, else the newest of a greedier caller: to be told without the lock."""
        refusals: dict[_Member, Exception] = {}

        def is_vain(member: _Member) -> bool:
            refusal = member.refusal()
            if refusal is not None:
                refusals[member] = refusal
            return refusal is not None

        self._queue.discard(is_vain)
        if self._queue.is_full(caller):
            displaced = self._queue.make_room(caller)
            if displaced is not None:
                refusals[displaced] = self._overloaded()
        return list(refusals.items())

    def _overloaded(self) -> OverloadedError:
        waiting = len(self._queue)
        retry_after_s = max(_LEAST_RETRY_S, waiting * self._mean_s)
        return OverloadedError(
            f"{self.name}: {waiting} requests are waiting, which is the limit or this device's share of it; "
            f"retry in {retry_after_s:.2f} s",
            retry_after_s=retry_after_s,
        )

    # All below runs in the thread.

    def _work(self) -> None:
        # Each turn in a call of its own: else its tensors would stay alive until the next one.
        while self._turn():
            pass
        try:
            self._last()
        except Exception:
            _LOG.exception("%s: the end failed", self.name)

    def _turn(self) -> bool:
        """Run one batch; ``False``: closed, and nothing is left."""
        members: list[_Member] = []
        refused: list[tuple[_Member, Exception]] = []
        with self._changed:
            self._wait_for(1, None)
            if not len(self._queue):
                return False
            free_at = time.monotonic()
            if self._together > 1 and self._limits.delay_s > 0:
                self._wait_for(min(self._together, self._limits.max_batch), self._limits.delay_s)
            samples = 0
            while len(self._queue) and (not samples or samples + self._queue.first().samples <= self._limits.max_batch):
                member = self._queue.pop()
                refusal = member.refusal()
                if refusal is not None:
                    refused.append((member, refusal))
                    continue
                member.joined_at = max(member.joined_at, free_at)
                members.append(member)
                samples += member.samples
        for member, refusal in refused:
            self._end(member, refusal)
            member.flush()
        if members:
            began = time.perf_counter()
            self._run(members)
            self._mean_s += _SMOOTHING * ((time.perf_counter() - began) / len(members) - self._mean_s)
        return True

    def _wait_for(self, wanted: int, timeout_s: float | None) -> None:
        self._wanted = wanted
        self._changed.wait_for(lambda: len(self._queue) >= wanted or self._closed, timeout_s)
        self._wanted = 1

    def _run(self, members: Sequence[_Member]) -> None:
        began_at = time.monotonic()
        try:
            results = self._compute([member.features for member in members])
        except Exception as error:
            if len(members) == 1:
                self._end(members[0], error)
                members[0].flush()
                return
            _LOG.warning("%s: a batch of %d requests failed, they are run one by one", self.name, len(members))
            for member in members:
                refusal = member.refusal()
                if refusal is None:
                    self._run([member])
                else:
                    self._end(member, refusal)
                    member.flush()
            return
        compute_s = time.monotonic() - began_at
        # Before anybody hears of it: those that wait now are others than these, who may come back.
        self._together = len(members) + len(self._queue)
        batch = sum(member.samples for member in members)
        for member, outputs in zip(members, results, strict=True):
            wait_s = began_at - member.joined_at
            self._end(member, Computed(outputs=outputs, batch_wait_s=wait_s, compute_s=compute_s, batch=batch))
        for flush in {member.flush for member in members}:
            flush()

    def _end(self, member: _Member, outcome: Computed | Exception) -> None:
        try:
            member.done(outcome)
        except Exception:
            _LOG.exception("%s: an outcome could not be delivered", self.name)
