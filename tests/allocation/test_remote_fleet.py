"""An allocation over a real channel, against a scripted peer that plays the server and its devices."""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from cloud_server.allocation.core import OutcomeState
from cloud_server.allocation.means import Means
from cloud_server.allocation.observer import Observer
from cloud_server.allocation.remote_fleet import RemoteFleet
from cloud_server.allocation.run import allocate, find_devices
from cloud_server.allocation.settings import AllocationSettings, Thresholds
from cloud_server.allocation.task_data import TaskData
from cloud_server.allocation.trial import TrialState
from cloud_server.registry import Registry
from edge_sdk.errors import ConfigError, DeviceUnreachableError, PeerUnreachableError, ProtocolError, to_wire
from edge_sdk.manifest import parse
from edge_sdk.protocol import DeviceState
from edge_sdk.wire import Message, MessageType, Tensor, decode, encode

MakeState = Callable[..., DeviceState]
Answer = tuple[dict[str, Any], list[Tensor]]

DEVICES = ("d0", "d1", "hung")
MODELS = ("a", "b", "c")


class ScriptedPeer:
    """A ROUTER that answers what an allocator asks; ``asked`` holds the methods in order."""

    def __init__(self, states: list[DeviceState], data: TaskData) -> None:
        self.states = states
        self.labels = {"validation": data.validation.labels, "test": data.test.labels}
        self.sets = {len(data.validation): "validation", len(data.test): "test"}
        self.blobs: dict[str, bytes] = {}
        self.loaded: set[str] = set()
        self.installed: dict[str, str] = {}
        self.asked: list[str] = []
        self.stalls: set[float] = set()
        self.break_listing = False
        # What a device says instead of the truth, by method.
        self.lies: dict[str, Callable[[dict[str, Any], list[Tensor]], Answer]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close(0)
        self._context.term()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(20):
                continue
            peer, *frames = self._socket.recv_multipart()
            call = decode(frames)
            self.asked.append(str(call.method))
            try:
                body, tensors = self._answer(str(call.method), call.body, call.arrays())
                answer = Message(type=MessageType.REPLY, request_id=call.request_id, body=body, tensors=tuple(tensors))
            except Exception as error:
                answer = Message(type=MessageType.ERROR, request_id=call.request_id, body=to_wire(error))
            self._socket.send_multipart([peer, *encode(answer)])

    def _answer(self, method: str, body: dict[str, Any], arrays: dict[str, Any]) -> Answer:
        if method == "fleet.devices":
            following = [state for state in self.states if body["after"] is None or self._id(state) > body["after"]]
            more = len(following) > 1
            last = DEVICES[0] if self.break_listing else self._id(following[0])
            return {"devices": [following[0].to_body()], "next": last if more else None}, []
        if method == "blob.stat":
            data = self.blobs.get(body["sha256"])
            return {"size": None if data is None else len(data)}, []
        if method == "blob.fetch":
            data = self.blobs[body["sha256"]][body["offset"] : body["offset"] + body["length"]]
            return {}, [Tensor(name="chunk", data=np.frombuffer(data, dtype=np.uint8))]
        if method == "blob.put":
            so_far = self.blobs.get(body["sha256"], b"")
            assert len(so_far) == body["offset"]
            data = self.blobs[body["sha256"]] = so_far + arrays["chunk"].tobytes()
            assert len(data) < body["size"] or hashlib.sha256(data).hexdigest() == body["sha256"]
            return {"received": len(data)}, []
        if method == "tail.load":
            manifest = parse(self.blobs[body["bundle"]])
            assert all(entry.sha256 in self.blobs for entry in manifest.files)
            self.loaded.add(body["bundle"])
            return {"load_s": 0.1, "engine": "tensorflow"}, []
        if method == "tail.unload":
            self.loaded.discard(body["bundle"])
            return {"unloaded": True}, []
        assert method == "fleet.call"
        self.stalls.add(body["stall_timeout_s"])
        if body["device_id"] == "hung":
            raise DeviceUnreachableError("device hung made no progress for 7 s")
        answer = self._device(body["device_id"], body["device_method"], body["params"])
        lie = self.lies.get(body["device_method"])
        return answer if lie is None or body["device_id"] != "d1" else lie(*answer)

    def _device(self, device_id: str, method: str, params: dict[str, Any]) -> Answer:
        manifest = parse(self.blobs[params["bundle"]])
        if method == "device.install":
            assert params["bundle"] in self.loaded or not manifest.has_tail
            self.installed[device_id] = params["bundle"]
            head_bytes = sum(entry.size_bytes for entry in manifest.head_files)
            report = {
                "bundle": params["bundle"],
                "runtime": "litert",
                "runtime_version": "2.3",
                "head_bytes": head_bytes,
            }
            return report | {"peak_bytes": 1000, "fetched_bytes": head_bytes, "install_s": 0.1}, []
        assert method == "device.run"
        assert self.installed[device_id] == params["bundle"]
        first, count = params["first"], params["count"]
        images = np.load(self._file(params["inputs"]["image"]), allow_pickle=False)
        labels = self.labels[self.sets[len(images)]][first : first + count]
        # Model "a" is always wrong, so whoever draws it draws again.
        classes = (labels + 1) % 3 if manifest.model.name == "a" else labels
        times = {"edge_s": 0.001, "transfer_s": 0.002, "cloud_s": 0.003}
        tensors = [Tensor(name="output_0", data=np.eye(3, dtype=np.float32)[classes])]
        tensors += [Tensor(name=name, data=np.full(count, value)) for name, value in times.items()]
        report = {"bundle": params["bundle"], "runtime": "litert", "count": count}
        return report | {"sent_bytes": 99.5, "received_bytes": 10.0}, tensors

    def _file(self, sha256: str) -> Any:
        return io.BytesIO(self.blobs[sha256])

    @staticmethod
    def _id(state: DeviceState) -> str:
        return state.registration.device_id


@pytest.fixture
def peer(make_state: MakeState, data: TaskData) -> Iterator[ScriptedPeer]:
    scripted = ScriptedPeer([make_state(device_id) for device_id in DEVICES], data)
    yield scripted
    scripted.close()


def test_an_allocation_over_the_wire(peer: ScriptedPeer, candidates: Any, registry: Registry, data: TaskData) -> None:
    settings = AllocationSettings(
        task="t",
        thresholds=Thresholds(min_accuracy=0.8, max_latency_ms=50),
        device_timeout_s=7.0,
        latency_samples=30,
        baselines=True,
    )
    with RemoteFleet(peer.endpoint, stall_timeout_s=settings.device_timeout_s) as fleet:
        devices = find_devices(fleet, settings, Observer(), wait=False, endpoint=peer.endpoint)
        assert tuple(devices) == DEVICES
        means = Means(
            settings=settings,
            fleet=fleet,
            candidates=candidates,
            registry=registry,
            data=data,
            observer=Observer(),
            abort=fleet.close,
        )
        result = allocate(means, devices)
    assert isinstance(result.error(), DeviceUnreachableError)
    by_id = {device.device_id: device for device in result.devices}
    for device_id in ("d0", "d1"):
        trial = by_id[device_id].trial
        assert trial is not None
        assert trial.evaluation is not None
        assert trial.model in "bc"
        assert (trial.evaluation.accuracy, trial.evaluation.latency_samples) == (1.0, 30)
        assert trial.evaluation.latency_p95_ms == pytest.approx(6.0)
        assert trial.evaluation.sent_bytes == 99.5
        assert trial.test_accuracy == 1.0
        assert set(by_id[device_id].baselines) == {"cloud-only"}
    assert by_id["hung"].state == "unreachable"
    assert peer.installed == {each.device_id: each.bundle for each in registry.active_allocations()}
    assert peer.loaded == set(registry.active_bundles())
    assert peer.stalls == {7.0}


def test_what_the_repository_has_is_not_sent_again(peer: ScriptedPeer, candidates: Any, data: TaskData) -> None:
    bundle = candidates.made("a", 2)
    with RemoteFleet(peer.endpoint, stall_timeout_s=1.0) as fleet:
        fleet.publish(bundle)
        assert fleet.publish_inputs(data.test.inputs) == fleet.publish_inputs(data.test.inputs)
        sent = peer.asked.count("blob.put")
        fleet.publish(bundle)
    assert peer.asked.count("blob.put") == sent == len(peer.blobs)


def test_what_another_published_can_be_run(peer: ScriptedPeer, candidates: Any, data: TaskData) -> None:
    bundle = candidates.made("b", 2)
    with RemoteFleet(peer.endpoint, stall_timeout_s=1.0) as first:
        first.publish(bundle)
        inputs = first.publish_inputs(data.test.inputs)
        first.install("d0", bundle.digest)
    with RemoteFleet(peer.endpoint, stall_timeout_s=1.0) as second:
        result = second.run("d0", bundle.digest, inputs, first=0, count=5, window=1, warmup=0)
    assert (result.outputs[0].argmax(axis=1) == data.test.labels[:5]).all()


def test_a_bundle_without_a_tail_loads_none(peer: ScriptedPeer, candidates: Any) -> None:
    with RemoteFleet(peer.endpoint, stall_timeout_s=1.0) as fleet:
        fleet.publish(candidates.made("a", 4))
    assert "tail.load" not in peer.asked


def test_a_listing_that_never_ends_is_refused(peer: ScriptedPeer) -> None:
    peer.break_listing = True
    with RemoteFleet(peer.endpoint, stall_timeout_s=1.0) as fleet, pytest.raises(ProtocolError, match="ends in"):
        fleet.devices()


def test_closing_ends_what_is_under_way(peer: ScriptedPeer) -> None:
    fleet = RemoteFleet(peer.endpoint, stall_timeout_s=1.0)
    fleet.close()
    with pytest.raises(PeerUnreachableError):
        fleet.devices()


def _says(**values: Any) -> Callable[[dict[str, Any], list[Tensor]], Answer]:
    return lambda body, tensors: (body | values, tensors)


def _sends(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any], list[Tensor]], Answer]:
    return lambda body, tensors: (
        body,
        [Tensor(name=each.name, data=change(each.data)) if each.name == name else each for each in tensors],
    )


