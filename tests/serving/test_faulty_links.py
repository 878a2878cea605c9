"""Each request ends exactly once and in the right way, whatever the links between clients and server do meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cloud_server.allow_list import AllowList, Holder, Role
from cloud_server.curve import ServerCurve
from cloud_server.guard import Guard
from cloud_server.lab.proxy import LinkProxy
from device_profiles import Link
from edge_sdk import SplitClient
from edge_sdk import channel as channel_module
from edge_sdk.bundle import Bundle
from edge_sdk.errors import DeadlineExceededError, OverloadedError, PeerUnreachableError
from edge_sdk.keys import CurveKeys, make_key_pair
from edge_sdk.manifest import MANIFEST_FILE, Cut, InputSpec

PATIENCE_S = 60.0
TIMEOUT_S = 3.0
SHAPE = (2, 3)
# Of each client; the server's default for one device is more.
THREADS = 6


@pytest.fixture
def raw_bundle(make_bundle, tmp_path):
    """A bundle without a head: its features are the samples."""
    made = make_bundle().manifest
    manifest = replace(
        made,
        cut=Cut(k=0, n=7, name="input"),
        inputs=(InputSpec(name="x", shape=SHAPE, dtype="int8"),),
        crossing=tuple(replace(spec, scale=1.0, zero_point=0) for spec in made.crossing),
        files=tuple(entry for entry in made.files if entry.path.startswith("tail/")),
    )
    folder = tmp_path / "bundles" / "bundle"
    (folder / MANIFEST_FILE).write_bytes(manifest.canonical())
    return Bundle.open(folder)


def sample(number):
    """One that tells its number."""
    return np.array([number // 10**place % 10 for place in range(6)], np.int8).reshape(SHAPE)


class Faults:
    """Makes a link fail, once for every ``EVERY`` requests that have ended on it: on slow machines as on fast ones."""

    EVERY = 6

    def __init__(self, proxy, seed, kinds):
        self.made = Counter()
        self._proxy = proxy
        self._random = random.Random(seed)
        self._kinds = itertools.cycle(self._random.sample(kinds, len(kinds)))
        self._ended = 0
        self._lock = threading.Lock()
        self._due = threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopping = True
        self._due.release()
        self._thread.join()

    def count(self):
        """A request has ended."""
        with self._lock:
            self._ended += 1
            if self._ended % self.EVERY == 0:
                self._due.release()

    def _run(self):
        while self._due.acquire() and not self._stopping:
            kind = next(self._kinds)
            self.made[kind] += 1
            if kind == "corrupt":
                self._proxy.corrupt(self._random.choice(("up", "down")), after_bytes=self._random.randrange(500))
                continue
            getattr(self._proxy, kind)()
            time.sleep(self._random.uniform(0.0, 0.05))
            self._proxy.restore()


def outcome_of(client, faults, number):
    try:
        return client.infer(sample(number)).outputs["label"]
    except (PeerUnreachableError, DeadlineExceededError, OverloadedError) as error:
        return type(error).__name__
    finally:
        faults.count()


def ends_of_infer(running):
    """Requests that the server has ended, by outcome, and how many it began."""
    families = text_string_to_metric_families(running.server.exposition().decode())
    samples = [found for family in families for found in family.samples]
    ended = Counter()
    for found in samples:
        if found.name == "splitfleet_requests_total":
            ended[found.labels["outcome"]] += found.value
    (begun,) = [found.value for found in samples if found.name == "splitfleet_requests_begun_total"]
    return ended, begun


def until(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.01)


def check_ends(running, bundle, number_of_requests, *, keys=None, seed=1, kinds, clients=4):
    engine = running.ready(bundle)
    seen = []
    engine.run = lambda features, run=engine.run: (seen.extend(map(bytes, features["feature_0"])), run(features))[1]
    with contextlib.ExitStack() as stack:
        link = Link(rtt_ms=2.0, uplink_mbit_s=100.0, downlink_mbit_s=100.0)
        proxies = [stack.enter_context(LinkProxy(running.endpoint, link)) for _ in range(clients)]
        users = [
            stack.enter_context(SplitClient(proxy.endpoint, bundle=bundle.path, timeout_s=TIMEOUT_S, keys=keys))
            for proxy in proxies
        ]
        pool = stack.enter_context(ThreadPoolExecutor(clients * THREADS))
        faults = [stack.enter_context(Faults(proxy, seed + i, kinds)) for i, proxy in enumerate(proxies)]
        # In turns, so that all of them ask to the end.
        futures = [
            pool.submit(outcome_of, users[number % clients], faults[number % clients], number)
            for number in range(number_of_requests)
        ]
        outcomes = [future.result(PATIENCE_S) for future in futures]
        assert all(user._channel.under_way == 0 for user in users)
    assert sum((each.made for each in faults), Counter()).keys() == set(kinds)
    # Clients: as many ends as requests, and each result is that of its own request.
    answered = {number: outcome for number, outcome in enumerate(outcomes) if not isinstance(outcome, str)}
    for number, outputs in answered.items():
        np.testing.assert_array_equal(outputs, sample(number).reshape(-1))
    errors = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
    assert len(answered) + errors.total() == number_of_requests
    assert errors["PeerUnreachableError"]
    assert len(answered) > number_of_requests / 10
    # Server: nothing was run twice, what was answered was run, and the books balance.
    assert len(seen) == len(set(seen))
    assert {bytes(sample(number)) for number in answered} <= set(seen)
    until(lambda: running.under_way() == 0)
    ended, begun = ends_of_infer(running)
    assert ended.total() == begun
    assert set(ended) <= {"OK", "GONE", "DEADLINE_EXCEEDED", "OVERLOADED"}
    assert len(answered) <= ended["OK"] <= len(seen)
    until(lambda: running.in_loop(lambda: running.server.connections) == 0)
    return outcomes


FAULTS = ("cut", "half_open")


@pytest.fixture
def quick_to_come_back(monkeypatch):
    monkeypatch.setattr(channel_module, "REOPEN_AFTER_S", 0.1)
    monkeypatch.setattr("edge_sdk.dealer.MAX_RECONNECT_MS", 200)


@pytest.fixture
def curve_site(start, tmp_path):
    public, secret = make_key_pair()
    own, own_secret = make_key_pair()
    allow_list = AllowList(tmp_path / "allowed")
    allow_list.allow(Holder(name="boss", role=Role.OPERATOR, public=own))
    running = start(curve=ServerCurve(secret=secret, guard=Guard(allow_list)))
    return running, CurveKeys(public=own, secret=own_secret, server=public)


@pytest.mark.usefixtures("quick_to_come_back")
def test_200_requests_over_links_that_are_cut_and_drop(running, raw_bundle):
    check_ends(running, raw_bundle, 200, kinds=FAULTS)


@pytest.mark.usefixtures("quick_to_come_back")
def test_200_requests_over_encrypted_links_that_damage_bytes_as_well(curve_site, raw_bundle):
    running, keys = curve_site
    check_ends(running, raw_bundle, 200, keys=keys, kinds=(*FAULTS, "corrupt"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_to_come_back")
@pytest.mark.parametrize("seed", [10, 20])
def test_2000_requests_over_links_that_are_cut_and_drop(running, raw_bundle, seed):
    check_ends(running, raw_bundle, 2000, kinds=FAULTS, seed=seed)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_to_come_back")
@pytest.mark.parametrize("seed", [30, 40])
def test_2000_requests_over_encrypted_links_that_damage_bytes_as_well(curve_site, raw_bundle, seed):
    running, keys = curve_site
    check_ends(running, raw_bundle, 2000, keys=keys, kinds=(*FAULTS, "corrupt"), seed=seed)
