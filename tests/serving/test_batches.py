"""Batches: each caller gets its own rows, nobody's failure is another's, turns go round between devices."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_server.batches import Batcher, BatchLimits
from cloud_server.fair_queue import FairQueue, QueueLimits
from cloud_server.loop import Loop
from edge_sdk.errors import DeadlineExceededError, OverloadedError, TailFailedError, from_wire
from edge_sdk.wire import MessageType, Tensor

PATIENCE_S = 20


class Bench:
    """A batcher in an event loop whose clock the test sets, and an engine that ends a batch when it is told to."""

    def __init__(self, **limits):
        self.now = 100.0
        self.loop = Loop(clock=lambda: self.now)
        self.batches = []
        self.poison = set()
        self.outcomes = {}
        self._ran = None
        self.batcher = Batcher("bench", BatchLimits(**limits), self.loop)
        self.batcher.attach(self.run)

    def run(self, requests, samples, ran):
        assert self._ran is None, "one batch at a time"
        assert samples == sum(features[0].data.shape[0] for features in requests)
        self.batches.append([int(features[0].data.flat[0]) for features in requests])
        self._ran = requests, ran

    def end(self):
        """The engine is through with its batch."""
        self.now += 0.01
        (requests, ran), self._ran = self._ran, None
        poisoned = self.poison & set(self.batches[-1])
        ran(ValueError("poisoned") if poisoned else [tuple(features) for features in requests], 0.01)
        self.loop.run_soon()

    def end_all(self):
        """The engine runs on until nothing is left to run."""
        self.loop.run_soon()
        while self._ran is not None:
            self.end()

    def wait(self, seconds):
        """Time passes."""
        self.now += seconds
        self.loop.wait(self.now)

    def submit(self, caller, number, *, samples=1, begin=lambda: None):
        """Queue a request; what is told at once runs together."""

        def done(outcome):
            assert number not in self.outcomes
            self.outcomes[number] = outcome

        data = np.full((samples, 2), number, np.int32)
        self.batcher.submit(caller, [Tensor(name="feature_0", data=data)], begin=begin, done=done)

    def hold(self):
        """Have the engine busy with a request of nobody's."""
        self.submit("nobody", 0)
        self.loop.run_soon()
        assert self.batches == [[0]]


@pytest.fixture
def bench():
    made = []

    def make(**limits):
        made.append(Bench(**({"delay_s": 0.0} | limits)))
        return made[-1]

    yield make
    for each in made:
        each.loop.close()


def test_what_waits_when_the_engine_becomes_free_runs_together_up_to_the_largest_batch(bench):
    it = bench(max_batch=4)
    it.hold()
    for number in range(1, 7):
        it.submit("cam", number)
    it.end_all()
    assert it.batches == [[0], [1, 2, 3, 4], [5, 6]]
    assert [it.outcomes[number].batch for number in range(7)] == [1, 4, 4, 4, 4, 2, 2]
    assert all(it.outcomes[number].compute_s > 0 <= it.outcomes[number].batch_wait_s for number in range(7))


def test_requests_of_several_samples_are_never_torn_and_count_as_that_many(bench):
    it = bench(max_batch=4)
    it.hold()
    for number, samples in ((1, 3), (2, 1), (3, 3), (4, 9), (5, 1)):
        it.submit("cam", number, samples=samples)
    it.end_all()
    # One that is larger than the largest batch runs alone.
    assert it.batches == [[0], [1, 2], [3], [4], [5]]
    assert it.outcomes[4].outputs[0].data.shape == (9, 2)


def test_turns_go_round_between_callers(bench):
    it = bench(max_batch=3)
    it.hold()
    for number in range(1, 7):
        it.submit("greedy", number)
    it.submit("meek", 10)
    it.submit("shy", 20)
    it.end_all()
    assert it.batches == [[0], [1, 10, 20], [2, 3, 4], [5, 6]]


