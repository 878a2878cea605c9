"""What an operator sees: HTTP beside the wire, figures, the log."""

from __future__ import annotations

import io
import json
import logging
import socket
from http.client import HTTPConnection

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cloud_server.batches import BatchLimits
from cloud_server.logs import logging_to
from cloud_server.monitor import Monitor
from edge_sdk.errors import (
    ConfigError,
    DeadlineExceededError,
    OverloadedError,
    TailFailedError,
    UnknownBundleError,
    UnknownMethodError,
)
from edge_sdk.protocol import ListDevices, LoadTail, UnloadTail

PATIENCE_S = 20


def get(address, path):
    host, port = address.rsplit(":", 1)
    connection = HTTPConnection(host, int(port), timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def watch():
    """Begin to answer over HTTP for a server; gives the address."""
    monitors = []

    def begin(server):
        monitors.append(Monitor("127.0.0.1:0", server))
        return monitors[-1].__enter__().address

    yield begin
    for monitor in monitors:
        monitor.__exit__(None, None, None)


def figures(server):
    """All samples by name and labels."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(server.exposition().decode())
        for sample in family.samples
    }


def test_it_is_alive_and_ready_only_with_all_tails_of_accepted_allocations(start, make_bundle, make_engine, watch):
    good, lost, edge_only = make_bundle("good"), make_bundle("lost"), make_bundle("edge", tail={})
    first = start()
    for bundle in (good, edge_only):
        first.repository.add_bundle(bundle)
    first.stop()
    first.join()
    first.registry.active = [edge_only.digest, lost.digest, good.digest]
    engine = make_engine()
    engine.gate.clear()
    running = start(registry=first.registry, folder_of=first, load_engine=lambda _: engine)
    address = watch(running.server)
    peer = running.peer()
    peer.call(ListDevices())
    assert get(address, "/livez") == (200, "ok\n")
    status, reason = get(address, "/readyz")
    assert status == 503
    assert good.digest in reason
    engine.gate.set()
    # Loads run in order: when this one is through, those of the start are.
    with pytest.raises(UnknownBundleError):
        peer.infer("1" * 64)
    peer.call(UnloadTail(bundle="0" * 64))
    assert get(address, "/readyz") == (503, f"tails of accepted allocations that are not loaded: {lost.digest}\n")
    running.repository.add_bundle(lost)
    peer.call(LoadTail(bundle=lost.digest))
    assert get(address, "/readyz") == (200, "ok\n")
    # Unloaded on purpose is not missing.
    peer.call(UnloadTail(bundle=good.digest))
    assert get(address, "/readyz") == (200, "ok\n")
    running.stop()
    running.join()
    assert get(address, "/readyz") == (503, "the server is stopping\n")


def test_a_server_whose_thread_hangs_is_not_alive(running, watch, monkeypatch):
    running.peer().call(ListDevices())
    address = watch(running.server)
    monkeypatch.setattr("cloud_server.server._ALIVE_WITHIN_S", -1.0)
    assert get(address, "/livez")[0] == get(address, "/readyz")[0] == 503
    assert "no turn" in get(address, "/livez")[1]


def test_other_paths_are_told_and_a_silent_peer_costs_nothing(running, watch):
    address = watch(running.server)
    status, page = get(address, "/")
    assert status == 404
    assert "/metrics" in page
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as silent:
        silent.sendall(b"GET")
        assert get(address, "/livez?verbose") == (200, "ok\n")


@pytest.mark.parametrize("address", ["9090", "127.0.0.1", "127.0.0.1:99999", "http://127.0.0.1:1", ":9090"])
def test_an_address_that_is_none_is_told(running, address):
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        Monitor(address, running.server)


def test_a_port_in_use_is_told(running, watch):
    address = watch(running.server)
    with pytest.raises(ConfigError, match=f"--http {address}: cannot listen there"):
        Monitor(address, running.server)


def test_requests_are_counted_by_their_ends(start, make_bundle, feature, registration, watch):
    running = start(limits=BatchLimits(queued=1))
    bundle = make_bundle()
    engine = running.ready(bundle)
    camera, stranger = running.peer(), running.peer()
    camera.call(registration(profile="jetson-nano"))
    tail = bundle.digest[:12]
    camera.infer(bundle.digest, feature())
    camera.infer(bundle.digest, feature(batch=3))
    stranger.infer(bundle.digest, feature())
    engine.error = ValueError("no such kernel")
    with pytest.raises(TailFailedError):
        stranger.infer(bundle.digest, feature())
    engine.error = None
    with pytest.raises(DeadlineExceededError):
        camera.infer(bundle.digest, feature(), budget_s=0.0)
    with pytest.raises(UnknownBundleError):
        camera.infer("f" * 64, feature())
    engine.gate.clear()
    while engine.entered.acquire(blocking=False):
        pass
    busy = stranger.begin_infer(bundle.digest, feature())
    assert engine.entered.acquire(timeout=PATIENCE_S)
    waiting = stranger.begin_infer(bundle.digest, feature())
    with pytest.raises(OverloadedError):
        stranger.infer(bundle.digest, feature())
    found = figures(running.server)
    assert found["splitfleet_queue_depth", tail] == 1
    engine.gate.set()
    stranger.end_of(busy)
    stranger.end_of(waiting)

    found = figures(running.server)
    requests = {key[1:]: value for key, value in found.items() if key[0] == "splitfleet_requests_total"}
    # By device kind, method, outcome, tail.
    assert requests == {
        ("jetson-nano", "INFER", "OK", tail): 2,
        ("jetson-nano", "INFER", "DEADLINE_EXCEEDED", tail): 1,
        ("jetson-nano", "INFER", "UNKNOWN_BUNDLE", "other"): 1,
        ("", "INFER", "OK", tail): 3,
        ("", "INFER", "TAIL_FAILED", tail): 1,
        ("", "INFER", "OVERLOADED", tail): 1,
        ("jetson-nano", "device.register", "OK", ""): 1,
    }
    for name in ("queue_seconds", "batch_wait_seconds", "compute_seconds", "batch_samples"):
        assert found[f"splitfleet_{name}_count", "jetson-nano", tail] == 2
    assert found["splitfleet_batch_samples_sum", "jetson-nano", tail] == 4
    assert found["splitfleet_received_bytes_total", "jetson-nano", tail] == 4 * 6
    assert found["splitfleet_sent_bytes_total", "jetson-nano", tail] == 4 * 6 * 4
    assert found["splitfleet_tail_engine_info", "fake", tail] == 1
    assert found["splitfleet_tails_loaded",] == 1
    assert found["splitfleet_devices_online",] == 1
    assert found["splitfleet_queue_depth", tail] == 0
    assert get(watch(running.server), "/metrics")[1] == running.server.exposition().decode()


def test_whatever_is_asked_the_labels_stay_few(running, registration):
    class Strange(ListDevices):
        method = "x"

    peer = running.peer()
    for number in range(100):
        Strange.method = f"strange.{number}"
        with pytest.raises(UnknownMethodError):
            peer.call(Strange())
        with pytest.raises(UnknownBundleError):
            peer.infer(f"{number:064x}")
        peer.call(registration(f"cam-{number}", profile=f"kind {number}"))
        peer.call(ListDevices())
    found = [key for key in figures(running.server) if key[0] == "splitfleet_requests_total"]
    assert len({kind for _, kind, *_ in found}) <= 65
    assert {method for _, _, method, *_ in found} == {"other", "INFER", "device.register", "fleet.devices"}
    assert {tail for *_, tail in found} == {"", "other"}


def test_the_log_tells_of_requests_by_their_ids(running, make_bundle, feature):
    bundle = make_bundle()
    running.ready(bundle)
    peer = running.peer()
    stream = io.StringIO()
    with logging_to(stream, as_json=True, level=logging.DEBUG):
        done = peer.begin_infer(bundle.digest, feature())
        peer.end_of(done)
        failed = peer.begin_infer("f" * 64)
        with pytest.raises(UnknownBundleError):
            peer.end_of(failed)
        # Whatever it says of them is written by the time that it answers what came after.
        peer.call(ListDevices())
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    requests = {entry["request"]["id"]: entry for entry in entries if "request" in entry}
    assert requests[done]["level"] == "DEBUG"
    assert requests[done]["request"]["outcome"] == "OK"
    assert requests[done]["request"]["bundle"] == bundle.digest
    assert {"cloud_s", "queue_s", "batch_wait_s", "compute_s"} < requests[done]["request"].keys()
    assert requests[failed]["level"] == "INFO"
    assert requests[failed]["request"]["outcome"] == "UNKNOWN_BUNDLE"
    assert requests[done]["request"]["peer"] == requests[failed]["request"]["peer"]
    assert all({"time", "level", "logger", "message"} <= entry.keys() for entry in entries)


def test_the_log_as_text_names_the_request_too_and_a_traceback_stays_one_document():
    log = logging.getLogger("cloud_server.test")
    text, documents = io.StringIO(), io.StringIO()
    with logging_to(text, as_json=False, level=logging.INFO), logging_to(documents, as_json=True, level=logging.INFO):
        log.debug("unheard")
        try:
            raise ValueError("two\nlines")
        except ValueError:
            log.exception("it failed: %s", "so")
    assert "ERROR cloud_server.test: it failed: so\nTraceback" in text.getvalue()
    (line,) = documents.getvalue().splitlines()
    assert json.loads(line)["traceback"].endswith("ValueError: two\nlines")
