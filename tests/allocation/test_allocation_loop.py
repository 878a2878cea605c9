"""The loop and what follows it, over a fleet that is not there: what is deployed, measured, recorded and tidied up."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from cloud_server.allocation.core import OutcomeState
from cloud_server.allocation.means import Means
from cloud_server.allocation.observer import Observer
from cloud_server.allocation.result import AllocationResult, read_result
from cloud_server.allocation.run import allocate, find_devices
from cloud_server.allocation.settings import AllocationSettings, Thresholds
from cloud_server.allocation.task_data import TaskData
from cloud_server.allocation.trial import Trial, TrialState
from cloud_server.cli.allocation_table import allocation_table, trials_table
from cloud_server.registry import Registry
from cloud_server.registry.records import RunState
from edge_sdk.errors import (
    ConfigError,
    ConversionError,
    DeviceUnreachableError,
    DoesNotFitError,
    InfeasibleError,
    IntegrityError,
    OverloadedError,
    PeerUnreachableError,
    ProtocolError,
    RemoteInternalError,
    SplitfleetError,
    StorageError,
    TailFailedError,
    UnknownBundleError,
)
from edge_sdk.protocol import DeviceState

Fleet = Any
Candidates = Any
MakeFleet = Callable[..., Fleet]
MakeState = Callable[..., DeviceState]
Allocate = Callable[..., AllocationResult]

LIMITS = Thresholds(min_accuracy=0.8, max_latency_ms=50.0, latency_statistic="mean")


class Recorder(Observer):
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.trials: list[Trial] = []
        self.doing: list[str] = []
        self.phases: list[str] = []

    def warned(self, message: str) -> None:
        self.warnings.append(message)

    def trial_ended(self, trial: Trial) -> None:
        self.trials.append(trial)

    def phase_started(self, name: str) -> None:
        self.phases.append(name)

    def progress(self, device_id: str, doing: str) -> None:  # noqa: ARG002
        self.doing.append(doing)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def run(candidates: Candidates, registry: Registry, data: TaskData, recorder: Recorder) -> Allocate:
    def allocated(fleet: Fleet, **settings: Any) -> AllocationResult:
        wanted = AllocationSettings(
            **({"task": "t", "thresholds": LIMITS, "latency_samples": 20, "seed": 1} | settings)
        )
        devices = find_devices(fleet, wanted, recorder, wait=False, endpoint="tcp://nowhere:1")
        means = Means(
            settings=wanted,
            fleet=fleet,
            candidates=candidates,
            registry=registry,
            data=data,
            observer=recorder,
            abort=fleet.close,
        )
        return allocate(means, devices)

    return allocated


def good(device_id: str, model: str) -> tuple[float, float]:  # noqa: ARG001
    return 0.9, 20.0


def test_a_good_candidate_is_accepted_and_recorded(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, registry: Registry
) -> None:
    fleet = make_fleet(good, make_state("x"))
    result = run(fleet)
    assert result.error() is None
    (device,) = result.devices
    assert device.state is OutcomeState.ACCEPTED
    assert device.trial is not None
    evaluation, placement = device.trial.evaluation, device.trial.placement
    assert evaluation is not None
    assert placement is not None
    assert (placement.k, placement.n, placement.cut, placement.predicted_bytes) == (2, 4, "layer_2", 200)
    assert (evaluation.samples, evaluation.accuracy) == (100, pytest.approx(0.9))
    assert (evaluation.latency_samples, evaluation.latency_mean_ms) == (20, pytest.approx(20.0))
    assert evaluation.edge_ms + evaluation.transfer_ms + evaluation.cloud_ms == pytest.approx(20.0)
    assert evaluation.measured_peak_bytes == 5000
    assert (device.trial.test_accuracy, device.trial.test_samples) == (pytest.approx(0.9), 40)
    assert device.trial.float_accuracy == 1.0
    assert registry.active_bundles() == [placement.bundle]
    assert fleet.installed == {"x": placement.bundle}
    assert fleet.loaded == {placement.bundle}
    assert read_result(registry, result.run.run_id) == result
    assert result.run.state is RunState.ACCEPTED


def test_under_the_peak_rule_a_device_may_refuse(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, candidates: Candidates, recorder: Recorder
) -> None:
    """The budget goes along with the bundle; what the device measures above it does not fit, and another is drawn."""
    fleet = make_fleet(good, make_state("x", budget=222))
    fleet.refused = 2
    result = run(fleet, memory_model="peak")
    assert fleet.memory_limits == [222] * 3
    assert set(candidates.runtimes) == {"litert"}
    (device,) = result.devices
    assert device.state is OutcomeState.ACCEPTED
    states = [trial.state for trial in recorder.trials]
    assert states == [TrialState.DOES_NOT_FIT, TrialState.DOES_NOT_FIT, TrialState.ACCEPTED]


def test_the_cumulative_rule_limits_no_process(run: Allocate, make_fleet: MakeFleet, make_state: MakeState) -> None:
    fleet = make_fleet(good, make_state("x", budget=222))
    run(fleet, memory_model="cumulative")
    assert fleet.memory_limits == [None]


def test_who_falls_short_draws_anew_and_unused_tails_are_unloaded(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, registry: Registry
) -> None:
    # Which model comes first is the draw's matter: x takes none but the one that it meets last.
    tried: list[str] = []

    def picky(device_id: str, model: str) -> tuple[float, float]:
        if device_id == "y":
            return 0.9, 20.0
        if model not in tried:
            tried.append(model)
        return {1: (0.5, 20.0), 2: (0.9, 99.0), 3: (0.85, 30.0)}[len(tried)]

    fleet = make_fleet(picky, make_state("x"), make_state("y", budget=350))
    result = run(fleet)
    x, y = result.devices
    assert [(trial.state, trial.missed) for trial in x.trials] == [
        (TrialState.MISSED, ("accuracy",)),
        (TrialState.MISSED, ("latency",)),
        (TrialState.ACCEPTED, ()),
    ]
    assert [trial.round for trial in x.trials] == [1, 2, 3]
    assert len(y.trials) == 1
    assert result.run.rounds == 3
    assert fleet.loaded == set(registry.active_bundles())
    assert len(fleet.published) == 4


def test_infeasible_ends_with_the_nearest_miss(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, registry: Registry
) -> None:
    misses = {"a": (0.7, 20.0), "b": (0.79, 20.0), "c": (0.9, 80.0)}
    result = run(make_fleet(lambda _, model: misses[model], make_state("x")))
    (device,) = result.devices
    assert device.state is OutcomeState.INFEASIBLE
    assert device.trial is not None
    assert device.trial.model == "b"
    error = result.error()
    assert isinstance(error, InfeasibleError)
    assert error.exit_code == 3
    assert "infeasible: x" in error.message
    assert registry.active_bundles() == []


def test_a_model_that_cannot_fit_is_passed_over_without_a_deployment(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, candidates: Candidates
) -> None:
    candidates.layer_bytes = {"a": 1000, "b": 1000}
    fleet = make_fleet(good, make_state("x"), make_state("y"), make_state("z"))
    result = run(fleet)
    assert result.error() is None
    assert result.run.rounds == 1
    assert {model for model, _ in candidates.built} == {"c"}
    for device in result.devices:
        assert device.trials[-1].model == "c"
        assert all(trial.state is TrialState.DOES_NOT_FIT for trial in device.trials[:-1])
        assert all("the budget is 250 B" in trial.reason for trial in device.trials[:-1])
    assert len(set(fleet.published)) == len(fleet.published) == 1


def test_a_model_that_int8_spoils_gets_another_precision_where_that_fits(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, candidates: Candidates, registry: Registry
) -> None:
    candidates.models = ("a",)
    candidates.poor = {"a"}
    result = run(make_fleet(good, make_state("x", budget=450), make_state("y", budget=250)))
    x, y = result.devices
    assert x.trial is not None
    placement = x.trial.placement
    assert placement is not None
    assert (placement.k, placement.predicted_bytes, placement.whole_bytes) == (1, 400, 1600)
    assert placement.precision == "int8-weights"
    assert placement.precision_reason == "int8 at k=4: its error is 0.5 of the signal"
    assert placement in [trial.placement for trial in registry.trials(result.run.run_id)]
    (trial,) = y.trials
    assert trial.state is TrialState.DOES_NOT_FIT
    assert trial.reason.startswith("int8: its error is 0.5 of the signal; int8-weights: its smallest head needs 400 B")
    documents = {each["device_id"]: each for each in result.to_document()["devices"]}
    assert documents["x"]["allocation"]["precision"] == "int8-weights"
    assert documents["x"]["allocation"]["precision_reason"] == placement.precision_reason
    assert documents["y"]["trials"][0]["precision"] is None
    for table in (allocation_table(result), trials_table(result, width=400)):
        console = Console(width=400, file=io.StringIO(), record=True)
        console.print(table)
        assert "the head is int8-weights: int8 at k=4: its error is 0.5 of the signal" in console.export_text()


def test_another_model_is_drawn_at_once_where_no_good_precision_fits(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, candidates: Candidates
) -> None:
    candidates.poor = {"a", "b"}
    result = run(make_fleet(good, *(make_state(name) for name in "vwxyz")))
    assert result.error() is None
    assert result.run.rounds == 1
    for device in result.devices:
        assert device.trials[-1].model == "c"
        assert all(trial.state is TrialState.DOES_NOT_FIT for trial in device.trials[:-1])
    assert any(len(device.trials) > 1 for device in result.devices)


def test_nothing_fits(run: Allocate, make_fleet: MakeFleet, make_state: MakeState, candidates: Candidates) -> None:
    candidates.layer_bytes = {"b": 70}
    result = run(make_fleet(good, make_state("x", budget=50)))
    error = result.error()
    assert isinstance(error, InfeasibleError)
    assert error.message.endswith(
        "infeasible: x (no model fits; of 'b', its smallest head needs 70 B, the budget is 50 B; "
        "give it at least 70 B, or take a smaller model) (every model was tried)"
    )
    assert [trial.state for trial in result.devices[0].trials] == [TrialState.DOES_NOT_FIT] * 3
    assert result.devices[0].trial is None
    assert result.to_document()["devices"][0]["nearest_miss"] is None


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (TailFailedError("the tail raised"), TrialState.FAILED),
        (DoesNotFitError("measured peak exceeds the budget"), TrialState.DOES_NOT_FIT),
        (DeviceUnreachableError("no progress"), TrialState.UNREACHABLE),
    ],
)
def test_an_error_of_one_device_fails_its_trial_only(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, error: Exception, state: TrialState
) -> None:
    calls: list[str] = []

    def once(device_id: str, model: str) -> tuple[float, float]:  # noqa: ARG001
        calls.append(device_id)
        if device_id == "x" and calls.count("x") == 1:
            raise error
        return 0.9, 20.0

    result = run(make_fleet(once, make_state("x"), make_state("y")))
    x, y = result.devices
    assert [trial.state for trial in x.trials] == [state, TrialState.ACCEPTED]
    assert x.trials[0].reason == str(error)
    assert y.state is OutcomeState.ACCEPTED


def test_a_model_that_cannot_be_built_fails_its_trial(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, candidates: Candidates
) -> None:
    candidates.broken = {"a": ConversionError("no int8 kernel"), "b": ConversionError("no int8 kernel")}
    result = run(make_fleet(good, make_state("x")))
    assert result.error() is None
    assert {trial.model: trial.state for trial in result.devices[0].trials}["c"] is TrialState.ACCEPTED


def test_a_device_that_hangs_leaves_the_others_and_the_run_ends_with_4(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState
) -> None:
    def hung(device_id: str, model: str) -> tuple[float, float]:  # noqa: ARG001
        if device_id == "hung":
            raise DeviceUnreachableError("device hung made no progress for 60 s")
        return 0.9, 20.0

    result = run(make_fleet(hung, make_state("hung"), make_state("x")))
    error = result.error()
    assert isinstance(error, DeviceUnreachableError)
    assert error.exit_code == 4
    assert {device.device_id: device.state for device in result.devices} == {
        "hung": OutcomeState.UNREACHABLE,
        "x": OutcomeState.ACCEPTED,
    }


FAULTS = [
    StorageError("/srv/blobs: No space left on device"),
    IntegrityError("head.tflite does not match its SHA-256"),
    RemoteInternalError("unexpected KeyError"),
    OverloadedError("16 calls are under way"),
    ProtocolError("device.run: tensor 'output_0' is missing"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_fault_that_is_no_candidates_ends_with_1_and_burns_no_model(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, registry: Registry, fault: SplitfleetError
) -> None:
    def faulty(device_id: str, model: str) -> tuple[float, float]:  # noqa: ARG001
        if device_id == "x":
            raise fault
        return 0.9, 20.0

    fleet = make_fleet(faulty, make_state("x"), make_state("y"))
    result = run(fleet)
    error = result.error()
    assert error is not None
    assert error.exit_code == 1
    assert fault.message in error.message
    x, y = result.devices
    assert (x.state, y.state) == (OutcomeState.FAILED, OutcomeState.ACCEPTED)
    assert [trial.state for trial in x.trials] == [TrialState.BROKEN_OFF] * 2
    assert len({trial.model for trial in x.trials}) == 1
    assert fleet.loaded == set(registry.active_bundles())


def test_a_fault_that_passes_costs_a_repetition_only(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState
) -> None:
    calls: list[str] = []

    def once(device_id: str, model: str) -> tuple[float, float]:  # noqa: ARG001
        calls.append(model)
        if len(calls) == 1:
            raise OverloadedError("later")
        return 0.9, 20.0

    (device,) = run(make_fleet(once, make_state("x"))).devices
    assert [trial.state for trial in device.trials] == [TrialState.BROKEN_OFF, TrialState.ACCEPTED]
    assert device.trials[0].model == device.trials[1].model


def test_the_allocators_own_disk_ends_the_run(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, candidates: Candidates, registry: Registry
) -> None:
    candidates.broken = dict.fromkeys("abc", StorageError("/home/conversions: No space left on device"))
    with pytest.raises(StorageError) as caught:
        run(make_fleet(good, make_state("x")))
    assert caught.value.exit_code == 1
    (ended,) = registry.runs()
    assert (ended.state, ended.reason) == (RunState.FAILED, "/home/conversions: No space left on device")


@pytest.mark.parametrize("phase", ["accuracy", "latency"])
def test_a_tail_that_another_unloaded_is_published_once_more(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, phase: str
) -> None:
    calls: list[str] = []

    def unloaded(device_id: str, model: str) -> tuple[float, float]:  # noqa: ARG001
        calls.append(model)
        if len(calls) == {"accuracy": 1, "latency": 2}[phase]:
            fleet.loaded.clear()
            raise UnknownBundleError("no tail of that bundle is loaded")
        return 0.9, 20.0

    fleet = make_fleet(unloaded, make_state("x"))
    (device,) = run(fleet).devices
    assert [trial.state for trial in device.trials] == [TrialState.ACCEPTED]
    assert len(fleet.published) == 2
    assert len(set(fleet.published)) == 1


def test_a_tail_that_does_not_stay_is_a_fault(run: Allocate, make_fleet: MakeFleet, make_state: MakeState) -> None:
    def never(device_id: str, model: str) -> tuple[float, float]:
        raise UnknownBundleError(f"{device_id}: no tail of {model} is loaded")

    (device,) = run(make_fleet(never, make_state("x"))).devices
    assert device.state is OutcomeState.FAILED


def test_a_device_that_died_is_waited_for_and_has_its_second_chance(
    run: Allocate,
    make_fleet: MakeFleet,
    make_state: MakeState,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cloud_server.allocation.loop.LOOK_FOR_DEVICES_EVERY_S", 0.001)
    calls: list[str] = []

    def dies(device_id: str, model: str) -> tuple[float, float]:  # noqa: ARG001
        calls.append(model)
        if len(calls) == 1:
            raise DeviceUnreachableError("device x is not connected any more")
        return 0.9, 20.0

    fleet = make_fleet(dies)
    # Asked before the run, for the first round, and then until it is back.
    fleet.listing = lambda number: [make_state("x", online=number <= 2 or number >= 6)]
    (device,) = run(fleet, device_timeout_s=60.0).devices
    assert [trial.state for trial in device.trials] == [TrialState.UNREACHABLE, TrialState.ACCEPTED]
    assert "waiting up to 60 s for x to come back" in recorder.phases


def test_a_device_that_does_not_come_back_is_waited_for_as_long_as_it_may_be_silent(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud_server.allocation.loop.LOOK_FOR_DEVICES_EVERY_S", 0.001)

    def dies(device_id: str, model: str) -> tuple[float, float]:  # noqa: ARG001
        raise DeviceUnreachableError("device x is not connected any more")

    fleet = make_fleet(dies)
    fleet.listing = lambda number: [make_state("x", online=number <= 2)]
    result = run(fleet, device_timeout_s=0.05)
    assert isinstance(result.error(), DeviceUnreachableError)
    assert len(result.devices[0].trials) == 1


def test_a_run_whose_allocator_was_killed_is_out_of_the_way_once_its_lease_ran_out(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud_server.allocation.run.LOOK_FOR_RUNS_EVERY_S", 0.001)
    registry.start_run(AllocationSettings(task="t"), lease_s=0.2, now=datetime.now(UTC))
    result = run(make_fleet(good, make_state("x")))
    assert result.error() is None
    assert registry.run(1).state is RunState.INTERRUPTED


def test_a_run_that_is_alive_keeps_its_devices(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, registry: Registry, recorder: Recorder
) -> None:
    other = registry.start_run(AllocationSettings(task="t", devices=("x",)), lease_s=60, now=datetime.now(UTC))
    renewed = threading.Event()

    def renew(name: str) -> None:
        recorder.phases.append(name)
        registry.renew_run(other, lease_s=70, now=datetime.now(UTC))
        renewed.set()

    recorder.phase_started = renew  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="run 1 of task 't' is under way"):
        run(make_fleet(good, make_state("x")))
    assert renewed.is_set()
    assert recorder.phases == ["waiting to see whether the allocator of run 1 is alive"]
    assert len(registry.runs()) == 1


def test_infeasible_outweighs_unreachable(run: Allocate, make_fleet: MakeFleet, make_state: MakeState) -> None:
    def both(device_id: str, model: str) -> tuple[float, float]:  # noqa: ARG001
        if device_id == "hung":
            raise DeviceUnreachableError("gone")
        return 0.1, 20.0

    assert isinstance(run(make_fleet(both, make_state("hung"), make_state("x"))).error(), InfeasibleError)


def test_one_that_joins_late_is_taken_up(run: Allocate, make_fleet: MakeFleet, make_state: MakeState) -> None:
    fleet = make_fleet(good)
    fleet.listing = lambda number: [make_state("x")] if number <= 2 else [make_state("late"), make_state("x")]
    result = run(fleet)
    assert {device.device_id: device.trials[0].round for device in result.devices} == {"x": 1, "late": 2}


def test_only_the_devices_asked_for(run: Allocate, make_fleet: MakeFleet, make_state: MakeState) -> None:
    result = run(make_fleet(good, make_state("x"), make_state("y")), devices=("y", "absent"))
    assert {device.device_id: device.state for device in result.devices} == {
        "y": OutcomeState.ACCEPTED,
        "absent": OutcomeState.UNREACHABLE,
    }


def test_no_device_is_told_with_the_way_out(run: Allocate, make_fleet: MakeFleet, make_state: MakeState) -> None:
    told = r"no device is registered at tcp://nowhere:1 and online; start one with 'splitfleet-edge run --server"
    with pytest.raises(ConfigError, match=told):
        run(make_fleet(good, make_state("x", online=False)))
    with pytest.raises(ConfigError, match="none of the devices y is registered"):
        run(make_fleet(good, make_state("x")), devices=("y",))


def test_a_device_that_is_offline_is_left_out_with_a_warning(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, recorder: Recorder
) -> None:
    result = run(make_fleet(good, make_state("off", online=False), make_state("x")))
    assert [device.device_id for device in result.devices] == ["x"]
    assert recorder.warnings == ["registered, but not online, so left out until they are back: off"]


def test_the_rounds_run_out(run: Allocate, make_fleet: MakeFleet, make_state: MakeState) -> None:
    result = run(make_fleet(lambda *_: (0.1, 20.0), make_state("x")), max_rounds=2)
    assert result.run.rounds == 2
    assert result.devices[0].state is OutcomeState.UNDECIDED
    assert isinstance(result.error(), InfeasibleError)


def test_latency_of_emulated_devices_is_measured_one_device_at_a_time(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState
) -> None:
    fleet = make_fleet(good, *(make_state(f"d{number}", emulated=number == 0) for number in range(6)))
    run(fleet)
    assert sorted(fleet.latency_runs) == [f"d{number}" for number in range(6)]
    assert fleet.most_at_once == 1


def test_few_samples_are_used_repeatedly_for_latency(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState
) -> None:
    result = run(make_fleet(good, make_state("x")), latency_samples=250)
    evaluation = result.devices[0].trials[0].evaluation
    assert evaluation is not None
    assert evaluation.latency_samples == 250


def test_baselines_are_measured_beside_and_the_split_is_installed_again(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, registry: Registry
) -> None:
    fleet = make_fleet(good, make_state("x"), make_state("whole", budget=1000))
    result = run(fleet, baselines=True)
    whole, x = result.devices
    assert set(x.baselines) == {"cloud-only"}
    assert x.baselines["cloud-only"].edge_ms == 0.0
    assert x.baselines["cloud-only"].head_bytes == 0
    assert whole.trial is not None
    assert set(whole.baselines) == {"cloud-only", "edge-only"}
    assert whole.baselines["edge-only"] == whole.trial.evaluation
    active = {each.device_id: each.bundle for each in registry.active_allocations()}
    assert fleet.installed == active
    assert fleet.loaded == set(active.values())


def test_what_goes_wrong_beside_is_a_warning(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, candidates: Candidates, recorder: Recorder
) -> None:
    def no_cloud_only(model: str) -> Any:  # noqa: ARG001
        raise ConversionError("cannot be built")

    candidates.build_cloud_only = no_cloud_only
    result = run(make_fleet(good, make_state("x")), baselines=True)
    assert result.error() is None
    assert recorder.warnings == ["x: cloud-only: cannot be built"]


def test_fewer_models_than_devices_is_a_warning(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, recorder: Recorder
) -> None:
    run(make_fleet(good, *(make_state(f"d{number}") for number in range(4))))
    assert recorder.warnings == ["the task 't' has 3 models for 4 devices: some devices will get the same"]


def test_a_later_run_supersedes_and_one_that_fails_gives_back_what_was(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState, registry: Registry
) -> None:
    fleet = make_fleet(good, make_state("x"))
    run(fleet)
    (first,) = registry.active_bundles()
    fleet.listing = lambda _: [make_state("x", budget=350)]
    run(fleet)
    (second,) = registry.active_bundles()
    assert second != first
    assert fleet.loaded == {second}
    fleet.behaviour = lambda *_: (0.1, 20.0)
    assert isinstance(run(fleet).error(), InfeasibleError)
    assert registry.active_bundles() == [second]
    assert fleet.loaded == {second}
    assert fleet.installed == {"x": second}


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (PeerUnreachableError("the connection was lost"), RunState.FAILED, "the connection was lost"),
        (KeyboardInterrupt(), RunState.INTERRUPTED, "stopped by the user"),
        (ZeroDivisionError("a bug"), RunState.FAILED, "ZeroDivisionError: a bug"),
    ],
)
def test_what_ends_a_run_is_recorded_and_everything_is_let_go(
    run: Allocate,
    make_fleet: MakeFleet,
    make_state: MakeState,
    registry: Registry,
    error: BaseException,
    state: RunState,
    reason: str,
) -> None:
    def fail(device_id: str, model: str) -> tuple[float, float]:  # noqa: ARG001
        raise error

    fleet = make_fleet(fail, make_state("x"))
    with pytest.raises(type(error)):
        run(fleet)
    assert fleet.was_closed.is_set()
    assert fleet.published
    assert fleet.loaded == set()
    (ended,) = registry.runs()
    assert (ended.state, ended.reason) == (state, reason)
    assert [trial.state for trial in registry.trials(ended.run_id)] == [TrialState.INTERRUPTED]


def test_the_document_is_json_and_complete(run: Allocate, make_fleet: MakeFleet, make_state: MakeState) -> None:
    result = run(make_fleet(good, make_state("x", emulated=True)), baselines=True)
    document = json.loads(json.dumps(result.to_document(), allow_nan=False))
    assert document["state"] == "accepted"
    assert document["thresholds"] == {"min_accuracy": 0.8, "max_latency_ms": 50.0, "latency_statistic": "mean"}
    (device,) = document["devices"]
    assert device["emulation"] == {"cpu": "sleep"}
    assert device["allocation"]["cut"] == {"k": 2, "n": 4, "name": "layer_2"}
    assert device["allocation"]["evaluation"]["tag"] == "measured"
    low, high = device["allocation"]["test"]["interval_95"]
    assert low < 0.9 < high
    assert device["baselines"]["cloud-only"]["sent_bytes"] == 123.0
    assert device["trials_used"] == 1


def test_the_same_seed_gives_the_same_trials_whatever_the_order_of_the_devices(
    run: Allocate, make_fleet: MakeFleet, make_state: MakeState
) -> None:
    states = [make_state(f"d{number}") for number in range(5)]

    def trials(order: list[DeviceState]) -> dict[str, list[str]]:
        result = run(make_fleet(lambda *_: (0.1, 20.0), *order), seed=7)
        return {device.device_id: [trial.model for trial in device.trials] for device in result.devices}

    assert trials(states) == trials(states[::-1])


def test_a_run_that_was_taken_for_dead_stops_with_the_reason(
    run: Allocate,
    make_fleet: MakeFleet,
    make_state: MakeState,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cloud_server.allocation.lease.RENEW_EVERY_S", 0.01)
    fleet: Fleet = None

    def wait_for_the_end(device_id: str, model: str) -> tuple[float, float]:  # noqa: ARG001
        registry.interrupt_dead_runs(now=datetime.now(UTC) + timedelta(hours=1))
        fleet.was_closed.wait(60)
        raise TailFailedError("the channel is closed")

    fleet = make_fleet(wait_for_the_end, make_state("x"))
    with pytest.raises(SplitfleetError, match="taken for dead"):
        run(fleet)
    (ended,) = registry.runs()
    assert ended.state is RunState.INTERRUPTED
    assert [trial.state for trial in registry.trials(ended.run_id)] == [TrialState.INTERRUPTED]
