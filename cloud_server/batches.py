"""Batches of one tail: a bounded, fair queue of requests, and what becomes of it as the tail's engine becomes free.

An engine that becomes free takes what is waiting, up to the largest batch. It waits for more only when there were
several requests as it ended its last batch, and then at most for a moment: a lone caller is never held up.

All of it happens in the I/O thread, and nothing waits: where a batch runs, and that a tail may have no engine for a
while, is the business of :mod:`cloud_server.tails`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from cloud_server.fair_queue import FairQueue, QueueLimits
from cloud_server.loop import Loop, Timer
from cloud_server.tail_signature import Features, Result
from cloud_server.workers.line import Ran
from edge_sdk.errors import OverloadedError
from edge_sdk.sizes import format_size

_LOG = logging.getLogger(__name__)
_LEAST_RETRY_S = 0.05
# Of a tail that has no engine yet: loading takes seconds.
_LOADING_RETRY_S = 1.0
_SMOOTHING = 0.1
# Under overload every request meets a full queue: if each asked all that wait there, a refusal would cost more than a
# result does.
_SWEEP_EVERY_S = 0.01

Run = Callable[[Sequence[Features], int, Ran], None]


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """``max_batch`` samples run together; ``delay_s`` is how long a free engine waits for them at most.

    ``queued`` requests wait for one tail, ``queued_per_device`` of them of one device; beyond it they are refused. So
    are features of more than ``queued_bytes`` in all, and ``queued_bytes_per_device``, except of one that waits alone.
    """

    max_batch: int = 32
    delay_s: float = 0.002
    queued: int = 128
    queued_per_device: int = 64
    queued_bytes: int = 256 * 1024 * 1024
    queued_bytes_per_device: int = 64 * 1024 * 1024

    def of_the_queue(self) -> QueueLimits:
        """Those of them that are about what waits."""
        return QueueLimits(
            items=self.queued,
            items_per_caller=self.queued_per_device,
            size_bytes=self.queued_bytes,
            size_bytes_per_caller=self.queued_bytes_per_device,
        )


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
    samples: int
    begin: Callable[[], None]
    done: Done
    joined_at: float

    def refusal(self) -> Exception | None:
        """Why it must not run any more."""
        try:
            self.begin()
        except Exception as error:
            return error
        return None


class Batcher:
    """The queue of one tail. Its requests wait until :meth:`attach` says how batches are run.

    An engine gives each of several requests its own outputs, or fails; then they are run one by one, so that only those
    that fail by themselves do. :attr:`completed` counts the batches that did not fail.
    """

    def __init__(self, name: str, limits: BatchLimits, loop: Loop) -> None:
        self.name = name
        self._limits = limits
        self._loop = loop
        self._queue: FairQueue[_Member] = FairQueue(limits.of_the_queue())
        self._run: Run | None = None
        self._running: Sequence[_Member] = ()
        self._began_at = 0.0
        # Since when nobody waits for what runs.
        self._vain_since: float | None = None
        # Those of a batch that failed, to be run one by one before anything else.
        self._alone: deque[_Member] = deque()
        self._last: Callable[[], None] | None = None
        # How many requests may be there in the next turn; since when the engine is free for it; when it stops waiting.
        self._together = 1
        self._free_at: float | None = None
        self._delay: Timer | None = None
        self._due = False
        self._mean_s = 0.0
        # When all that wait may be asked again whether anybody waits for them.
        self._sweep_at = 0.0
        self.completed = 0

    @property
    def depth(self) -> int:
        """How many requests wait. May be asked from any thread."""
        return len(self._queue) + len(self._alone)

    @property
    def running(self) -> bool:
        """Whether a batch is in the engine."""
        return bool(self._running)

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._queue and not self._alone

    def runs_in_vain(self, for_s: float) -> bool:
        """Whether nobody has waited for the batch in the engine for ``for_s``, as far as this was asked meanwhile."""
        if not self._running or any(member.refusal() is None for member in self._running):
            self._vain_since = None
            return False
        now = self._loop.clock()
        if self._vain_since is None:
            self._vain_since = now
        return now - self._vain_since >= for_s

    def submit(self, caller: Hashable, features: Features, *, begin: Callable[[], None], done: Done) -> None:
        """Queue a request of ``caller``. ``begin`` is called right before it runs, and raises to prevent that; ``done``
        gets the outcome, exactly once, but not from in here.

        Raises :class:`OverloadedError` when too many wait already.
        """
        queue = self._queue
        size_bytes = sum(tensor.data.nbytes for tensor in features)
        if queue.is_full(caller, size_bytes):
            self._make_room(caller, size_bytes)
            if queue.is_full(caller, size_bytes):
                raise self._overloaded()
        # Those of a tail that is not known yet are checked later, before they can run.
        samples = features[0].data.shape[0] if features and features[0].data.ndim else 0
        queue.put(
            caller,
            _Member(features=features, samples=samples, begin=begin, done=done, joined_at=self._loop.clock()),
            size_bytes,
        )
        self._look_soon()

    def attach(self, run: Run) -> None:
        """Have batches run by ``run`` from now on, which hears of one when the one before has ended."""
        self._run = run
        self._look_soon()

    def detach(self, error: Exception) -> None:
        """There is no engine for the time being; what was in it ends in ``error``, what waits goes on waiting."""
        self._run = None
        lost, self._running = self._running, ()
        for member in lost:
            self._end(member, error)

    def refuse(self, reason_of: Callable[[Features], Exception | None]) -> None:
        """End those that wait and for whose features there is a reason to."""
        reasons: dict[_Member, Exception] = {}

        def is_vain(member: _Member) -> bool:
            reason = reason_of(member.features)
            if reason is not None:
                reasons[member] = reason
            return reason is not None

        self._queue.discard(is_vain)
        self._alone = deque(member for member in self._alone if not is_vain(member))
        for member, reason in reasons.items():
            self._end(member, reason)

    def close(self, last: Callable[[], None]) -> None:
        """Run what is queued, then call ``last``."""
        self._last = last
        self._look_soon()

    def _make_room(self, caller: Hashable, size_bytes: int) -> None:
        """Take out those that nobody waits for, if nobody has looked for them just now, else the newest of greedier
        callers.
        """
        refusals: dict[_Member, Exception] = {}

        def is_vain(member: _Member) -> bool:
            refusal = member.refusal()
            if refusal is not None:
                refusals[member] = refusal
            return refusal is not None

        now = self._loop.clock()
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_EVERY_S
            self._queue.discard(is_vain)
        for displaced in self._queue.make_room(caller, size_bytes):
            refusals[displaced] = self._overloaded()
        for member, error in refusals.items():
            self._end(member, error)

    def _overloaded(self) -> OverloadedError:
        waiting = len(self._queue)
        least_s = _LEAST_RETRY_S if self._run is not None else _LOADING_RETRY_S
        retry_after_s = max(least_s, waiting * self._mean_s)
        return OverloadedError(
            f"{self.name}: {waiting} requests of {format_size(self._queue.size_bytes)} are waiting: with this one it "
            f"would be more than the limit or this device's share of it; retry in {retry_after_s:.2f} s",
            retry_after_s=retry_after_s,
        )

    def _look_soon(self) -> None:
        # Not at once: what came in together should run together.
        if not self._due and not self._running:
            self._due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Begin a batch if it is time for one."""
        self._due = False
        while not self._running and self._run is not None:
            if self._alone:
                members = self._take_alone()
            elif self._queue:
                if self._must_wait():
                    return
                members = self._take()
            else:
                break
            if members:
                self._begin(members)
        if self.idle and self._last is not None:
            last, self._last = self._last, None
            last()

    def _must_wait(self) -> bool:
        now = self._loop.clock()
        if self._free_at is None:
            self._free_at = now
        wanted = min(self._together, self._limits.max_batch)
        closing = self._last is not None
        wait_s = self._free_at + self._limits.delay_s - now
        if len(self._queue) < wanted and wait_s > 0 and not closing:
            if self._delay is None:
                self._delay = self._loop.call_later(wait_s, self._delay_is_over)
            return True
        return False

    def _delay_is_over(self) -> None:
        self._delay = None
        self._together = 1
        self._look()

    def _take(self) -> list[_Member]:
        """The members of the next batch; those that must not run any more end here."""
        queue, most = self._queue, self._limits.max_batch
        free_at = self._free_at or 0.0
        self._free_at = None
        if self._delay is not None:
            self._delay.cancel()
            self._delay = None
        members: list[_Member] = []
        refused: list[tuple[_Member, Exception]] = []
        samples = 0
        while queue and (not samples or samples + queue.first().samples <= most):
            member = queue.pop()
            refusal = member.refusal()
            if refusal is not None:
                refused.append((member, refusal))
                continue
            if member.joined_at < free_at:
                member.joined_at = free_at
            members.append(member)
            samples += member.samples
        for member, refusal in refused:
            self._end(member, refusal)
        return members

    def _take_alone(self) -> list[_Member]:
        member = self._alone.popleft()
        refusal = member.refusal()
        if refusal is None:
            return [member]
        self._end(member, refusal)
        return []

    def _begin(self, members: list[_Member]) -> None:
        assert self._run is not None
        self._running = members
        self._began_at = self._loop.clock()
        self._vain_since = None
        samples = sum(member.samples for member in members)
        self._run([member.features for member in members], samples, self._ran)

    def _ran(self, outcome: list[Result] | Exception, compute_s: float) -> None:
        members, self._running = self._running, ()
        ended_at = self._loop.clock()
        self._mean_s += _SMOOTHING * ((ended_at - self._began_at) / len(members) - self._mean_s)
        # Before anybody hears of it: those that wait now are others than these, who may come back.
        self._together = len(members) + len(self._queue)
        if not isinstance(outcome, Exception):
            self.completed += 1
            batch = sum(member.samples for member in members)
            for member, outputs in zip(members, outcome, strict=True):
                wait_s = self._began_at - member.joined_at
                self._end(member, Computed(outputs=outputs, batch_wait_s=wait_s, compute_s=compute_s, batch=batch))
        elif len(members) == 1:
            self._end(members[0], outcome)
        else:
            _LOG.warning("%s: a batch of %d requests failed, they are run one by one", self.name, len(members))
            self._alone.extend(members)
        self._look_soon()

    def _end(self, member: _Member, outcome: Computed | Exception) -> None:
        try:
            member.done(outcome)
        except Exception:
            _LOG.exception("%s: an outcome could not be delivered", self.name)