def test_a_failed_batch_is_run_one_by_one_and_only_the_culprit_fails(bench):
    it = bench(max_batch=8)
    it.hold()
    for number in range(1, 6):
        it.submit("cam", number)
    it.poison = {3}
    it.end_all()
    assert it.batches == [[0], [1, 2, 3, 4, 5], [1], [2], [3], [4], [5]]
    assert {number for number, outcome in it.outcomes.items() if isinstance(outcome, Exception)} == {3}
    assert str(it.outcomes[3]) == "poisoned"
    assert it.outcomes[4].outputs[0].data.tolist() == [[4, 4]]


def test_a_member_that_must_not_run_any_more_is_left_out_of_its_batch(bench):
    it = bench(max_batch=8)

    def too_late():
        raise DeadlineExceededError("too late")

    it.hold()
    for number in range(1, 5):
        it.submit("cam", number, begin=too_late if number == 2 else lambda: None)
    it.end_all()
    assert it.batches == [[0], [1, 3, 4]]
    assert isinstance(it.outcomes[2], DeadlineExceededError)


def test_one_that_expires_while_its_failed_batch_is_run_anew_is_not_run_again(bench):
    it = bench(max_batch=8)
    it.poison = {1}

    def begin():
        if [1, 2] in it.batches:
            raise DeadlineExceededError("too late")

    it.hold()
    it.submit("cam", 1)
    it.submit("cam", 2, begin=begin)
    it.end_all()
    assert it.batches == [[0], [1, 2], [1]]
    assert isinstance(it.outcomes[2], DeadlineExceededError)


def test_a_full_queue_is_told_to_whoever_asks_most(bench):
    it = bench(queued=4, queued_per_device=3)
    it.hold()
    for number in (1, 2, 3):
        it.submit("greedy", number)
    with pytest.raises(OverloadedError, match="this device's share"):
        it.submit("greedy", 4)
    it.submit("meek", 10)
    with pytest.raises(OverloadedError) as refused:
        it.submit("greedy", 5)
    assert refused.value.details["retry_after_s"] > 0
    # The queue is full, but not of this one's requests: the newest of the greediest has to go.
    it.submit("shy", 20)
    assert isinstance(it.outcomes.pop(3), OverloadedError)
    # All have about as many by now: this is one too many.
    it.submit("fourth", 30)
    assert isinstance(it.outcomes.pop(2), OverloadedError)
    with pytest.raises(OverloadedError):
        it.submit("fifth", 40)
    it.end_all()
    assert it.batches == [[0], [1, 10, 20, 30]]


def test_those_that_nobody_waits_for_make_room_first(bench):
    it = bench(queued=2, queued_per_device=2)
    over = []

    def begin():
        if over:
            raise DeadlineExceededError("too late")

    it.hold()
    it.submit("cam", 1, begin=begin)
    it.submit("cam", 2)
    over.append(True)
    it.submit("cam", 3)
    assert isinstance(it.outcomes[1], DeadlineExceededError)
    it.end_all()
    assert it.batches == [[0], [2, 3]]


def test_a_refusal_does_not_ask_all_that_wait_each_time(bench):
    it = bench(queued=2, queued_per_device=2)
    asked = []
    over = []

    def begin():
        asked.append(1)
        if over:
            raise DeadlineExceededError("too late")

    it.hold()
    for number in (1, 2):
        it.submit("cam", number, begin=begin)
    for number in range(100):
        with pytest.raises(OverloadedError):
            it.submit("cam", 10 + number)
    assert len(asked) == 2
    over.append(True)
    it.wait(0.02)
    it.submit("cam", 3)
    assert isinstance(it.outcomes[1], DeadlineExceededError)
    assert isinstance(it.outcomes[2], DeadlineExceededError)
    it.end_all()
    assert it.batches == [[0], [3]]


def test_a_lone_request_does_not_wait_for_others(bench):
    # Were it to, it would for longer than anybody waits here.
    it = bench(delay_s=10_000.0)
    for number in range(5):
        it.submit("cam", number)
        it.end_all()
    assert it.batches == [[0], [1], [2], [3], [4]]


