"""What dies with a worker, what waits for it, who makes room for whom. Here they are threads behind real sockets."""

from __future__ import annotations

import errno
import threading
from collections import Counter

import pytest

from cloud_server.batches import BatchLimits
from cloud_server.loop import Loop
from cloud_server.served_tail import MOST_DEATHS
from cloud_server.workers.crew import CrewLimits
from cloud_server.workers.worker import Backoff, Worker
from edge_sdk.errors import (
    DeadlineExceededError,
    FeatureMismatchError,
    OverloadedError,
    TailFailedError,
    UnknownBlobError,
    UnknownBundleError,
)
from edge_sdk.protocol import LoadTail, UnloadTail
from edge_sdk.wire import MessageType

PATIENCE_S = 20
QUICK = Backoff(first_s=0.01, most_s=0.02)
ONE = CrewLimits(workers=1, backoff=QUICK)
TWO = CrewLimits(workers=2, backoff=QUICK)


@pytest.fixture
def serve(start, make_bundle):
    """A server with bundles ``a``, ``b``… loaded one after another; gives it and their digests."""

    def begin(names, **options):
        running = start(**options)
        bundles = [make_bundle(name) for name in names]
        for bundle in bundles:
            running.ready(bundle)
        return running, *(bundle.digest for bundle in bundles)

    return begin


def value_of(result):
    assert result.type is MessageType.RESULT
    return result.tensors[0].data.flat[0]


def tails_of(running):
    """How many tails each worker has."""
    return [worker.tails for worker in running.tails.workers()]


def reloaded(running, count):
    """Wait until that many engines were made in all."""
    # Unloading what is not there comes after all loads that were begun.
    peer = running.peer()
    while len(running.engines) < count:
        peer.call(UnloadTail(bundle="0" * 64))


def test_a_new_tail_goes_to_the_worker_that_has_least(serve):
    running, *_ = serve("abc", crew=TWO)
    assert sorted(tails_of(running)) == [1, 2]


def test_what_is_in_a_worker_that_dies_fails_at_once_and_what_waits_is_run_by_the_next(serve, feature):
    running, digest = serve("a", crew=ONE)
    peer = running.peer()
    engine = running.engines[0]
    engine.gate.clear()
    lost = peer.begin_infer(digest, feature(1))
    assert engine.entered.acquire(timeout=PATIENCE_S)
    waiting = peer.begin_infer(digest, feature(2))
    peer.call(UnloadTail(bundle="0" * 64))
    running.workers[0].end("was ended by SIGKILL")
    with pytest.raises(TailFailedError, match=r"worker 1 was ended by SIGKILL; it was running the tail of bundle"):
        peer.end_of(lost)
    assert value_of(peer.end_of(waiting)) == 2
    assert len(running.workers) == 2
    assert running.engines[1].samples[-1:] == [2.0]


def test_the_tails_of_other_workers_are_not_concerned(serve, feature):
    running, first, second = serve("ab", crew=TWO)
    peer, other = running.peer(), running.peer()
    running.engines[0].gate.clear()
    running.engines[1].gate.clear()
    lost = peer.begin_infer(first, feature(1))
    assert running.engines[0].entered.acquire(timeout=PATIENCE_S)
    kept = other.begin_infer(second, feature(2))
    assert running.engines[1].entered.acquire(timeout=PATIENCE_S)
    running.workers[0].end("was ended by SIGSEGV")
    with pytest.raises(TailFailedError, match="SIGSEGV"):
        peer.end_of(lost)
    running.engines[1].gate.set()
    assert value_of(other.end_of(kept)) == 2
    assert value_of(peer.infer(first, feature(3))) == 3


def test_readiness_tells_of_a_worker_that_died(serve, feature):
    running, first, second = serve("ab", crew=CrewLimits(workers=2, backoff=Backoff(first_s=10_000, most_s=10_000)))
    assert running.server.hindrance() is None
    peer = running.peer()
    running.engines[0].gate.clear()
    lost = peer.begin_infer(first, feature())
    assert running.engines[0].entered.acquire(timeout=PATIENCE_S)
    running.workers[0].end("was ended by SIGKILL")
    with pytest.raises(TailFailedError):
        peer.end_of(lost)
    reason = running.server.hindrance()
    assert "worker 1 was ended by SIGKILL; it is started again" in reason
    assert f"the tail of bundle {first[:12]} is being loaded" in reason
    assert second[:12] not in reason
    assert [(worker.up, worker.restarts) for worker in running.tails.workers()] == [(False, 1), (True, 0)]
    assert value_of(peer.infer(second, feature(5))) == 5


