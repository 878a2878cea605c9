"""The host of the tails: what is loaded serves, what cannot be loaded leaves everything as it was."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np
import pytest

from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, IntegrityError, TailFailedError, UnknownBlobError, UnknownBundleError

PATIENCE_S = 20


def submit(running, digest, *features):
    """Queue a request; a future of its outcome."""
    future = Future()

    def done(outcome):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome.outputs)

    running.in_loop(lambda: running.tails.submit(digest, "caller", features, begin=lambda: None, done=done))
    return future


def run(running, digest, *features):
    """The outputs of a request."""
    return submit(running, digest, *features).result(PATIENCE_S)


def test_a_bundle_is_ready_once_it_is_warm(running, make_bundle, feature):
    bundle = make_bundle()
    running.repository.add_bundle(bundle)
    tails = running.tails
    assert tails.ready == ()
    assert tails.load(bundle.digest).engine == "fake"
    assert tails.engines() == {bundle.digest: "fake"}
    assert tails.ready == (bundle.digest,)
    # Batches of one sample and of two, each warmed and then checked.
    assert running.engines[0].runs == 4
    assert np.all(run(running, bundle.digest, feature(3))[0].data == 3.0)


def test_an_edge_only_bundle_has_nothing_to_load(running, make_bundle):
    bundle = make_bundle(tail={})
    running.repository.add_bundle(bundle)
    with pytest.raises(BundleError, match=r"no tail to load: it is edge-only \(cut k=7 of n=7\)"):
        running.tails.load(bundle.digest)
    assert running.engines == []


def test_a_bundle_that_the_repository_lacks_is_told(running, make_bundle):
    with pytest.raises(UnknownBlobError, match="upload it first"):
        running.tails.load(make_bundle().digest)


@pytest.mark.parametrize("change", ["delete", "truncate", "alter"])
@pytest.mark.parametrize(
    "victim",
    ["manifest.json", "head.tflite", "tail.tflite", "tail/saved_model.pb", "tail/variables/variables.index"],
)
def test_an_incomplete_bundle_never_becomes_ready_and_the_others_keep_serving(
    running, make_bundle, feature, victim, change
):
    good = make_bundle("good")
    running.ready(good)
    bad = make_bundle(
        "bad", tail={"saved_model.pb": b"graph", "variables/variables.index": b"index"}, tail_tflite=b"float tail"
    )
    running.repository.add_bundle(bad)
    # The manifest's own digest is that of the bundle.
    sha256 = {entry.path: entry.sha256 for entry in bad.manifest.files}.get(victim, bad.digest)
    blob = running.folder / "repository" / "blobs" / sha256[:2] / sha256
    content = blob.read_bytes()
    blob.chmod(0o600)
    if change == "delete":
        blob.unlink()
    else:
        blob.write_bytes(content[:-1] if change == "truncate" else bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises((IntegrityError, UnknownBlobError), match="upload it"):
        running.tails.load(bad.digest)
    assert running.tails.ready == (good.digest,)
    assert len(running.engines) == 1
    run(running, good.digest, feature())
    # A new upload mends it.
    running.repository.add_bundle(bad)
    running.tails.load(bad.digest)
    run(running, bad.digest, feature())


def test_what_was_tampered_with_after_it_was_laid_out_is_laid_out_anew(running, make_bundle):
    bundle = make_bundle()
    running.repository.add_bundle(bundle)
    laid = running.repository.lay_out(bundle.digest, running.folder / "tails" / bundle.digest)
    target = laid.tail_path / "saved_model.pb"
    target.unlink()
    target.write_bytes(b"evil")
    running.tails.load(bundle.digest)
    Bundle.open(laid.path).verify()


@pytest.mark.parametrize("stage", ["load", "warm", "outputs"])
def test_a_tail_that_cannot_be_run_does_not_become_ready(start, make_bundle, make_engine, stage):
    engine = make_engine()

    def load(_):
        if stage == "load":
            raise BundleError("no such graph")
        return engine

    running = start(load_engine=load)
    if stage == "warm":
        engine.error = ValueError("bad kernel")
    bundle = make_bundle(output_shape=(5,) if stage == "outputs" else None)
    running.repository.add_bundle(bundle)
    reason = {"load": "no such graph", "warm": "cannot be run: .*bad kernel", "outputs": r"gave .*6.* says .*5"}[stage]
    with pytest.raises(BundleError, match=reason):
        running.tails.load(bundle.digest)
    assert running.tails.ready == ()
    assert engine.closed.is_set() == (stage != "load")


def test_a_wrong_number_of_rows_fails_the_request(running, make_bundle, feature, monkeypatch):
    bundle = make_bundle()
    engine = running.ready(bundle)
    monkeypatch.setattr(engine, "run", lambda _: {"output_0": np.zeros((3, 6), np.float32)})
    with pytest.raises(TailFailedError, match=r"gave .*\(3, 6\).* says .*\(2, 6\)"):
        run(running, bundle.digest, feature(batch=2))


def test_other_floats_become_float32(running, make_bundle, feature, monkeypatch):
    bundle = make_bundle()
    engine = running.ready(bundle)
    monkeypatch.setattr(engine, "run", lambda _: {"output_0": np.ones((1, 6), np.float64)})
    (output,) = run(running, bundle.digest, feature())
    assert output.data.dtype == np.float32


def test_unloading_runs_what_is_queued_then_gives_the_memory_back(running, make_bundle, feature):
    bundle = make_bundle()
    engine = running.ready(bundle)
    engine.gate.clear()
    outcomes = [submit(running, bundle.digest, feature(number)) for number in range(3)]
    assert engine.entered.acquire(timeout=PATIENCE_S)
    assert running.tails.unload(bundle.digest)
    assert not engine.closed.is_set()
    with pytest.raises(UnknownBundleError):
        run(running, bundle.digest, feature())
    engine.gate.set()
    assert engine.closed.wait(PATIENCE_S)
    assert [outcome.result(PATIENCE_S)[0].data.flat[0] for outcome in outcomes] == [0.0, 1.0, 2.0]
    assert not (running.folder / "tails" / bundle.digest).exists()
    assert not running.tails.unload(bundle.digest)
    running.tails.load(bundle.digest)
    run(running, bundle.digest, feature())


def test_loading_one_tail_does_not_hold_up_another(start, make_bundle, make_engine, feature):
    gate, loading = threading.Event(), threading.Event()
    first = make_engine()

    def load(bundle):
        if bundle.manifest.model.name == "slow":
            loading.set()
            assert gate.wait(PATIENCE_S)
            return make_engine()
        return first

    running = start(load_engine=load)
    quick, slow = make_bundle("quick"), make_bundle("slow")
    for bundle in (quick, slow):
        running.repository.add_bundle(bundle)
    running.tails.load(quick.digest)
    thread = threading.Thread(target=running.tails.load, args=(slow.digest,))
    thread.start()
    assert loading.wait(PATIENCE_S)
    run(running, quick.digest, feature())
    assert running.tails.ready == (quick.digest,)
    gate.set()
    thread.join()
    assert running.tails.ready == (quick.digest, slow.digest)