def test_after_several_together_it_waits_for_as_many_again(bench):
    it = bench(delay_s=10_000.0, max_batch=3)
    it.hold()
    for number in (1, 2, 3, 4):
        it.submit(f"cam-{number}", number)
    it.end_all()
    assert it.batches == [[0], [1, 2, 3]]
    # Four were there in the last turn, of which three make a batch: 4 waits for two more.
    it.submit("cam-1", 5)
    it.submit("cam-2", 6)
    it.end_all()
    assert it.batches == [[0], [1, 2, 3], [4, 5, 6]]


def test_when_no_more_come_it_runs_what_there_is(bench):
    it = bench(delay_s=0.002)
    it.hold()
    it.submit("cam-1", 1)
    it.submit("cam-2", 2)
    it.end_all()
    # Three were there: it waits for one more, though not for long.
    it.wait(0.001)
    assert it.batches == [[0]]
    it.wait(0.0011)
    assert it.batches == [[0], [1, 2]]
    it.end_all()
    assert it.outcomes[1].batch_wait_s == pytest.approx(0.0021)
    it.submit("cam-1", 3)
    it.end_all()
    it.wait(0.0021)
    it.end_all()
    # That one was alone: the next one is not held up.
    it.submit("cam-1", 4)
    it.end_all()
    assert it.batches == [[0], [1, 2], [3], [4]]
    assert it.outcomes[4].batch_wait_s == 0


def test_closing_runs_what_is_queued_without_waiting_for_more(bench):
    it = bench(delay_s=10_000.0)
    it.hold()
    for number in (1, 2, 3):
        it.submit("cam", number)
    ended = []
    it.batcher.close(last=lambda: ended.append(dict(it.outcomes)))
    assert not ended
    it.end_all()
    (outcomes,) = ended
    assert outcomes.keys() == {0, 1, 2, 3}
    assert it.batches == [[0], [1, 2, 3]]


def test_closing_one_that_is_idle_ends_it(bench):
    it = bench()
    ended = []
    it.batcher.close(last=lambda: ended.append(True))
    it.loop.run_soon()
    assert ended == [True]


def test_without_an_engine_requests_wait_and_what_it_was_at_fails(bench):
    it = bench()
    it.hold()
    it.submit("cam", 1)
    it.batcher.detach(TailFailedError("it died"))
    it.loop.run_soon()
    assert isinstance(it.outcomes[0], TailFailedError)
    assert 1 not in it.outcomes
    assert it.batcher.depth == 1
    it._ran = None
    it.submit("cam", 2)
    it.loop.run_soon()
    assert it.batches == [[0]]
    it.batcher.attach(it.run)
    it.end_all()
    assert it.batches == [[0], [1, 2]]
    assert it.batcher.idle


def test_those_of_a_failed_batch_that_were_not_run_again_yet_are_by_the_next_engine(bench):
    it = bench()
    it.poison = {1}
    it.hold()
    for number in (1, 2, 3):
        it.submit("cam", number)
    it.end()
    it.end()
    assert it.batches == [[0], [1, 2, 3], [1]]
    it.batcher.detach(TailFailedError("it died"))
    it._ran = None
    it.batcher.attach(it.run)
    it.end_all()
    assert it.batches == [[0], [1, 2, 3], [1], [2], [3]]
    assert isinstance(it.outcomes[1], TailFailedError)


def test_what_waits_can_be_refused_for_a_reason(bench):
    it = bench()
    it.hold()
    for number in (1, 2, 3):
        it.submit("cam", number)
    it.batcher.refuse(lambda features: ValueError("odd") if features[0].data.flat[0] % 2 else None)
    assert [number for number, outcome in it.outcomes.items() if isinstance(outcome, ValueError)] == [1, 3]
    it.end_all()
    assert it.batches == [[0], [2]]


