"""A whole run: from the settings to the result, with everything that it opens closed again, however it ends."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import datetime

from cloud_server.allocation.candidates import WorkshopCandidates
from cloud_server.allocation.conclusion import Conclusion
from cloud_server.allocation.core import Allocator, Outcome, OutcomeState
from cloud_server.allocation.draw import RandomDraw
from cloud_server.allocation.fleet import Fleet
from cloud_server.allocation.lease import LEASE_S, Lease
from cloud_server.allocation.loop import MAX_SIDE_BY_SIDE, Loop, asked_devices, online_of, utc_now
from cloud_server.allocation.means import Means
from cloud_server.allocation.memory_model import MODELS, advice
from cloud_server.allocation.observer import Observer
from cloud_server.allocation.predictions import Predictions
from cloud_server.allocation.publisher import Publisher
from cloud_server.allocation.remote_fleet import RemoteFleet
from cloud_server.allocation.result import AllocationResult, read_result
from cloud_server.allocation.settings import AllocationSettings
from cloud_server.allocation.task_data import task_data
from cloud_server.allocation.trial import TrialState
from cloud_server.home import Home
from cloud_server.library import Library
from cloud_server.registry import Registry
from cloud_server.registry.errors import RunUnderWayError
from cloud_server.registry.records import OutcomeRecord, RunState
from converters import Workshop
from edge_sdk.errors import ConfigError, RegistryUnreachableError, SplitfleetError
from edge_sdk.keys import CurveKeys
from edge_sdk.protocol import DeviceState

LOOK_FOR_DEVICES_EVERY_S = 1.0
LOOK_FOR_RUNS_EVERY_S = 0.5


def run_over_wire(
    settings: AllocationSettings,
    *,
    endpoint: str,
    registry_url: str,
    home: Home,
    observer: Observer,
    wait_for_devices: bool,
    keys: CurveKeys | None,
) -> AllocationResult:
    """See :func:`cloud_server.allocation.run_allocation`."""
    with Registry(registry_url) as registry:
        # Before anything else is opened: a task that is none is told at once.
        data = task_data(settings.task, Library(registry, home))
        with (
            RemoteFleet(endpoint, stall_timeout_s=settings.device_timeout_s, keys=keys) as fleet,
            Workshop(home.conversions) as workshop,
            closing(Predictions(home.conversions / "predictions")) as predictions,
        ):
            candidates = WorkshopCandidates(workshop, predictions, data.recipes, MODELS[settings.memory_model])

            def abort() -> None:
                fleet.close()
                workshop.close(wait=False)
                predictions.close()

            devices = find_devices(fleet, settings, observer, wait=wait_for_devices, endpoint=endpoint)
            means = Means(
                settings=settings,
                fleet=fleet,
                candidates=candidates,
                registry=registry,
                data=data,
                observer=observer,
                abort=abort,
            )
            return allocate(means, devices)


def find_devices(
    fleet: Fleet, settings: AllocationSettings, observer: Observer, *, wait: bool, endpoint: str
) -> Mapping[str, DeviceState]:
    """The devices to begin with. Raises :class:`ConfigError` when there is none and nobody wants to ``wait``."""
    pause = threading.Event()
    while not (online := online_of(states := asked_devices(fleet, settings))):
        if not wait:
            asked = f"none of the devices {', '.join(settings.devices)}" if settings.devices else "no device"
            raise ConfigError(
                f"{asked} is registered at {endpoint} and online; start one with "
                f"'splitfleet-edge run --server {endpoint}'"
            )
        observer.waiting()
        pause.wait(LOOK_FOR_DEVICES_EVERY_S)
    offline = [state.registration.device_id for state in states if not state.online]
    if offline:
        observer.warned(f"registered, but not online, so left out until they are back: {', '.join(offline)}")
    return online


def allocate(means: Means, devices: Mapping[str, DeviceState]) -> AllocationResult:
    """Record a run and carry it out. When an exception ends the run, the registry tells so."""
    registry, settings = means.registry, means.settings
    run_id = _start(means)
    try:
        registry.interrupt_dead_runs(now=utc_now())
        means.observer.run_started(run_id, settings, tuple(devices.values()), means.candidates.models)
        if len(means.candidates.models) < len(devices):
            means.observer.warned(
                f"the task {settings.task!r} has {len(means.candidates.models)} models for {len(devices)} devices: "
                "some devices will get the same"
            )
        outcomes = _carry_out(run_id, means)
        state, reason = _verdict(outcomes)
        registry.end_run(run_id, state, reason=reason, now=utc_now())
    except BaseException as error:
        state, reason = RunState.FAILED, f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            state, reason = RunState.INTERRUPTED, "stopped by the user"
        elif isinstance(error, SplitfleetError):
            reason = error.message
        with suppress(RegistryUnreachableError):
            registry.end_run(run_id, state, reason=reason, now=utc_now())
        raise
    return read_result(registry, run_id)


def _start(means: Means) -> int:
    """Begin the run. Where another one has its devices it waits to see whether that one's allocator lives.

    One that was killed is in the way until its lease runs out; one that renews it raises :class:`RunUnderWayError`.
    """
    seen: dict[int, datetime] = {}
    announced = 0
    pause = threading.Event()
    while True:
        try:
            return means.registry.start_run(means.settings, lease_s=LEASE_S, now=utc_now())
        except RunUnderWayError as error:
            if seen.setdefault(error.run_id, error.lease_until) != error.lease_until:
                raise
            if announced != error.run_id:
                announced = error.run_id
                means.observer.phase_started(f"waiting to see whether the allocator of run {error.run_id} is alive")
        pause.wait(LOOK_FOR_RUNS_EVERY_S)


def _carry_out(run_id: int, means: Means) -> Mapping[str, Outcome]:
    """The rounds and what follows them."""
    settings = means.settings
    core = Allocator(
        models=means.candidates.models,
        thresholds=settings.thresholds,
        strategy=RandomDraw(seed=settings.seed),
        redraw=settings.redraw,
        max_rounds=settings.max_rounds,
    )
    core.expect(settings.devices)
    before = means.registry.active_bundles()
    publisher = Publisher(means.fleet)
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        means.abort()

    with (
        Lease(means.registry, run_id, on_loss=stop) as lease,
        ThreadPoolExecutor(MAX_SIDE_BY_SIDE, "allocation") as pool,
    ):
        try:
            loop = Loop(run_id, core, means, publisher, stopped)
            loop.run(pool)
            outcomes = core.outcomes()
            conclusion = Conclusion(loop, means)
            conclusion.measure_test(pool)
            if settings.baselines:
                conclusion.measure_baselines(pool)
            conclusion.restore(
                device_id
                for device_id, outcome in outcomes.items()
                if outcome.state in (OutcomeState.INFEASIBLE, OutcomeState.FAILED, OutcomeState.UNDECIDED)
            )
            conclusion.unload(before=before)
        except BaseException as error:
            stopped.set()
            try:
                _tidy_up(publisher, means)
            finally:
                # Else the pool would wait for devices and conversions that nobody needs any more.
                stop()
            if lease.lost:
                raise SplitfleetError(
                    f"run {run_id} was not heard of for {LEASE_S:g} s and taken for dead; start it again"
                ) from error
            raise
    means.registry.record_outcomes(run_id, (_record(loop, outcome) for outcome in outcomes.values()))
    return outcomes


def _tidy_up(publisher: Publisher, means: Means) -> None:
    """Unload the tails that a run leaves behind which was broken off; where that is not possible they stay."""
    publisher.close()
    with suppress(SplitfleetError):
        publisher.unload_all_but(means.registry.active_bundles())


def _record(loop: Loop, outcome: Outcome) -> OutcomeRecord:
    trial = outcome.accepted or outcome.nearest_miss
    return OutcomeRecord(
        device_id=outcome.device_id,
        state=outcome.state,
        trial_id=None if trial is None else loop.trial_id(trial.draw),
    )


def _named(outcome: Outcome) -> str:
    if outcome.state is OutcomeState.FAILED:
        return f"{outcome.device_id} ({outcome.trials[-1].reason})"
    trials = outcome.trials
    if outcome.state is OutcomeState.INFEASIBLE and all(each.state is TrialState.DOES_NOT_FIT for each in trials):
        least = min(trials, key=lambda each: math.inf if each.needed_bytes is None else each.needed_bytes)
        what = f"no model fits; of {least.draw.model!r}, {least.reason}; {advice(least.needed_bytes)}"
        return f"{outcome.device_id} ({what})"
    return outcome.device_id


_WHY = {
    OutcomeState.INFEASIBLE: "every model was tried",
    OutcomeState.UNREACHABLE: "out of reach",
    OutcomeState.UNDECIDED: "no round was left",
    OutcomeState.FAILED: "its trials broke off",
}


def _verdict(outcomes: Mapping[str, Outcome]) -> tuple[RunState, str]:
    without = {
        state: [_named(outcome) for outcome in outcomes.values() if outcome.state is state]
        for state in OutcomeState
        if state is not OutcomeState.ACCEPTED
    }
    reason = "; ".join(
        f"{state}: {', '.join(devices)} ({_WHY[state]})" for state, devices in without.items() if devices
    )
    if without[OutcomeState.INFEASIBLE] or without[OutcomeState.UNDECIDED]:
        return RunState.INFEASIBLE, reason
    if without[OutcomeState.FAILED]:
        return RunState.FAILED, reason
    return (RunState.UNREACHABLE, reason) if reason else (RunState.ACCEPTED, "")