def test_after_a_respawn_it_is_ready_again(serve, feature):
    running, digest = serve("a", crew=ONE)
    peer = running.peer()
    running.workers[0].end("was ended by SIGKILL")
    assert value_of(peer.infer(digest, feature(1))) == 1
    assert running.server.hindrance() is None
    assert running.tails.ready == (digest,)


def test_a_tail_in_which_workers_die_again_and_again_is_not_run_any_more_and_the_others_live_on(serve, feature):
    running, poison, good = serve("ab", crew=ONE)
    peer = running.peer()
    for death in range(MOST_DEATHS):
        reloaded(running, 2 * (death + 1))
        for engine in running.engines[-2:]:
            engine.entered.acquire(timeout=0)
            while engine.entered.acquire(blocking=False):
                pass
            engine.gate.clear()
        lost = peer.begin_infer(poison, feature(death))
        # Whichever of the two engines is the poisonous tail's.
        while not any(engine.entered.acquire(timeout=0.01) for engine in running.engines[-2:]):
            pass
        late = peer.begin_infer(poison, feature(100)) if death == MOST_DEATHS - 1 else None
        peer.call(UnloadTail(bundle="0" * 64))
        running.workers[-1].end("was ended by SIGSEGV")
        for engine in running.engines:
            engine.gate.set()
        with pytest.raises(TailFailedError, match="SIGSEGV"):
            peer.end_of(lost)
        if late is not None:
            with pytest.raises(TailFailedError, match="3 times in a row"):
                peer.end_of(late)
    with pytest.raises(TailFailedError, match=r"3 times in a row .*worker 1 was ended by SIGSEGV.* loaded anew"):
        peer.infer(poison, feature(7))
    assert value_of(peer.infer(good, feature(8))) == 8
    assert "3 times in a row" in running.server.hindrance()
    assert running.tails.ready == (good,)
    peer.call(LoadTail(bundle=poison))
    assert value_of(peer.infer(poison, feature(9))) == 9
    assert running.server.hindrance() is None


def test_a_batch_that_succeeds_clears_the_suspicion(serve, feature):
    running, digest = serve("a", crew=ONE)
    peer = running.peer()
    for death in range(MOST_DEATHS + 1):
        reloaded(running, death + 1)
        assert value_of(peer.infer(digest, feature(1))) == 1
        engine = running.engines[-1]
        while engine.entered.acquire(blocking=False):
            pass
        engine.gate.clear()
        lost = peer.begin_infer(digest, feature(2))
        assert engine.entered.acquire(timeout=PATIENCE_S)
        running.workers[-1].end("was ended by SIGKILL")
        engine.gate.set()
        with pytest.raises(TailFailedError, match="SIGKILL"):
            peer.end_of(lost)
    assert value_of(peer.infer(digest, feature(3))) == 3


def test_a_worker_that_dies_of_loading_a_tail_is_told_to_whoever_asked(start, make_bundle, make_engine, feature):
    running = start(crew=ONE, load_engine=lambda bundle: load(bundle))

    def load(bundle):
        if bundle.manifest.model.name == "huge":
            running.workers[-1].end("was ended by SIGKILL")
        return make_engine()

    good, huge = make_bundle("good"), make_bundle("huge")
    for bundle in (good, huge):
        running.repository.add_bundle(bundle)
    running.tails.load(good.digest)
    with pytest.raises(TailFailedError, match="worker 1 was ended by SIGKILL; it was loading this tail"):
        running.tails.load(huge.digest)
    peer = running.peer()
    with pytest.raises(UnknownBundleError):
        peer.infer(huge.digest, feature())
    assert value_of(peer.infer(good.digest, feature(4))) == 4


def test_a_load_that_does_not_end_costs_its_worker(start, make_bundle, make_engine, feature, monkeypatch):
    monkeypatch.setattr("cloud_server.workers.worker._LOADS_WITHIN_S", 0.2)
    gate = threading.Event()

    def load(bundle):
        if bundle.manifest.model.name == "endless":
            assert gate.wait(PATIENCE_S)
        return make_engine()

    running = start(crew=ONE, load_engine=load)
    good, endless = make_bundle("good"), make_bundle("endless")
    for bundle in (good, endless):
        running.repository.add_bundle(bundle)
    running.tails.load(good.digest)
    with pytest.raises(TailFailedError, match=r"worker 1 was loading a tail for 0\.2 s and more, so it was ended"):
        running.tails.load(endless.digest)
    assert value_of(running.peer().infer(good.digest, feature(4))) == 4
    gate.set()


