"""The agent as a process of its own, against a scripted server: register, install, run, come back, end."""

import hashlib
import io
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from edge_sdk import SplitClient
from edge_sdk.agent import Agent, AgentSettings
from edge_sdk.errors import DeviceIdTakenError, UnknownMethodError
from edge_sdk.protocol import Install, InstallReport, Register, Run, RunReport
from edge_sdk.runtime import choose_runtime
from edge_sdk.store import DeviceStore
from edge_sdk.wire import Message, MessageType


class Server:
    """A scripted server: registers devices, keeps blobs, runs the tail, and calls devices."""

    def __init__(self, start_peer, blob_handler, make_reply, tail_handler, wait_until):
        self.registrations = []
        self.heartbeats = []
        self.known = True
        self.answers = {}
        self._ids = iter(range(10**6, 10**7))
        self._make_reply = make_reply
        self._tail = tail_handler
        self._wait_until = wait_until
        self.repository = blob_handler(self._otherwise)
        self.peer = start_peer(self._handle)

    def _handle(self, message, peer):
        if message.type is MessageType.INFER:
            return self._tail(message, peer)
        if message.type is MessageType.CALL:
            return self.repository(message, peer)
        self.answers[message.request_id] = message
        return None

    def _otherwise(self, message, peer):
        if message.method == "device.register":
            self.device = peer.identities[-1]
            self.registrations.append(Register.from_body(message.body))
            self.known = True
            return self._make_reply(message, {"heartbeat_s": 0.05, "version": "test"})
        if message.method == "device.heartbeat":
            self.heartbeats.append(message.body)
            return self._make_reply(message, {"known": self.known})
        raise UnknownMethodError(message.method)

    def ask(self, method, body):
        """Call the device, do not wait; returns the request id."""
        request_id = next(self._ids)
        self.peer.send(Message(type=MessageType.CALL, request_id=request_id, method=method, body=body), self.device)
        return request_id

    def answer(self, request_id):
        return self._wait_until(lambda: self.answers.get(request_id), "the device's answer")

    def call(self, request):
        return self.answer(self.ask(request.method, request.to_body()))


@pytest.fixture
def server(start_peer, blob_handler, make_reply, tail_handler, wait_until):
    return Server(start_peer, blob_handler, make_reply, tail_handler, wait_until)