def test_a_batch_runs_in_vain_once_nobody_waits_for_it(bench):
    it = bench()
    over = []

    def begin():
        if over:
            raise DeadlineExceededError("too late")

    it.submit("cam", 1, begin=begin)
    it.loop.run_soon()
    it.now += 100
    assert not it.batcher.runs_in_vain(30)
    over.append(True)
    assert not it.batcher.runs_in_vain(30)
    it.now += 29
    assert not it.batcher.runs_in_vain(30)
    it.now += 1
    assert it.batcher.runs_in_vain(30)
    it.end_all()
    assert not it.batcher.runs_in_vain(30)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_queue_is_bounded_ordered_and_fair(data):
    limits = QueueLimits(
        items=data.draw(st.integers(1, 8)),
        items_per_caller=data.draw(st.integers(1, 8)),
        size_bytes=data.draw(st.integers(1, 20)),
        size_bytes_per_caller=data.draw(st.integers(1, 20)),
    )
    queue = FairQueue(limits)
    waiting = {}
    passed_over = {}
    for number in range(data.draw(st.integers(0, 40))):
        caller = data.draw(st.sampled_from("abc"))
        if data.draw(st.booleans()):
            size = data.draw(st.integers(0, 12))
            if queue.is_full(caller, size):
                before = {other: list(items) for other, items in waiting.items()}
                displaced = queue.make_room(caller, size)
                for other, *newest in displaced:
                    assert other != caller
                    assert waiting[other].pop() == tuple(newest)
                    if not waiting[other]:
                        for others in passed_over.values():
                            others.discard(other)
                if queue.is_full(caller, size):
                    # Nobody lost anything in vain.
                    assert displaced == []
                    continue
                # Each had more than the caller will have.
                own = [*waiting.get(caller, ()), (number, size)]
                for other in {other for other, *_ in displaced}:
                    assert len(before[other]) > len(own) or bytes_of(before[other]) > bytes_of(own)
            queue.put(caller, (caller, number, size), size)
            waiting.setdefault(caller, deque()).append((number, size))
        elif len(queue):
            first = queue.first()
            assert queue.pop() == first
            turn, *rest = first
            assert waiting[turn].popleft() == tuple(rest)
            # Whoever waited through this caller's last turn came before its next.
            assert not passed_over.get(turn)
            for others in passed_over.values():
                others.discard(turn)
            passed_over[turn] = {other for other, items in waiting.items() if items and other != turn}
        assert len(queue) == sum(len(items) for items in waiting.values()) <= limits.items
        assert queue.size_bytes == sum(map(bytes_of, waiting.values()))
        assert queue.size_bytes <= limits.size_bytes or len(queue) == 1
        for caller, items in waiting.items():
            assert queue.waiting_of(caller) == len(items) <= limits.items_per_caller
            assert bytes_of(items) <= limits.size_bytes_per_caller or len(items) == 1
    vain = queue.discard(lambda item: item[1] % 2 == 0)
    assert sorted(vain) == sorted((c, *item) for c, items in waiting.items() for item in items if item[0] % 2 == 0)
    kept = [item for items in waiting.values() for item in items if item[0] % 2]
    assert (len(queue), queue.size_bytes) == (len(kept), bytes_of(kept))


def bytes_of(items):
    return sum(size for _, size in items)


def test_large_requests_are_bounded_by_their_bytes(bench):
    """A sample has 8 bytes here."""
    it = bench(max_batch=1000, queued_bytes=800, queued_bytes_per_device=480)
    it.hold()
    it.submit("greedy", 1, samples=40)
    it.submit("greedy", 2, samples=20)
    with pytest.raises(OverloadedError, match="2 requests of 480 B are waiting"):
        it.submit("greedy", 3)
    it.submit("meek", 10, samples=30)
    # The newest of who has most has to go, and only that.
    it.submit("shy", 20, samples=15)
    assert isinstance(it.outcomes.pop(2), OverloadedError)
    # This one would have most itself.
    with pytest.raises(OverloadedError):
        it.submit("fourth", 30, samples=45)
    it.end_all()
    assert it.batches == [[0], [1, 10, 20]]


def test_one_that_waits_alone_may_have_any_size(bench):
    it = bench(queued_bytes=800, queued_bytes_per_device=480)
    it.hold()
    it.submit("cam", 1, samples=500)
    with pytest.raises(OverloadedError):
        it.submit("other", 2, samples=501)
    it.end_all()
    assert it.batches == [[0], [1]]


