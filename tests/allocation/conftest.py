"""Candidates and a fleet without TensorFlow, sockets or devices, for the tests of the loop."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from cloud_server.allocation.fleet import Array, RunResult
from cloud_server.allocation.memory_model import Choice, ChosenCut, NoCut
from cloud_server.allocation.metrics import accuracy
from cloud_server.allocation.task_data import TaskData
from cloud_server.registry import Registry
from converters.precision import PRECISIONS, Attempt, Ladder
from edge_sdk.bundle import Bundle
from edge_sdk.errors import ConversionError, DoesNotFitError, UnknownBundleError
from edge_sdk.manifest import CrossingSpec, Cut, FileEntry, InputSpec, Manifest, ModelRef, OutputSpec, Precision
from edge_sdk.protocol import DeviceState, Emulation, InstallReport, Register, Resources
from zoo_keras.samples import Samples

N = 4
CLASSES = 3
BYTES_OF_A_LAYER = 100


def sample_set(count: int, seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    return Samples(
        inputs={"image": rng.integers(0, 255, (count, 2, 2, 1), dtype=np.uint8)}, labels=rng.integers(0, CLASSES, count)
    )


def device_state(device_id: str, *, budget: int = 250, emulated: bool = False, online: bool = True) -> DeviceState:
    registration = Register(
        device_id=device_id,
        resources=Resources(
            ram_bytes=10**9, ram_available_bytes=10**8, cores=4, architecture="x86_64", runtimes={"litert": "2.3"}
        ),
        model_ram_bytes=budget,
        profile="rpi-4",
        emulation=Emulation(cpu="sleep") if emulated else Emulation(),
    )
    return DeviceState(registration=registration, online=online, silent_s=0.0 if online else 60.0)


def make_bundle(folder: Path, model: str, k: int, precision: Precision = "int8", reason: str = "") -> Bundle:
    """A bundle that is whole to everyone who does not look into the files."""
    contents = {}
    if k > 0:
        contents["head.tflite"] = f"head of {model} at {k}".encode()
    if k < N:
        contents["tail/saved_model.pb"] = f"tail of {model} at {k}".encode() * 1000
    for path, data in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    crossing = CrossingSpec(name="feature_0", source="layer", shape=(2,), dtype="int8", scale=1.0, zero_point=0)
    manifest = Manifest(
        task="t",
        model=ModelRef(name=model, sha256=hashlib.sha256(model.encode()).hexdigest()),
        cut=Cut(k=k, n=N, name=f"layer_{k}"),
        precision=precision,
        precision_reason=reason,
        inputs=(InputSpec(name="image", shape=(2, 2, 1), dtype="float32", scale=1.0, zero_point=-128),),
        crossing=(crossing,) if k < N else (),
        outputs=(OutputSpec(name="p", side="tail" if k < N else "head", shape=(CLASSES,), dtype="float32"),),
        files=tuple(
            FileEntry(path=path, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
            for path, data in contents.items()
        ),
        self_check=None,
        cumulative_bytes=k * BYTES_OF_A_LAYER,
    )
    (folder / "manifest.json").write_bytes(manifest.canonical())
    return Bundle.open(folder)


@dataclass(kw_only=True)
class FakeCandidates:
    """Models of four layers of 100 B each, 400 B in other precisions than int8. ``broken`` tells which cannot be built,
    and how, ``poor`` which are no good in int8.
    """

    folder: Path
    models: Sequence[str] = ("a", "b", "c")
    layer_bytes: Mapping[str, int] = field(default_factory=dict)
    broken: Mapping[str, Exception] = field(default_factory=dict)
    poor: Collection[str] = ()
    built: list[tuple[str, int]] = field(default_factory=list)
    runtimes: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, model: str, budget_bytes: int, runtime: str) -> Choice | NoCut:
        self.runtimes.append(runtime)
        size = self.layer_bytes.get(model, BYTES_OF_A_LAYER)
        sizes = {precision: size if precision == "int8" else 4 * size for precision in PRECISIONS}
        cuts = {precision: self._cut(layer, budget_bytes) for precision, layer in sizes.items()}
        if isinstance(cuts["int8"], NoCut):
            return cuts["int8"]
        ladder = Ladder.of("auto", None, lambda each: cut.k if isinstance(cut := cuts[each], ChosenCut) else cut.reason)
        return Choice(cuts=cuts, ladder=ladder)

    @staticmethod
    def _cut(layer: int, budget_bytes: int) -> ChosenCut | NoCut:
        k = min(budget_bytes // layer, N)
        if k == 0:
            reason = f"its smallest head needs {layer} B, the budget is {budget_bytes} B"
            return NoCut(reason=reason, needed_bytes=layer)
        return ChosenCut(k=k, n=N, cut=f"layer_{k}", predicted_bytes=k * layer, whole_bytes=N * layer)

    def build(self, model: str, choice: Choice) -> Bundle:
        def attempt(wanted: Attempt) -> Bundle:
            if model in self.poor and wanted.precision == "int8":
                raise ConversionError("its error is 0.5 of the signal")
            return self.made(model, wanted.k, wanted.precision, wanted.before)

        return choice.ladder.climb(attempt)

    def build_cloud_only(self, model: str) -> Bundle:
        return self.made(model, 0)

    def made(self, model: str, k: int, precision: Precision = "int8", reason: str = "") -> Bundle:
        if model in self.broken:
            raise self.broken[model]
        with self._lock:
            self.built.append((model, k))
            folder = self.folder / f"{model}-{k}-{precision}"
            return Bundle.open(folder) if folder.exists() else make_bundle(folder, model, k, precision, reason)

    def predict(self, model: str, samples: Samples) -> Sequence[Array]:  # noqa: ARG002
        return [one_hot(samples.labels)]


def one_hot(classes: Array) -> Array:
    return np.eye(CLASSES, dtype=np.float32)[classes]


Behaviour = Callable[[str, str], tuple[float, float]]


@dataclass(kw_only=True)
class FakeFleet:
    """Devices that answer by ``behaviour(device, model) -> (accuracy, latency in ms)``, which may raise.

    ``listing(round)`` gives the devices each time that they are asked for.
    """

    data: TaskData
    behaviour: Behaviour
    listing: Callable[[int], Sequence[DeviceState]]
    listed: int = 0
    bundles: dict[str, Bundle] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    published: list[str] = field(default_factory=list)
    installed: dict[str, str] = field(default_factory=dict)
    memory_limits: list[int | None] = field(default_factory=list)
    refused: int = 0
    inputs: dict[str, Samples] = field(default_factory=dict)
    was_closed: threading.Event = field(default_factory=threading.Event)
    latency_runs: list[str] = field(default_factory=list)
    most_at_once: int = 0
    _at_once: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def devices(self) -> Sequence[DeviceState]:
        self.listed += 1
        return self.listing(self.listed)

    def publish(self, bundle: Bundle) -> None:
        self.published.append(bundle.digest)
        self.bundles[bundle.digest] = bundle
        self.loaded.add(bundle.digest)

    def unload(self, digest: str) -> None:
        self.loaded.discard(digest)

    def publish_inputs(self, inputs: Mapping[str, Array]) -> Mapping[str, str]:
        samples = next(each for each in (self.data.validation, self.data.test) if each.inputs is inputs)
        self.inputs[samples.digest] = samples
        return {"image": samples.digest}

    def install(self, device_id: str, digest: str, *, memory_limit_bytes: int | None = None) -> InstallReport:
        self.memory_limits.append(memory_limit_bytes)
        if len(self.memory_limits) <= self.refused:
            raise DoesNotFitError("its head is too large")
        if digest not in self.loaded:
            raise UnknownBundleError(f"no bundle {digest}")
        self.installed[device_id] = digest
        return InstallReport(
            bundle=digest,
            runtime="litert",
            runtime_version="2.3",
            head_bytes=sum(entry.size_bytes for entry in self.bundles[digest].manifest.head_files),
            peak_bytes=5000,
            fetched_bytes=100,
            install_s=0.1,
        )

    def run(
        self,
        device_id: str,
        digest: str,
        inputs: Mapping[str, str],
        *,
        first: int,
        count: int,
        window: int,
        warmup: int,
    ) -> RunResult:
        assert self.installed[device_id] == digest
        assert warmup == 0 or window == 1
        with self._lock:
            self._at_once += 1
            if window == 1:
                self.latency_runs.append(device_id)
                self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            share, latency_ms = self.behaviour(device_id, self.bundles[digest].manifest.model.name)
        finally:
            with self._lock:
                self._at_once -= 1
        samples = self.inputs[inputs["image"]]
        right = np.arange(len(samples)) < round(share * len(samples))
        classes = np.where(right, samples.labels, (samples.labels + 1) % CLASSES)
        edge = 0 if self.bundles[digest].manifest.cut.k == 0 else latency_ms / 2000
        return RunResult(
            outputs=(one_hot(classes[first : first + count]),),
            edge_s=np.full(count, edge),
            transfer_s=np.full(count, latency_ms / 1000 - edge),
            cloud_s=np.zeros(count),
            sent_bytes=123.0,
        )

    def close(self) -> None:
        self.was_closed.set()


@pytest.fixture
def data() -> TaskData:
    return TaskData(recipes={}, metric=accuracy, validation=sample_set(100, seed=1), test=sample_set(40, seed=2))


@pytest.fixture
def candidates(tmp_path: Path) -> FakeCandidates:
    return FakeCandidates(folder=tmp_path / "bundles")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(f"sqlite:///{tmp_path / 'registry.db'}") as opened:
        yield opened


@pytest.fixture
def make_state() -> Callable[..., DeviceState]:
    return device_state


@pytest.fixture
def make_fleet(data: TaskData) -> Callable[..., FakeFleet]:
    def make(behaviour: Behaviour, *devices: DeviceState) -> FakeFleet:
        return FakeFleet(data=data, behaviour=behaviour, listing=lambda _: devices)

    return make