def test_a_worker_that_cannot_be_started_is_tried_again_later_and_later():
    now = [100.0]
    loop = Loop(clock=lambda: now[0])
    tried = []

    def launch(number, control, on_silence):  # noqa: ARG001
        tried.append(now[0] - 100)
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    backoff = Backoff(first_s=1.0, most_s=4.0, stable_s=60.0)
    worker = Worker(1, loop=loop, launch=launch, backoff=backoff, on_up=lambda _: None, on_down=lambda *_: None)
    worker.start()
    while now[0] < 112:
        now[0] += 0.5
        loop.wait(now[0])
    assert tried == [0.0, 1.0, 3.0, 7.0, 11.0]
    assert worker.ailment == "cannot be started (Resource temporarily unavailable)"
    assert not worker.up
    loop.close()


def test_a_tail_that_cannot_be_loaded_again_says_why(serve, feature):
    running, digest = serve("a", crew=ONE)
    manifest = running.repository.manifest(digest)
    entry = next(entry for entry in manifest.files if entry.path.startswith("tail/"))
    blob = running.folder / "repository" / "blobs" / entry.sha256[:2] / entry.sha256
    laid = running.folder / "tails" / digest / entry.path
    for path in (blob, laid):
        path.chmod(0o600)
        path.unlink()
        path.write_bytes(b"?")
    running.workers[0].end("was ended by SIGKILL")
    peer = running.peer()
    with pytest.raises(TailFailedError, match=r"could not be loaded again: .*upload it"):
        peer.infer(digest, feature())
    assert "could not be loaded again" in running.server.hindrance()
    with pytest.raises(UnknownBlobError, match="upload it"):
        running.tails.load(digest)


def test_while_a_worker_is_away_requests_are_bounded_and_expire(start, make_bundle, feature):
    running = start(limits=BatchLimits(queued=2), crew=CrewLimits(backoff=Backoff(first_s=10_000, most_s=10_000)))
    bundle = make_bundle()
    running.ready(bundle)
    running.workers[0].end("was ended by SIGKILL")
    peer = running.peer()
    # Not before the server has noticed.
    while running.server.hindrance() is None:
        pass
    waiting = [peer.begin_infer(bundle.digest, feature(1), budget_s=0.5) for _ in range(2)]
    with pytest.raises(OverloadedError) as refused:
        peer.infer(bundle.digest, feature(2))
    assert refused.value.details["retry_after_s"] >= 1
    assert [peer.receive().body["code"] for _ in waiting] == ["DEADLINE_EXCEEDED"] * 2


def test_a_tail_that_waits_for_its_worker_can_be_unloaded(serve, feature):
    running, digest = serve("a", crew=CrewLimits(backoff=Backoff(first_s=10_000, most_s=10_000)))
    running.workers[0].end("was ended by SIGKILL")
    while running.server.hindrance() is None:
        pass
    peer = running.peer()
    waiting = peer.begin_infer(digest, feature())
    assert running.peer().call(UnloadTail(bundle=digest)).body == {"unloaded": True}
    with pytest.raises(UnknownBundleError):
        peer.end_of(waiting)


@pytest.fixture
def load_another(make_bundle):
    """Load one more bundle into a server; gives its digest."""

    def load(running, name):
        bundle = make_bundle(name)
        running.ready(bundle)
        return bundle.digest

    return load


def test_above_the_budget_the_tail_that_was_idle_for_longest_leaves_and_comes_back_when_it_is_asked_for(
    serve, load_another, feature, caplog
):
    caplog.set_level("INFO")
    running, first, second = serve("ab", crew=CrewLimits(memory_bytes=250))
    peer = running.peer()
    for digest in (second, first):
        peer.infer(digest, feature())
    third = load_another(running, "c")
    assert running.engines[1].closed.wait(PATIENCE_S)
    assert f"the tail of bundle {second} leaves worker 1, which has 300 B of 250 B" in caplog.text
    assert not running.engines[0].closed.is_set()
    assert tails_of(running) == [2]
    # It is not missing: it comes back with the next request for it, and another one leaves.
    assert running.server.hindrance() is None
    assert set(running.tails.ready) == {first, second, third}
    assert value_of(peer.infer(second, feature(6))) == 6
    assert len(running.engines) == 4
    assert running.engines[0].closed.wait(PATIENCE_S)
    assert not running.engines[2].closed.is_set()


