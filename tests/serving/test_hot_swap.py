"""Bundles are swapped under load: nobody gets an error, and each reply is of the bundle that it names."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from cloud_server.engines.base import TailEngine
from cloud_server.workers.launch import Launcher
from edge_sdk.errors import BundleError, FeatureMismatchError
from edge_sdk.protocol import LoadTail, UnloadTail

SWAPS = 20
CLIENTS = 4
PATIENCE_S = 60


class Caller:
    """Asks anew as soon as it has its answer, for the bundle that it was told last."""

    def __init__(self, peer, feature, digest, stop):
        self.told = digest
        self.replies = 0
        # By digest, what the outputs were for features of ones.
        self.seen = {}
        self._peer = peer
        self._feature = feature
        self._stop = stop
        self._moved = threading.Condition()

    def run(self):
        while not self._stop.is_set():
            digest = self.told
            reply = self._peer.infer(digest, self._feature(1))
            assert reply.bundle == digest
            self.seen.setdefault(digest, set()).add(reply.tensors[0].data.tobytes())
            self.replies += 1
            with self._moved:
                self._moved.notify_all()

    def move(self, digest):
        """Returns once it has got an answer of that bundle."""
        with self._moved:
            self.told = digest
            assert self._moved.wait_for(lambda: digest in self.seen, PATIENCE_S)


def swap_under_load(running, bundles, feature):
    """Serve one of ``bundles`` after the other, and a last one that stays; gives the callers of both."""
    *swapped, lasting = bundles
    for bundle in bundles:
        running.repository.add_bundle(bundle)
    operator = running.peer()
    for bundle in (lasting, swapped[0]):
        operator.call(LoadTail(bundle=bundle.digest))
    stop = threading.Event()
    callers = [Caller(running.peer(), feature, swapped[0].digest, stop) for _ in range(CLIENTS)]
    other = Caller(running.peer(), feature, lasting.digest, stop)
    with ThreadPoolExecutor(CLIENTS + 1) as threads:
        futures = [threads.submit(caller.run) for caller in (*callers, other)]
        try:
            for old, new in itertools.pairwise(swapped):
                operator.call(LoadTail(bundle=new.digest))
                for caller in callers:
                    caller.move(new.digest)
                replies = other.replies
                assert operator.call(UnloadTail(bundle=old.digest)).body == {"unloaded": True}
                while other.replies == replies and not futures[-1].done():
                    pass
        finally:
            stop.set()
        for future in futures:
            future.result(PATIENCE_S)
    assert set(running.tails.ready) == {swapped[-1].digest, lasting.digest}
    return callers, other


class NumberedEngine(TailEngine):
    """Gives the number in its bundle's tail."""

    name = "numbered"
    reason = "the test wants it"

    def __init__(self, number):
        self.number = number

    @classmethod
    def load(cls, bundle):
        return cls(float((bundle.tail_path / "number").read_text()))

    def warm(self, features):
        self.run(features)

    def run(self, features):
        return {"output_0": np.full((len(features["feature_0"]), 6), self.number, np.float32)}

    def close(self):
        self.number = np.nan


def test_swaps_under_load_lose_nothing_and_mix_nothing(start, make_bundle, feature):
    running = start(load_engine=NumberedEngine.load)
    bundles = [make_bundle(f"b{i}", tail={"number": str(i).encode()}) for i in range(SWAPS + 2)]
    callers, other = swap_under_load(running, bundles, feature)
    for caller in callers:
        assert caller.seen == {
            bundle.digest: {np.full((1, 6), number, np.float32).tobytes()} for number, bundle in enumerate(bundles[:-1])
        }
    assert other.seen == {bundles[-1].digest: {np.full((1, 6), SWAPS + 1, np.float32).tobytes()}}
    assert not running.server.dropped


def test_a_bundle_that_cannot_be_served_leaves_the_old_one_serving(start, make_bundle, feature, saved_models, tmp_path):
    launcher = partial(Launcher, engine="tensorflow", results=tmp_path / "engines.json")
    running = start(launcher=launcher)
    good = make_bundle("good", tail=saved_models["good"])
    broken = make_bundle("broken", tail=saved_models["good"] | {"saved_model.pb": b"not a graph"})
    for bundle in (good, broken):
        running.repository.add_bundle(bundle)
    peer = running.peer()
    peer.call(LoadTail(bundle=good.digest))
    with pytest.raises(BundleError, match="cannot load"):
        peer.call(LoadTail(bundle=broken.digest))
    assert running.tails.ready == (good.digest,)
    np.testing.assert_allclose(peer.infer(good.digest, feature(1)).tensors[0].data, -0.2, rtol=1e-6)


@pytest.mark.exhaustive
def test_swaps_of_saved_models_under_load(start, make_bundle, feature, saved_models, tmp_path):
    launcher = partial(Launcher, engine="tensorflow", results=tmp_path / "engines.json")
    running = start(launcher=launcher)
    # One graph, but bundles of their own: all give (1 - 3) × 0.1.
    bundles = [make_bundle(f"b{i}", tail=saved_models["good"]) for i in range(SWAPS + 2)]
    callers, other = swap_under_load(running, bundles, feature)
    expected = np.full((1, 6), np.float32(0.1) * np.float32(-2), np.float32).tobytes()
    for caller in callers:
        assert caller.seen == {bundle.digest: {expected} for bundle in bundles[:-1]}
    assert other.seen == {bundles[-1].digest: {expected}}
    assert not running.server.dropped


def test_a_half_of_another_bundle_is_refused_though_its_features_look_alike(running, make_bundle, feature):
    bundle = make_bundle()
    engine = running.ready(bundle)
    peer = running.peer()
    with pytest.raises(FeatureMismatchError, match=r"scale 0.1 and zero point 3, got 0.2 and 3: .* another bundle"):
        peer.infer(bundle.digest, feature(scale=0.2, zero_point=3))
    with pytest.raises(FeatureMismatchError, match=r"zero point 3, got 0\.1 and 4"):
        peer.infer(bundle.digest, feature(scale=0.1, zero_point=4))
    assert engine.runs == 0
    peer.infer(bundle.digest, feature(scale=0.1, zero_point=3))
    assert engine.runs == 1
