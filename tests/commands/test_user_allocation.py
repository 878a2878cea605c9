"""A user's task, end to end: added by commands, its models drawn, split, run on two devices and judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.allocation.candidates import WorkshopCandidates
from cloud_server.allocation.fleet import Array, RunResult
from cloud_server.allocation.means import Means
from cloud_server.allocation.memory_model import MODELS
from cloud_server.allocation.observer import Observer
from cloud_server.allocation.predictions import Predictions
from cloud_server.allocation.run import allocate, find_devices
from cloud_server.allocation.settings import AllocationSettings, Thresholds
from cloud_server.allocation.task_data import task_data
from cloud_server.engines.tensorflow_engine import TensorFlowEngine
from cloud_server.home import Home
from cloud_server.library import Library
from cloud_server.models import LoadOptions, file_source
from cloud_server.registry import Registry
from cloud_server.registry.records import RunState
from converters import Workshop
from edge_sdk.bundle import Bundle
from edge_sdk.errors import ConfigError
from edge_sdk.head import Head
from edge_sdk.protocol import DeviceState, Emulation, InstallReport, Register, Resources
from zoo_keras.samples import Samples

BUDGETS = {"board": 200, "camera": 100_000}


class LocalFleet:
    """Devices and server in this process: heads and tails really run, only the wire is missing."""

    def __init__(self) -> None:
        self.bundles: dict[str, Bundle] = {}
        self.heads: dict[str, Head] = {}
        self.inputs: list[Mapping[str, Array]] = []

    def devices(self) -> Sequence[DeviceState]:
        return [_state(device_id, budget) for device_id, budget in BUDGETS.items()]

    def publish(self, bundle: Bundle) -> None:
        self.bundles[bundle.digest] = bundle

    def unload(self, digest: str) -> None:
        pass

    def publish_inputs(self, inputs: Mapping[str, Array]) -> Mapping[str, str]:
        self.inputs.append(inputs)
        return dict.fromkeys(inputs, str(len(self.inputs) - 1))

    def install(self, device_id: str, digest: str, **_: Any) -> InstallReport:
        self.heads[device_id] = head = Head(self.bundles[digest])
        return InstallReport(
            bundle=digest,
            runtime=head.runtime,
            runtime_version=head.runtime_version,
            head_bytes=head.bundle.head_path.stat().st_size,
            peak_bytes=1,
            fetched_bytes=1,
            install_s=0.1,
        )

    def run(
        self, device_id: str, digest: str, inputs: Mapping[str, str], *, first: int, count: int, **_: int
    ) -> RunResult:
        head = self.heads[device_id]
        assert head.bundle.digest == digest
        samples = {name: self.inputs[int(place)][name][first : first + count] for name, place in inputs.items()}
        results = [head.run({name: array[number] for name, array in samples.items()}) for number in range(count)]
        if head.bundle.manifest.has_tail:
            features = {
                tensor.name: np.concatenate([result.features[place].data for result in results])
                for place, tensor in enumerate(results[0].features)
            }
            outputs = (TensorFlowEngine.load(head.bundle).run(features)["output_0"],)
        else:
            outputs = (np.stack([next(iter(result.outputs.values())) for result in results]),)
        times = np.full(count, 0.001)
        return RunResult(outputs=outputs, edge_s=times, transfer_s=times, cloud_s=times, sent_bytes=1.0)

    def close(self) -> None:
        pass


def _state(device_id: str, budget: int) -> DeviceState:
    resources = Resources(
        ram_bytes=10**9, ram_available_bytes=10**9, cores=1, architecture="x86_64", runtimes={"litert": "2"}
    )
    registration = Register(
        device_id=device_id, resources=resources, model_ram_bytes=budget, profile=None, emulation=Emulation()
    )
    return DeviceState(registration=registration, online=True, silent_s=0.0)


@pytest.fixture
def place(tmp_path: Path, home: Path) -> tuple[Registry, Home]:
    return Registry(f"sqlite:///{tmp_path / 'registry.db'}"), Home.at(home)


def test_an_allocation_of_a_user_s_task(
    document: Callable[..., Any], files: Path, place: tuple[Registry, Home]
) -> None:
    document(
        "tasks",
        "add",
        "halves",
        "--validation",
        files / "validation.npz",
        "--calibration",
        files / "calibration.npz",
        "--test",
        files / "test.npz",
    )
    document("models", "add", "narrow", files / "narrow.keras", "--task", "halves")
    document("models", "add", "wide", files / "wide.keras", "--task", "halves")
    registry, home = place
    settings = AllocationSettings(
        task="halves", thresholds=Thresholds(min_accuracy=0.9), memory_model="cumulative", latency_samples=5
    )
    with (
        registry,
        Workshop(home.conversions, workers=1) as workshop,
        closing(Predictions(home.conversions / "predictions")) as predictions,
    ):
        data = task_data("halves", Library(registry, home))
        assert set(data.recipes) == {"narrow", "wide"}
        fleet = LocalFleet()
        observer = Observer()
        means = Means(
            settings=settings,
            fleet=fleet,
            candidates=WorkshopCandidates(workshop, predictions, data.recipes, MODELS["cumulative"]),
            registry=registry,
            data=data,
            observer=observer,
            abort=fleet.close,
        )
        result = allocate(means, find_devices(fleet, settings, observer, wait=False, endpoint="tcp://nowhere:1"))
        documents = document("allocations", "show")
    assert result.run.state is RunState.ACCEPTED
    by_id = {device.device_id: device.trial for device in result.devices}
    board, camera = by_id["board"], by_id["camera"]
    assert board is not None
    assert camera is not None
    assert (board.model, camera.placement.k) == ("narrow", 5)
    assert board.placement.k < 5
    for trial in (board, camera):
        assert (trial.evaluation.accuracy, trial.evaluation.samples) == (1.0, 60)
        assert (trial.float_accuracy, trial.test_accuracy, trial.test_samples) == (1.0, 1.0, 50)
    assert all(set(inputs) == {"picture"} for inputs in fleet.inputs)
    manifest = fleet.bundles[board.placement.bundle].manifest
    assert (manifest.task, [spec.name for spec in manifest.inputs]) == ("halves", ["picture"])
    assert documents["task"] == "halves"


def test_a_task_is_found_with_its_models_or_told(
    document: Callable[..., Any], files: Path, place: tuple[Registry, Home]
) -> None:
    registry, home = place
    document(
        "tasks", "add", "halves", "--validation", files / "validation.npz", "--calibration", files / "calibration.npz"
    )
    with registry:
        library = Library(registry, home)
        with pytest.raises(ConfigError, match="add one with 'splitfleet models add NAME FILE --task halves'"):
            task_data("halves", library)
        with pytest.raises(ConfigError, match="the tasks are: fashion-mnist, halves"):
            task_data("nothing", library)
        document("models", "add", "narrow", files / "narrow.keras", "--task", "halves")
        data = task_data("halves", library)
        assert data.test is None
        assert len(data.validation) == 60
        assert data.metric([np.eye(2)[data.validation.labels]], data.validation.labels).mean() == 1.0
        recipe = data.recipes["narrow"]
        assert (recipe.task, recipe.model_name) == ("halves", "narrow")
        assert recipe.calibration is not None
        assert {name: array.shape for name, array in recipe.calibration().items()} == {"picture": (40, 8, 8, 1)}
        again = task_data("halves", library).recipes["narrow"]
        assert again.fingerprint == recipe.fingerprint
        assert dataclasses.replace(recipe, model_name="other") != again


def test_a_whole_model_predicts_whatever_the_structure_of_its_ends(files: Path, tmp_path: Path) -> None:
    from tiny_models import two_input_samples

    recipe = file_source(files / "pair.keras", LoadOptions()).recipe(None)
    samples = Samples(inputs=two_input_samples(20), labels=np.zeros(20, np.int64))
    with closing(Predictions(tmp_path)) as predictions:
        outputs = predictions.of(recipe, samples)
    assert [output.shape for output in outputs] == [(20, 3), (20, 1)]