def test_a_tail_that_is_busy_does_not_leave_before_it_is_idle(serve, load_another, feature):
    running, first = serve("a", crew=CrewLimits(memory_bytes=150))
    peer = running.peer()
    engine = running.engines[0]
    engine.gate.clear()
    busy = peer.begin_infer(first, feature(1))
    assert engine.entered.acquire(timeout=PATIENCE_S)
    second = load_another(running, "b")
    assert value_of(running.peer().infer(second, feature(2))) == 2
    running.in_loop(running.tails.sweep)
    assert tails_of(running) == [2]
    engine.gate.set()
    assert value_of(peer.end_of(busy)) == 1
    assert engine.closed.wait(PATIENCE_S)
    assert not running.engines[1].closed.is_set()


def test_one_tail_alone_above_the_budget_is_served_and_warned_of(serve, feature, caplog):
    running, digest = serve("a", crew=CrewLimits(memory_bytes=50))
    assert value_of(running.peer().infer(digest, feature(1))) == 1
    for _ in range(3):
        running.in_loop(running.tails.sweep)
    warning = "worker 1 has 100 B with one tail alone, more than the 50 B that it may have (--worker-memory)"
    assert caplog.text.count(warning) == 1


def test_features_for_a_tail_that_comes_are_checked_when_it_is_known(start, make_bundle, make_engine, feature):
    bundle = make_bundle()
    first = start()
    first.repository.add_bundle(bundle)
    first.stop()
    first.join()
    first.registry.active = [bundle.digest]
    engine = make_engine()
    engine.gate.clear()
    again = start(registry=first.registry, folder_of=first, load_engine=lambda _: engine)
    peer, strange = again.peer(), again.peer()
    good = peer.begin_infer(bundle.digest, feature(4))
    with pytest.raises(FeatureMismatchError):
        strange.infer(bundle.digest, feature(shape=(5, 5)))
    with pytest.raises(FeatureMismatchError):
        strange.infer(bundle.digest)
    engine.gate.set()
    assert value_of(peer.end_of(good)) == 4


def test_a_batch_that_nobody_waits_for_any_more_and_that_does_not_end_costs_its_worker(serve, feature, monkeypatch):
    monkeypatch.setattr("cloud_server.tails._STUCK_S", 0.0)
    running, digest = serve("a", crew=ONE)
    peer = running.peer()
    running.engines[0].gate.clear()
    with pytest.raises(DeadlineExceededError):
        peer.infer(digest, feature(1), budget_s=0.05)
    # The sweep of the server comes by itself.
    assert value_of(peer.infer(digest, feature(2))) == 2
    assert len(running.workers) == 2
    assert running.server.hindrance() is None


def test_twenty_swaps_under_load_lose_nothing_and_mix_nothing_up(start, make_bundle, make_engine, feature):
    class Numbered(make_engine):
        number = 0

        def run(self, features):
            return {name: rows + self.number for name, rows in super().run(features).items()}

    def load(bundle):
        engine = Numbered()
        engine.number = int(bundle.manifest.model.name)
        return engine

    running = start(load_engine=load, crew=TWO)
    versions = [make_bundle(str(1000 * number)) for number in range(21)]
    for bundle in versions:
        running.repository.add_bundle(bundle)
    running.tails.load(versions[0].digest)
    current = [0]
    stop = threading.Event()
    wrong, asked = [], Counter()

    def ask(client):
        peer = running.peer()
        value = 0
        while not stop.is_set():
            number, value = current[0], (value + 1) % 100
            answer = ask_once(peer, versions[number].digest, value)
            if answer != (versions[number].digest, 1000 * number + value):
                wrong.append(answer)
            asked[client, number] += 1

    def ask_once(peer, digest, value):
        result = peer.infer(digest, feature(value))
        return result.bundle, value_of(result)

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 21):
            running.tails.load(versions[number].digest)
            current[0] = number
            # The old one goes when everybody has changed over.
            while not all(asked[client, number] for client in range(4)):
                assert all(thread.is_alive() for thread in threads)
            assert running.tails.unload(versions[number - 1].digest)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert running.tails.ready == (versions[20].digest,)