REQUESTS = st.tuples(st.integers(0, 3), st.integers(1, 5), st.sampled_from(["ok", "ok", "ok", "poison", "late"]))


def test_each_caller_gets_its_own_rows(echoing_tail):
    """Unique payloads through a real ROUTER, some of which fail or are too late: all ends are the right ones."""
    running, digest, engine = echoing_tail
    peers = [running.peer() for _ in range(4)]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(REQUESTS, min_size=1, max_size=24))
    def check(plan):
        ask_and_check(plan, peers, digest, engine)

    check()


def ask_and_check(plan, peers, digest, engine):
    engine.gate.clear()
    engine.samples.clear()
    sent = {}
    for number, (device, samples, kind) in enumerate(plan):
        peer = peers[device]
        first = number * 10 + 1000 * (kind == "poison")
        rows = np.arange(first, first + samples, dtype=np.int32)
        feature = Tensor(name="feature_0", data=np.stack([rows, -rows], axis=1))
        request = peer.begin_infer(digest, feature, budget_s=0.0 if kind == "late" else None)
        sent[peer, request] = kind, feature.data
    engine.gate.set()
    for device, peer in enumerate(peers):
        for _ in range(sum(asked_by == device for asked_by, _, _ in plan)):
            answer = peer.receive()
            kind, payload = sent.pop((peer, answer.request_id))
            if kind == "ok":
                assert answer.type is MessageType.RESULT
                assert answer.tensors[0].data.tolist() == payload.tolist()
            else:
                expected = TailFailedError if kind == "poison" else DeadlineExceededError
                assert isinstance(from_wire(answer.body), expected)
        assert not peer.has_message()
    assert not sent
    # Expired work is never executed.
    wanted = [number * 10 for number, (_, _, kind) in enumerate(plan) if kind == "ok"]
    assert {int(value) for value in engine.samples if value % 10 == 0} == set(wanted)


@pytest.fixture
def echoing_tail(start, make_bundle, make_engine):
    """A server whose tail gives back what it gets, and fails for a batch in which a value exceeds 999."""

    class Poisonable(make_engine):
        def run(self, features):
            self.entered.release()
            assert self.gate.wait(PATIENCE_S)
            data = features["feature_0"]
            if (data > 999).any():
                raise ValueError("poisoned")
            self.samples += data[:, 0].tolist()
            return {"output_0": data.astype(np.float32)}

    engine = Poisonable()
    running = start(load_engine=lambda _: engine, limits=BatchLimits(max_batch=16, queued=200, queued_per_device=200))
    running.engines.append(engine)
    bundle = make_bundle(shape=(2,), dtype="int32", output_shape=(2,))
    running.ready(bundle)
    return running, bundle.digest, engine


def test_three_hundred_at_once_are_taken_up_to_the_bound_and_each_device_has_its_share(start, make_bundle, feature):
    running = start(limits=BatchLimits(queued=64))
    bundle = make_bundle()
    engine = running.ready(bundle)
    engine.gate.clear()
    busy = running.peer()
    busy.begin_infer(bundle.digest, feature(0))
    assert engine.entered.acquire(timeout=PATIENCE_S)
    peers = [running.peer() for _ in range(30)]
    for peer in peers:
        for _ in range(10):
            peer.begin_infer(bundle.digest, feature(1))
    ends = {peer: [] for peer in peers}
    # While the tail is busy, all that comes back is refusals.
    while sum(map(len, ends.values())) < 300 - 64:
        for peer in peers:
            while peer.has_message():
                ends[peer].append(from_wire(peer.receive().body))
    engine.gate.set()
    for refusals in ends.values():
        assert all(isinstance(error, OverloadedError) and error.details["retry_after_s"] > 0 for error in refusals)
        # 64 places among 30 devices: two or three each, however early or late they came.
        assert len(refusals) in (7, 8)
    for peer, refusals in ends.items():
        assert all(peer.receive().type is MessageType.RESULT for _ in range(10 - len(refusals)))
    assert busy.receive().type is MessageType.RESULT
    assert len(engine.samples) == 65