@pytest.fixture
def start_agent(tmp_path):
    processes = []

    def start(endpoint, *options):
        command = [sys.executable, "-c", "from edge_sdk.cli import main; main()", "run", "--server", endpoint]
        log = (tmp_path / f"agent-{len(processes)}.log").open("w")
        process = subprocess.Popen(
            [*command, "--store", str(tmp_path / "store"), *options], stdout=subprocess.PIPE, stderr=log, text=True
        )
        processes.append(process)
        process.log = lambda: (tmp_path / log.name).read_text()
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def _npy(server, array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return server.repository.add(buffer.getvalue())


@pytest.fixture
def images():
    return np.random.default_rng(5).random((12, 8, 8, 1)).astype(np.float32)


def _registered(server, wait_until, count=1):
    wait_until(lambda: len(server.registrations) >= count, f"{count} registrations")
    return server.registrations[-1]


def test_it_registers_with_its_resources_and_beats(server, start_agent, wait_until):
    emulation = '{"ram": "cgroup", "cpu": "sleep", "link": "proxy", "cpu_slowdown": 1.0}'
    start_agent(
        server.peer.endpoint, "--device-id", "pi-4", "--model-ram", "8MB", "--profile", "pi", "--emulation", emulation
    )
    registration = _registered(server, wait_until)
    assert registration.device_id == "pi-4"
    assert registration.model_ram_bytes == 8_000_000
    assert registration.profile == "pi"
    assert (registration.emulation.ram, registration.emulation.cpu) == ("cgroup", "sleep")
    assert registration.resources.ram_bytes >= registration.resources.ram_available_bytes > 0
    assert registration.resources.runtimes
    assert registration.instance
    assert registration.bundle is None
    wait_until(lambda: len(server.heartbeats) >= 3, "heartbeats")
    assert all(beat["device_id"] == "pi-4" for beat in server.heartbeats)


def test_the_id_of_a_store_stays(server, start_agent, wait_until):
    first = start_agent(server.peer.endpoint, "--ram-share", "0.25")
    registration = _registered(server, wait_until)
    assert registration.model_ram_bytes == int(registration.resources.ram_bytes * 0.25)
    first.send_signal(signal.SIGTERM)
    first.wait()
    start_agent(server.peer.endpoint)
    again = _registered(server, wait_until, 2)
    assert again.device_id == registration.device_id
    assert again.instance != registration.instance


def test_install_and_run(server, start_agent, wait_until, bundles, images):
    digest = server.repository.add_bundle(bundles / "split")
    inputs = {"image": _npy(server, images)}
    start_agent(server.peer.endpoint, "--device-id", "d")
    _registered(server, wait_until)

    installed = InstallReport.from_body(server.call(Install(bundle=digest)).body)
    head = bundles / "split" / "head.tflite"
    assert installed.bundle == digest
    assert installed.head_bytes == head.stat().st_size
    assert installed.peak_bytes > 100_000
    assert installed.runtime_version
    assert installed.fetched_bytes == head.stat().st_size + (bundles / "split" / "manifest.json").stat().st_size
    tail_blob = hashlib.sha256((bundles / "split/tail/saved_model.pb").read_bytes()).hexdigest()
    assert tail_blob not in {sha256 for sha256, _ in server.repository.fetched}

    answer = server.call(Run(bundle=digest, inputs=inputs, first=2, count=9, window=4, warmup=2))
    report = RunReport.from_body(answer.body)
    arrays = answer.arrays()
    assert (report.bundle, report.count) == (digest, 9)
    assert report.sent_bytes > 64
    assert {name: array.shape for name, array in arrays.items()} == {
        "output_0": (9, 3),
        "output_1": (9, 3),
        "edge_s": (9,),
        "transfer_s": (9,),
        "cloud_s": (9,),
    }
    with SplitClient(server.peer.endpoint, bundle=bundles / "split") as client:
        for row in range(9):
            expected = client.infer(images[2 + row]).outputs
            np.testing.assert_array_equal(arrays["output_0"][row], expected["scores"])
            np.testing.assert_array_equal(arrays["output_1"][row], expected["early"])
    assert (arrays["edge_s"] > 0).all()
    wait_until(lambda: server.heartbeats[-1]["progress"] >= 11, "progress in the heartbeats")

    fetched = len(server.repository.fetched)
    assert InstallReport.from_body(server.call(Install(bundle=digest)).body).fetched_bytes == 0
    server.call(Run(bundle=digest, inputs=inputs, first=0, count=1))
    assert len(server.repository.fetched) == fetched


def test_a_head_above_its_memory_limit_is_refused_before_it_serves(server, start_agent, wait_until, bundles, images):
    """What was installed before goes on."""
    split, whole = (server.repository.add_bundle(bundles / name) for name in ("split", "whole"))
    start_agent(server.peer.endpoint)
    resources = _registered(server, wait_until).resources
    peak_bytes = InstallReport.from_body(server.call(Install(bundle=split)).body).peak_bytes
    refused = server.call(Install(bundle=whole, memory_limit_bytes=peak_bytes // 10))
    assert refused.type is MessageType.ERROR
    assert refused.body["code"] == "DOES_NOT_FIT"
    assert "its memory budget is" in refused.body["message"]
    assert refused.body["details"]["memory_limit_bytes"] == peak_bytes // 10
    assert refused.body["details"]["peak_bytes"] > peak_bytes // 10
    answer = server.call(Run(bundle=split, inputs={"image": _npy(server, images)}, first=0, count=3))
    assert answer.type is MessageType.REPLY
    assert server.call(Install(bundle=whole, memory_limit_bytes=10 * peak_bytes)).type is MessageType.REPLY
    assert next(iter(resources.runtimes)) == choose_runtime()


def test_cloud_only_and_edge_only_run_by_the_same_code(server, start_agent, wait_until, bundles, images):
    start_agent(server.peer.endpoint)
    _registered(server, wait_until)
    for name in ("raw", "whole"):
        digest = server.repository.add_bundle(bundles / name)
        installed = InstallReport.from_body(server.call(Install(bundle=digest)).body)
        assert (installed.head_bytes > 0) == (installed.peak_bytes > 0) == (name == "whole")
        answer = server.call(Run(bundle=digest, inputs={"image": _npy(server, images)}, first=0, count=12))
        assert answer.arrays()["output_0"].shape == (12, 3)
        assert (RunReport.from_body(answer.body).sent_bytes > 0) == (name == "raw")


def test_a_bundle_survives_a_restart(server, start_agent, wait_until, bundles, images):
    digest = server.repository.add_bundle(bundles / "split")
    first = start_agent(server.peer.endpoint)
    _registered(server, wait_until)
    server.call(Install(bundle=digest))
    first.terminate()
    assert first.wait() == 0
    start_agent(server.peer.endpoint)
    assert _registered(server, wait_until, 2).bundle == digest
    answer = server.call(Run(bundle=digest, inputs={"image": _npy(server, images)}, first=0, count=3))
    assert answer.arrays()["output_0"].shape == (3, 3)


def test_the_emulated_pause_counts_as_edge_time(server, start_agent, wait_until, bundles, images):
    digest = server.repository.add_bundle(bundles / "whole")
    # Slow enough that the pause is longer than anything else that can happen on the way.
    start_agent(server.peer.endpoint, "--emulation", '{"cpu": "sleep", "cpu_slowdown": 3000}')
    _registered(server, wait_until)
    server.call(Install(bundle=digest))
    answer = server.call(Run(bundle=digest, inputs={"image": _npy(server, images)}, first=0, count=3))
    # At least 5 µs of CPU time for quantizing and running the head.
    assert (answer.arrays()["edge_s"] > 3000 * 5e-6).all()


@pytest.mark.parametrize(
    ("changes", "code", "complaint"),
    [
        ({"inputs": {"picture": "0" * 64}}, "INVALID_INPUT", "expected inputs"),
        ({"count": 13}, "INVALID_INPUT", "has 12 samples"),
        ({"count": 0}, "INVALID_INPUT", "count must be positive"),
        ({"window": 0}, "INVALID_INPUT", "window 1 to 64"),
        ({"bundle": "a" * 64}, "UNKNOWN_BUNDLE", "not installed"),
        ({"inputs": {"image": "1" * 64}}, "UNKNOWN_BLOB", "1" * 64),
    ],
)
def test_a_run_that_makes_no_sense(server, start_agent, wait_until, bundles, images, changes, code, complaint):
    digest = server.repository.add_bundle(bundles / "whole")
    run = Run(bundle=digest, inputs={"image": _npy(server, images)}, first=0, count=2)
    start_agent(server.peer.endpoint)
    _registered(server, wait_until)
    server.call(Install(bundle=digest))
    answer = server.answer(server.ask(Run.method, run.to_body() | changes))
    assert answer.type is MessageType.ERROR
    assert answer.body["code"] == code
    assert complaint in answer.body["message"]


def test_errors_of_an_install(server, start_agent, wait_until, bundles):
    start_agent(server.peer.endpoint)
    _registered(server, wait_until)
    assert server.call(Install(bundle="b" * 64)).body["code"] == "UNKNOWN_BLOB"
    assert server.answer(server.ask(Install.method, {})).body["code"] == "INVALID_INPUT"
    assert server.answer(server.ask("device.dance", {})).body["code"] == "UNKNOWN_METHOD"
    digest = server.repository.add_bundle(bundles / "whole")
    head = hashlib.sha256((bundles / "whole/head.tflite").read_bytes()).hexdigest()
    right = server.repository.blobs[head]
    server.repository.blobs[head] = right[:-1] + b"x"
    assert server.call(Install(bundle=digest)).body["code"] == "INTEGRITY"
    server.repository.blobs[head] = right
    assert server.call(Install(bundle=digest)).type is MessageType.REPLY


def test_a_forgetful_server_is_told_again(server, start_agent, wait_until):
    start_agent(server.peer.endpoint)
    _registered(server, wait_until)
    server.known = False
    assert _registered(server, wait_until, 2).instance == server.registrations[0].instance


def test_an_id_that_another_process_has_is_told_and_asked_for_again(server, start_agent, wait_until, monkeypatch):
    """More and more seldom: what has it may be our own process before a restart, or it may stay."""
    refused = []

    def otherwise(message, peer):
        if message.method == "device.register" and len(refused) < 3:
            refused.append(message)
            raise DeviceIdTakenError("another process is connected as device d: stop it")
        return server._otherwise(message, peer)

    monkeypatch.setattr(server.repository, "_otherwise", otherwise)
    process = start_agent(server.peer.endpoint)
    _registered(server, wait_until)
    assert len(refused) == 3
    assert process.log().count("ERROR another process is connected as device d") == 3
    assert {message.method for message in server.peer.received[:4]} == {"device.register"}


def test_a_repository_that_is_away_is_no_fault_of_the_bundle(server, start_agent, wait_until, bundles, free_endpoint):
    digest = server.repository.add_bundle(bundles / "whole")
    start_agent(server.peer.endpoint, "--device-id", "d")
    _registered(server, wait_until)
    answer = server.call(Install(bundle=digest, repository=free_endpoint))
    assert answer.body["code"] == "DEVICE_UNREACHABLE"
    assert "device d was cut off during device.install: no splitfleet peer answers" in answer.body["message"]


def test_a_run_that_is_cut_off_says_so_when_it_can(server, start_agent, wait_until, start_peer, bundles, images):
    digest = server.repository.add_bundle(bundles / "split")
    start_agent(server.peer.endpoint, "--device-id", "d")
    _registered(server, wait_until)
    server.call(Install(bundle=digest))
    server._tail = lambda *_: None
    run = Run(bundle=digest, inputs={"image": _npy(server, images)}, first=0, count=3)
    asked = server.ask(run.method, run.to_body())
    wait_until(lambda: any(m.type is MessageType.INFER for m in server.peer.received), "a request")
    server.peer.stop()
    server.peer = start_peer(server._handle, server.peer.endpoint)
    answer = server.answer(asked)
    assert answer.body["code"] == "DEVICE_UNREACHABLE"
    assert "device d was cut off during device.run" in answer.body["message"]


@pytest.mark.parametrize("damage", [lambda data: data[:-8] + b"\1" * 8, lambda data: data[:200]])
def test_inputs_that_decayed_are_fetched_again(server, start_agent, wait_until, bundles, images, tmp_path, damage):
    digest = server.repository.add_bundle(bundles / "whole")
    inputs = {"image": _npy(server, images)}
    start_agent(server.peer.endpoint)
    _registered(server, wait_until)
    server.call(Install(bundle=digest))
    run = Run(bundle=digest, inputs=inputs, first=0, count=12)
    right = server.call(run).arrays()["output_0"]
    stored = tmp_path / "store" / "blobs" / f"{inputs['image']}.npy"
    # Written anew: the device has the old file mapped.
    fresh = stored.with_suffix(".fresh")
    fresh.write_bytes(damage(stored.read_bytes()))
    fresh.replace(stored)
    np.testing.assert_array_equal(server.call(run).arrays()["output_0"], right)


def test_it_comes_back_after_the_server(server, start_agent, wait_until, free_endpoint, start_peer):
    process = start_agent(free_endpoint)
    wait_until(lambda: "trying again" in process.log(), "a first attempt in vain")
    start_peer(server._handle, free_endpoint)
    _registered(server, wait_until)
    assert process.poll() is None


def test_it_registers_anew_after_a_reconnect(server, start_agent, wait_until, start_peer):
    peer = server.peer
    start_agent(peer.endpoint)
    _registered(server, wait_until)
    peer.stop()
    server.peer = start_peer(server._handle, peer.endpoint)
    assert _registered(server, wait_until, 2).instance == server.registrations[0].instance


def test_no_error_that_it_answers_with_ends_its_work(server, start_agent, wait_until, bundles):
    """Its words for it have no room in a message."""
    start_agent(server.peer.endpoint)
    _registered(server, wait_until)
    assert server.answer(server.ask("\x01" * 5000, {})).body["code"] == "UNKNOWN_METHOD"
    assert server.answer(server.ask(Install.method, {"bundle": "\x01" * 5000})).type is MessageType.ERROR
    digest = server.repository.add_bundle(bundles / "whole")
    assert server.call(Install(bundle=digest)).type is MessageType.REPLY


@pytest.fixture
def start_agent_here(tmp_path):
    """Start an agent in a thread of this process."""
    agents = []

    def start(endpoint):
        store = DeviceStore.open(tmp_path / "store-here")
        agent = Agent(AgentSettings(server=endpoint, device_id="d", model_ram_bytes=10**7), store)
        thread = threading.Thread(target=agent.run)
        thread.start()
        agents.append((agent, thread, store))
        return agent

    yield start
    for agent, thread, store in agents:
        agent.stop()
        thread.join()
        store.close()


def test_a_connection_that_fails_inside_is_made_anew(server, start_agent_here, wait_until, monkeypatch):
    agent = start_agent_here(server.peer.endpoint)
    _registered(server, wait_until)
    broken = agent._channel
    monkeypatch.setattr(broken, "_receive", lambda: 1 / 0)
    _registered(server, wait_until, 2)
    assert broken.ended
    wait_until(lambda: agent._channel is not broken and len(server.heartbeats) > 3, "heartbeats")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(server, start_agent, wait_until, number):
    process = start_agent(server.peer.endpoint)
    _registered(server, wait_until)
    process.send_signal(number)
    assert process.wait() == 0
    assert process.stdout.read() == ""
    assert "Traceback" not in process.log()


def test_a_signal_ends_it_while_it_works(server, start_agent, wait_until, bundles, images):
    digest = server.repository.add_bundle(bundles / "split")
    process = start_agent(server.peer.endpoint)
    _registered(server, wait_until)
    server.call(Install(bundle=digest))
    infers = len([m for m in server.peer.received if m.type is MessageType.INFER])
    run = Run(bundle=digest, inputs={"image": _npy(server, images)}, first=0, count=12, warmup=10**6)
    server.ask(run.method, run.to_body())
    wait_until(lambda: len([m for m in server.peer.received if m.type is MessageType.INFER]) > infers, "work")
    process.terminate()
    assert process.wait() == 0
    assert "Traceback" not in process.log()


def test_a_signal_ends_it_while_nobody_is_there(start_agent, free_endpoint, wait_until):
    process = start_agent(free_endpoint)
    wait_until(lambda: "trying again" in process.log(), "a first attempt in vain")
    process.terminate()
    assert process.wait() == 0


def test_a_signal_ends_it_while_the_server_is_away(server, start_agent, wait_until):
    process = start_agent(server.peer.endpoint)
    _registered(server, wait_until)
    server.peer.stop()
    wait_until(lambda: "lost the connection" in process.log(), "the loss")
    process.terminate()
    assert process.wait() == 0


def test_a_store_takes_one_agent(server, start_agent, wait_until):
    start_agent(server.peer.endpoint)
    _registered(server, wait_until)
    second = start_agent(server.peer.endpoint)
    assert second.wait() == 1
    assert "another splitfleet-edge works in this store" in second.log()
    assert os.linesep.join(second.log().splitlines()).count("error:") == 1
