"""INFER: each request has exactly one end, and it is the right one."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from cloud_server.batches import BatchLimits
from edge_sdk.errors import (
    DeadlineExceededError,
    FeatureMismatchError,
    GoingAwayError,
    InvalidInputError,
    OverloadedError,
    TailFailedError,
    UnknownBundleError,
    UnknownMethodError,
    from_wire,
)
from edge_sdk.protocol import ListDevices, LoadTail, UnloadTail
from edge_sdk.wire import Message, MessageType, Tensor


def test_a_result_names_the_bundle_and_its_time_in_the_server(running, make_bundle, feature):
    bundle = make_bundle()
    running.ready(bundle)
    result = running.peer().infer(bundle.digest, feature(5, batch=3))
    assert result.type is MessageType.RESULT
    assert result.bundle == bundle.digest
    assert result.body["cloud_s"] > 0
    (output,) = result.tensors
    assert output.name == "output_0"
    assert output.data.dtype == np.float32
    assert np.array_equal(output.data, np.full((3, 6), 5.0))


def test_the_parts_of_the_time_in_the_server_add_up(running, make_bundle, feature):
    bundle = make_bundle()
    running.ready(bundle)
    timing = running.peer().infer(bundle.digest, feature()).body
    parts = [timing[name] for name in ("queue_s", "batch_wait_s", "compute_s")]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(timing["cloud_s"])


def test_a_bundle_that_is_not_loaded_is_unknown(running, make_bundle, feature):
    peer = running.peer()
    with pytest.raises(UnknownBundleError) as raised:
        peer.infer(make_bundle().digest, feature())
    assert raised.value.details == {"bundle": make_bundle().digest}
    with pytest.raises(InvalidInputError, match="digest"):
        peer.infer(None, feature())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "feature_1"}, r"takes the features \['feature_0'\], got \['feature_1'\]"),
        ({"dtype": np.uint8}, "is int8 .* got uint8"),
        ({"shape": (3, 2)}, r"got int8 \[1, 3, 2\]"),
        ({"shape": (2,)}, r"got int8 \[1, 2\]"),
        ({"batch": 0}, "1 to 256 samples, got 0"),
        ({"batch": 257}, "1 to 256 samples, got 257"),
    ],
)
def test_features_of_another_head_are_refused(running, make_bundle, feature, changes, reason):
    bundle = make_bundle()
    engine = running.ready(bundle)
    with pytest.raises(FeatureMismatchError, match=reason):
        running.peer().infer(bundle.digest, feature(**changes))
    assert engine.runs == 0


def test_features_without_batch_axis_or_of_unlike_batches_are_refused(running, make_bundle, feature):
    bundle = make_bundle(features=2)
    running.ready(bundle)
    peer = running.peer()
    with pytest.raises(FeatureMismatchError, match="different batch sizes"):
        peer.infer(bundle.digest, feature(batch=2), feature(batch=3, name="feature_1"))
    with pytest.raises(FeatureMismatchError, match=r"got \['feature_0'\]"):
        peer.infer(bundle.digest, feature())
    with pytest.raises(FeatureMismatchError, match=r"got int8 \[\]"):
        peer.infer(bundle.digest, feature(), Tensor(name="feature_1", data=np.array(1, np.int8)))


def test_a_tail_that_raises_fails_this_request_only(running, make_bundle, feature):
    bundle = make_bundle()
    engine = running.ready(bundle)
    peer = running.peer()
    engine.error = ValueError("no such kernel\nand a page of details")
    with pytest.raises(TailFailedError, match=r"no such kernel$"):
        peer.infer(bundle.digest, feature())
    engine.error = None
    assert peer.infer(bundle.digest, feature()).type is MessageType.RESULT


@pytest.mark.parametrize("budget_s", [0.0, -1.0])
def test_what_comes_with_an_empty_budget_is_not_executed(running, make_bundle, feature, budget_s):
    bundle = make_bundle()
    engine = running.ready(bundle)
    with pytest.raises(DeadlineExceededError):
        running.peer().infer(bundle.digest, feature(), budget_s=budget_s)
    assert engine.runs == 0


def test_expiry_does_not_wait_for_a_busy_tail_and_is_not_executed_afterwards(running, make_bundle, feature):
    bundle = make_bundle()
    engine = running.ready(bundle)
    peer = running.peer()
    engine.gate.clear()
    busy = peer.begin_infer(bundle.digest, feature(1))
    assert engine.entered.acquire(timeout=20)
    with pytest.raises(DeadlineExceededError, match="INFER: its time budget of 50 ms ran out"):
        peer.infer(bundle.digest, feature(2), budget_s=0.05)
    behind = peer.begin_infer(bundle.digest, feature(3))
    engine.gate.set()
    peer.end_of(busy)
    peer.end_of(behind)
    assert engine.samples == [1.0, 3.0]


def test_an_outcome_that_comes_after_the_end_is_dropped(running, make_bundle, feature):
    bundle = make_bundle()
    engine = running.ready(bundle)
    peer = running.peer()
    engine.gate.clear()
    with pytest.raises(DeadlineExceededError):
        peer.infer(bundle.digest, feature(1), budget_s=0.05)
    engine.gate.set()
    assert np.all(peer.infer(bundle.digest, feature(2)).tensors[0].data == 2.0)
    assert running.server.dropped["late outcomes"] == 1
    assert not peer.has_message()


def test_a_full_queue_is_told_with_the_time_to_come_again(start, make_bundle, feature):
    running = start(limits=BatchLimits(queued=3))
    bundle, other = make_bundle("a"), make_bundle("b")
    engine = running.ready(bundle)
    running.ready(other)
    peer = running.peer()
    engine.gate.clear()
    taken = [peer.begin_infer(bundle.digest, feature(0))]
    assert engine.entered.acquire(timeout=20)
    taken += [peer.begin_infer(bundle.digest, feature(number)) for number in (1, 2, 3)]
    with pytest.raises(OverloadedError) as raised:
        peer.infer(bundle.digest, feature(4))
    assert raised.value.details["retry_after_s"] > 0
    # The queue of another tail is its own.
    assert np.all(peer.infer(other.digest, feature(9)).tensors[0].data == 9.0)
    engine.gate.set()
    for number, request_id in enumerate(taken):
        assert np.all(peer.end_of(request_id).tensors[0].data == number)
    assert engine.samples == [0.0, 1.0, 2.0, 3.0]


def test_results_are_never_mixed_up(running, make_bundle):
    bundles = [make_bundle(name, shape=(2,), dtype="int32") for name in ("a", "b")]
    for bundle in bundles:
        running.ready(bundle)
    peers = [running.peer() for _ in range(6)]
    wrong: list[str] = []

    def ask(number: int) -> None:
        peer = peers[number]
        sent: dict[int, tuple[str, int]] = {}
        for turn in range(100):
            value = number * 1000 + turn
            data = np.full((1 + turn % 3, 2), value, np.int32)
            digest = bundles[(number + turn) % 2].digest
            sent[peer.begin_infer(digest, Tensor(name="feature_0", data=data))] = digest, value
            if turn % 10 == 9:
                while sent:
                    result = peer.receive()
                    expected, value = sent.pop(result.request_id)
                    if result.bundle != expected or not np.all(result.tensors[0].data == value):
                        wrong.append(f"{value}: {result}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(peers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    samples = sum(1 + turn % 3 for turn in range(100)) * len(peers)
    assert sum(len(engine.samples) for engine in running.engines) == samples


def test_an_id_that_is_under_way_is_not_taken_again(running, make_bundle, feature):
    bundle = make_bundle()
    engine = running.ready(bundle)
    peer, other = running.peer(), running.peer()
    engine.gate.clear()
    message = Message(type=MessageType.INFER, request_id=7, bundle=bundle.digest, tensors=(feature(),))
    for _ in range(3):
        peer.send(message)
    other.send(message)
    assert engine.entered.acquire(timeout=20)
    peer.call(ListDevices())
    other.call(ListDevices())
    assert running.server.dropped["requests with an id that is under way"] == 2
    engine.gate.set()
    assert peer.receive().request_id == other.receive().request_id == 7
    peer.call(ListDevices())
    assert len(engine.samples) == 2


def test_load_and_unload_over_the_wire(running, make_bundle, feature):
    bundle = make_bundle()
    running.repository.add_bundle(bundle)
    peer = running.peer()
    loaded = peer.call(LoadTail(bundle=bundle.digest)).body
    assert (loaded["engine"], loaded["engine_reason"]) == ("fake", "the test wants it")
    assert loaded["load_s"] > 0
    peer.call(LoadTail(bundle=bundle.digest))
    assert len(running.engines) == 1
    assert peer.infer(bundle.digest, feature()).type is MessageType.RESULT
    assert peer.call(UnloadTail(bundle=bundle.digest)).body == {"unloaded": True}
    with pytest.raises(UnknownBundleError):
        peer.infer(bundle.digest, feature())
    assert peer.call(UnloadTail(bundle=bundle.digest)).body == {"unloaded": False}
    assert running.engines[0].closed.wait(20)


def test_an_unknown_method_is_told(running):
    class Strange(ListDevices):
        method = "fleet.scatter"

    peer = running.peer()
    with pytest.raises(UnknownMethodError, match=r"'fleet\.scatter', only blob\.fetch, "):
        peer.call(Strange())
    peer.send(Message(type=MessageType.CALL, request_id=77))
    with pytest.raises(UnknownMethodError):
        peer.end_of(77)


def test_wrong_parameters_are_told(running):
    peer = running.peer()
    peer.send(Message(type=MessageType.CALL, request_id=5, method="tail.load", body={"bundle": 7}))
    with pytest.raises(InvalidInputError, match=r"LoadTail\.bundle"):
        peer.end_of(5)
    with pytest.raises(InvalidInputError, match="64 lower-case hex"):
        peer.call(LoadTail(bundle="../../etc/passwd"))


def test_an_unforeseen_failure_is_told_logged_and_survived(running, make_bundle, caplog, monkeypatch):
    monkeypatch.setattr(running.tails, "load", lambda _: 1 // 0)
    monkeypatch.setattr(running.tails, "submit", lambda *_, **__: [][0])
    peer = running.peer()
    for begin in (lambda: peer.begin(LoadTail(bundle="x")), lambda: peer.begin_infer(make_bundle().digest)):
        request_id = begin()
        answer = peer.receive()
        assert answer.request_id == request_id
        assert answer.body["code"] == "INTERNAL"
        assert "unexpected" in from_wire(answer.body).message
    assert "ZeroDivisionError" in caplog.text
    assert "IndexError" in caplog.text
    assert peer.call(ListDevices()).body["devices"] == []


def test_tails_of_active_allocations_are_loaded_at_start(start, make_bundle, caplog):
    running = start()
    good, lost, edge_only = make_bundle("good"), make_bundle("lost"), make_bundle("edge", tail={})
    for bundle in (good, edge_only):
        running.repository.add_bundle(bundle)
    running.registry.active = [edge_only.digest, lost.digest, good.digest]
    running.stop()
    running.join()

    again = start(registry=running.registry, folder_of=running)
    peer = again.peer()
    # Loads run in order: when this one is through, those of the start are.
    peer.call(UnloadTail(bundle="0" * 64))
    assert again.tails.ready == (good.digest,)
    assert lost.digest in caplog.text
    assert edge_only.digest not in caplog.text


def test_requests_wait_for_a_tail_that_the_start_still_loads(start, make_bundle, make_engine, feature):
    bundle, broken = make_bundle(), make_bundle("broken")
    first = start()
    first.repository.add_bundle(bundle)
    first.stop()
    first.join()
    first.registry.active = [bundle.digest, broken.digest]
    engine = make_engine()
    engine.gate.clear()

    again = start(registry=first.registry, folder_of=first, load_engine=lambda _: engine)
    peer, impatient, unlucky = again.peer(), again.peer(), again.peer()
    begun = peer.begin_infer(bundle.digest, feature(4))
    failing = unlucky.begin_infer(broken.digest, feature(5))
    with pytest.raises(DeadlineExceededError):
        impatient.infer(bundle.digest, feature(6), budget_s=0.05)
    assert not peer.has_message()
    engine.gate.set()
    assert np.all(peer.end_of(begun).tensors[0].data == 4.0)
    with pytest.raises(UnknownBundleError):
        unlucky.end_of(failing)
    assert 6.0 not in engine.samples


def test_requests_for_a_tail_that_is_being_loaded_are_bounded(start, make_bundle, make_engine, feature):
    bundle = make_bundle()
    first = start()
    first.repository.add_bundle(bundle)
    first.stop()
    first.join()
    first.registry.active = [bundle.digest]
    engine = make_engine()
    engine.gate.clear()

    again = start(registry=first.registry, folder_of=first, load_engine=lambda _: engine, limits=BatchLimits(queued=2))
    peer = again.peer()
    begun = [peer.begin_infer(bundle.digest, feature(value)) for value in (1, 2)]
    with pytest.raises(OverloadedError) as refused:
        peer.infer(bundle.digest, feature(3))
    assert refused.value.details["retry_after_s"] > 0
    engine.gate.set()
    for request in begun:
        peer.end_of(request)


def test_a_registry_that_fails_does_not_keep_the_server_from_serving(start, registration, caplog):
    running = start()
    running.registry.error = RuntimeError("the disk is full")
    answer = running.peer()
    answer.begin(registration())
    assert answer.receive().body["code"] == "INTERNAL"
    assert "the disk is full" in caplog.text
    assert answer.call(ListDevices()).body["devices"] == []


def test_stopping_answers_what_is_under_way(start, make_bundle, feature):
    running = start()
    bundle = make_bundle()
    engine = running.ready(bundle)
    peer = running.peer()
    engine.gate.clear()
    begun = peer.begin_infer(bundle.digest, feature(4))
    assert engine.entered.acquire(timeout=20)
    running.stop()
    with pytest.raises(GoingAwayError, match="stopping"):
        peer.infer(bundle.digest, feature(5))
    # It was told so at once, too.
    (notice,) = peer.notices
    assert isinstance(notice, GoingAwayError)
    engine.gate.set()
    assert np.all(peer.end_of(begun).tensors[0].data == 4.0)
    running.join()
    assert running.ended
    assert engine.samples == [4.0]


def test_what_does_not_end_in_time_gets_a_typed_error_when_the_server_stops(start, make_bundle, feature):
    running = start(grace_s=0.1)
    bundle = make_bundle()
    engine = running.ready(bundle)
    peer = running.peer()
    engine.gate.clear()
    begun = [peer.begin_infer(bundle.digest, feature(number)) for number in range(3)]
    assert engine.entered.acquire(timeout=20)
    running.stop()
    # Those that it had not read yet may be refused before the one that runs is given up.
    ends = [peer.receive() for _ in begun]
    assert sorted(end.request_id for end in ends) == begun
    assert all(isinstance(from_wire(end.body), GoingAwayError) for end in ends)
    # A tail that is not through ends with its worker.
    running.join()
    assert running.ended