LIES = {
    "another bundle installed": ("device.install", _says(bundle="0" * 64)),
    "a negative peak": ("device.install", _says(peak_bytes=-1)),
    "a peak of 2**63": ("device.install", _says(peak_bytes=2**63)),
    "a peak that is a text": ("device.install", _says(peak_bytes="small")),
    "an endless install": ("device.install", _says(install_s=float("inf"))),
    "another bundle run": ("device.run", _says(bundle="0" * 64)),
    "another count": ("device.run", _says(count=7)),
    "sent bytes that are none": ("device.run", _says(sent_bytes=float("nan"))),
    "sent bytes without end": ("device.run", _says(sent_bytes=float("inf"))),
    "outputs without classes": ("device.run", _sends("output_0", lambda data: data[:, :0])),
    "outputs of another type": ("device.run", _sends("output_0", lambda data: data.astype(np.float64))),
    "no outputs": ("device.run", lambda body, tensors: (body, tensors[1:])),
    "too few times": ("device.run", _sends("edge_s", lambda data: data[:-1])),
    "a negative time": ("device.run", _sends("cloud_s", lambda data: -data)),
    "times past all bounds": ("device.run", _sends("transfer_s", lambda data: data + 1e300)),
    "times that are none": ("device.run", _sends("edge_s", lambda data: data * np.nan)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_device_that_answers_nonsense_costs_its_own_trials_only(
    peer: ScriptedPeer, candidates: Any, registry: Registry, data: TaskData, lie: str
) -> None:
    method, told = LIES[lie]
    peer.states = peer.states[:2]
    peer.lies[method] = told
    settings = AllocationSettings(task="t", thresholds=Thresholds(), latency_samples=10)
    with RemoteFleet(peer.endpoint, stall_timeout_s=7.0) as fleet:
        means = Means(
            settings=settings,
            fleet=fleet,
            candidates=candidates,
            registry=registry,
            data=data,
            observer=Observer(),
            abort=fleet.close,
        )
        result = allocate(means, find_devices(fleet, settings, Observer(), wait=False, endpoint=peer.endpoint))
    honest, lying = result.devices
    assert (honest.state, lying.state) == (OutcomeState.ACCEPTED, OutcomeState.FAILED)
    assert {trial.state for trial in lying.trials} == {TrialState.BROKEN_OFF}
    assert all(method in trial.reason for trial in lying.trials)
    assert peer.loaded == set(registry.active_bundles())


def test_a_bad_endpoint_is_told() -> None:
    with pytest.raises(ConfigError, match="is not an endpoint"):
        RemoteFleet("localhost", stall_timeout_s=1.0)
