"""The loop that carries out what the allocation core asks for: build, deploy, evaluate, record, round by round.

It decides nothing: draws and verdicts are :mod:`cloud_server.allocation.core`'s. A round has two phases. In the first
all its devices get their bundles and run the validation set, side by side, while other bundles are still being built.
In the second the latency is measured, when nothing else runs: one device at a time where any device is emulated, since
emulated devices share the cores of a machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from cloud_server.allocation.core import Allocator
from cloud_server.allocation.device_reports import MAX_BYTES
from cloud_server.allocation.evaluator import Accuracy, Labelled, evaluation, measure_accuracy, measure_latency, publish
from cloud_server.allocation.fleet import Fleet
from cloud_server.allocation.means import Means
from cloud_server.allocation.memory_model import NoCut, runtime_of
from cloud_server.allocation.publisher import Publisher
from cloud_server.allocation.settings import AllocationSettings
from cloud_server.allocation.trial import Draw, Evaluation, Failure, Placement, Trial, TrialState
from edge_sdk.bundle import Bundle
from edge_sdk.errors import (
    BundleError,
    DeviceUnreachableError,
    DoesNotFitError,
    FeatureMismatchError,
    IntegrityError,
    ModelError,
    PeerUnreachableError,
    RegistryUnreachableError,
    RuntimeUnavailableError,
    SplitfleetError,
    StorageError,
    TailFailedError,
)
from edge_sdk.protocol import DeviceState, InstallReport

MAX_SIDE_BY_SIDE = 32

LOOK_FOR_DEVICES_EVERY_S = 1.0

# The first that an error is an instance of. What is not named here says nothing of the candidate: a full disk, a cut
# link, a server in need, a device that talks nonsense.
_STATES: tuple[tuple[type[SplitfleetError], TrialState], ...] = (
    (DeviceUnreachableError, TrialState.UNREACHABLE),
    (DoesNotFitError, TrialState.DOES_NOT_FIT),
    (IntegrityError, TrialState.BROKEN_OFF),
    (BundleError, TrialState.FAILED),
    (ModelError, TrialState.FAILED),
    (RuntimeUnavailableError, TrialState.FAILED),
    (FeatureMismatchError, TrialState.FAILED),
    (TailFailedError, TrialState.FAILED),
    (SplitfleetError, TrialState.BROKEN_OFF),
)

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, eq=False)
class Deployed:
    """A bundle that is installed on a device and has run the validation set there; its latency is still to come."""

    device_id: str
    trial_id: int
    bundle: Bundle
    install: InstallReport
    accuracy: Accuracy


class Loop:
    """The rounds of one run. ``accepted``: what each device with an accepted trial has, by device id.

    Once ``stopped`` is set, an error is the run's and no trial's: everything under way is being made to fail.
    """

    def __init__(
        self, run_id: int, core: Allocator, means: Means, publisher: Publisher, stopped: threading.Event
    ) -> None:
        self._run_id = run_id
        self._core = core
        self._means = means
        self._fleet = means.fleet
        self._registry = means.registry
        self._observer = means.observer
        self._validation = publish(means.fleet, means.data.validation)
        self._lock = threading.Lock()
        self._stopped = stopped
        self._states: Mapping[str, DeviceState] = {}
        self._trial_ids: dict[Draw, int] = {}
        self.publisher = publisher
        self.accepted: dict[str, Deployed] = {}

    def run(self, pool: ThreadPoolExecutor) -> None:
        """All rounds, until the core asks for nothing more, and no device that is absent comes back."""
        while draws := self._next_draws():
            number = self._core.round
            self._registry.start_round(self._run_id, number, now=utc_now())
            self._observer.round_started(number, draws)
            deployed = [pair for pair in pool.map(self._deploy, draws) if pair is not None]
            self.with_quiet_cores(pool, lambda pair: self._finish(*pair), deployed)
            self._registry.end_round(self._run_id, number, now=utc_now())

    def _next_draws(self) -> Sequence[Draw]:
        """The draws of the next round; waits for absent devices where there are none without them."""
        draws = self._core.ask(self._online())
        if draws or not (absent := self._core.absent()):
            return draws
        timeout_s = self._means.settings.device_timeout_s
        self._observer.phase_started(f"waiting up to {timeout_s:g} s for {', '.join(absent)} to come back")
        deadline = time.monotonic() + timeout_s
        while not draws and (left_s := deadline - time.monotonic()) > 0:
            self._stopped.wait(min(left_s, LOOK_FOR_DEVICES_EVERY_S))
            draws = self._core.ask(self._online())
        return draws

    def trial_id(self, draw: Draw) -> int:
        """The id of a draw's trial in the registry."""
        return self._trial_ids[draw]

    def with_quiet_cores(self, pool: ThreadPoolExecutor, measure: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Call ``measure`` for each item: one at a time where a device is emulated, else side by side."""
        emulated = any(state.registration.emulation for state in self._states.values())
        return list(map(measure, items) if emulated else pool.map(measure, items))

    def deploy(
        self, device_id: str, trial_id: int, bundle: Bundle, *, memory_limit_bytes: int | None = None
    ) -> Deployed:
        """Install a bundle on a device, which refuses a head above the limit, and run the validation set.

        Raises :class:`SplitfleetError`.
        """

        def install_and_run() -> tuple[InstallReport, Accuracy]:
            self._observer.progress(device_id, "installing")
            report = self._fleet.install(device_id, bundle.digest, memory_limit_bytes=memory_limit_bytes)
            metric, told = self._means.data.metric, self._told(device_id, "accuracy")
            return report, measure_accuracy(self._fleet, device_id, bundle, self._validation, metric, told)

        self._observer.progress(device_id, "publishing the bundle")
        install, accuracy = self.publisher.using(bundle, install_and_run)
        self._observer.progress(device_id, "waiting for the latency phase")
        return Deployed(device_id=device_id, trial_id=trial_id, bundle=bundle, install=install, accuracy=accuracy)

    def measure(self, deployed: Deployed) -> Evaluation:
        """Complete the evaluation of a deployed bundle. Raises :class:`SplitfleetError`."""
        self._observer.progress(deployed.device_id, f"latency of {self._means.settings.latency_samples} requests")
        samples = self._means.settings.latency_samples
        latency = self.publisher.using(
            deployed.bundle,
            partial(measure_latency, self._fleet, deployed.device_id, deployed.bundle, self._validation, samples),
        )
        return evaluation(deployed.install, deployed.accuracy, latency)

    def measure_test(self, deployed: Deployed, test: Labelled) -> Accuracy:
        """The accuracy of a deployed bundle on another labelled set. Raises :class:`SplitfleetError`."""
        device_id = deployed.device_id
        told = self._told(device_id, "test set")
        return self.publisher.using(
            deployed.bundle,
            partial(measure_accuracy, self._fleet, device_id, deployed.bundle, test, self._means.data.metric, told),
        )

    def _told(self, device_id: str, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self._observer.progress(device_id, f"{what}: {done} of {total} samples")

    def _online(self) -> Sequence[str]:
        self._states = online_of(asked_devices(self._fleet, self._means.settings))
        for state in self._states.values():
            self._registry.record_device(state.registration, now=utc_now())
        return tuple(self._states)

    def _deploy(self, draw: Draw) -> tuple[Draw, Deployed] | None:
        """Deploy a draw, or what its device draws in its place while it is none that fits."""
        candidate: Draw | None = draw
        while candidate is not None:
            trial_id = self._begin(candidate)
            # The allocator's own disk: the next candidate would fare no better.
            built = self._attempt(partial(self._build, candidate, trial_id), ends_run=StorageError)
            if isinstance(built, NoCut):
                built = Failure(state=TrialState.DOES_NOT_FIT, reason=built.reason, needed_bytes=built.needed_bytes)
            if isinstance(built, Failure) and built.state is TrialState.DOES_NOT_FIT:
                self._end(candidate, built)
                with self._lock:
                    candidate = self._core.ask_again(candidate.device_id)
                continue
            if isinstance(built, Bundle):
                limit = self._budget_bytes(candidate) if self._means.settings.memory_model == "peak" else None
                deployed = self._attempt(
                    partial(self.deploy, candidate.device_id, trial_id, built, memory_limit_bytes=limit)
                )
                if isinstance(deployed, Deployed):
                    return candidate, deployed
                self._end(candidate, deployed)
            else:
                self._end(candidate, built)
            return None
        return None

    def _begin(self, draw: Draw) -> int:
        self._observer.trial_started(draw)
        trial_id = self._registry.start_trial(
            self._run_id, draw, memory_budget_bytes=self._budget_bytes(draw), now=utc_now()
        )
        self._trial_ids[draw] = trial_id
        return trial_id

    def _budget_bytes(self, draw: Draw) -> int:
        return self._states[draw.device_id].registration.model_ram_bytes

    def _build(self, draw: Draw, trial_id: int) -> Bundle | NoCut:
        self._observer.progress(draw.device_id, f"choosing the cut of {draw.model}")
        runtime = runtime_of(self._states[draw.device_id].registration.resources)
        chosen = self._means.candidates.choose(draw.model, self._budget_bytes(draw), runtime)
        if isinstance(chosen, NoCut):
            return chosen
        first = chosen.first
        self._observer.progress(draw.device_id, f"converting {draw.model}, cut {first.k} of {first.n}")
        bundle = self._means.candidates.build(draw.model, chosen)
        manifest = bundle.manifest
        cut = chosen.at(manifest.precision)
        self._registry.place_trial(
            trial_id,
            Placement(
                k=cut.k,
                n=cut.n,
                cut=cut.cut,
                predicted_bytes=cut.predicted_bytes,
                whole_bytes=cut.whole_bytes,
                bundle=bundle.digest,
                precision=manifest.precision,
                precision_reason=manifest.precision_reason,
            ),
        )
        return bundle

    def _finish(self, draw: Draw, deployed: Deployed) -> None:
        if self._end(draw, self._attempt(partial(self.measure, deployed))).state is TrialState.ACCEPTED:
            self.accepted[draw.device_id] = deployed

    def _end(self, draw: Draw, result: Evaluation | Failure) -> Trial:
        with self._lock:
            trial = self._core.tell(draw, result)
        trial_id = self._trial_ids[draw]
        self._registry.end_trial(trial_id, trial, now=utc_now())
        if trial.state is TrialState.ACCEPTED:
            self._registry.activate(trial_id, now=utc_now())
        self._observer.trial_ended(trial)
        return trial

    def _attempt(
        self, action: Callable[[], T], *, ends_run: type[SplitfleetError] = PeerUnreachableError
    ) -> T | Failure:
        """What ``action`` returns; an error of one candidate or device fails its trial and does not end the run."""
        try:
            return action()
        except (PeerUnreachableError, RegistryUnreachableError):
            raise
        except SplitfleetError as error:
            if self._stopped.is_set() or isinstance(error, ends_run):
                raise
            state = next(state for kind, state in _STATES if isinstance(error, kind))
            needed = error.details.get("peak_bytes")
            # A device may say anything.
            sane = isinstance(needed, int) and 0 <= needed <= MAX_BYTES
            return Failure(state=state, reason=error.message, needed_bytes=needed if sane else None)


def asked_devices(fleet: Fleet, settings: AllocationSettings) -> list[DeviceState]:
    """The devices that the server knows and the settings ask for, online or not."""
    return [
        state for state in fleet.devices() if not settings.devices or state.registration.device_id in settings.devices
    ]


def online_of(states: Iterable[DeviceState]) -> dict[str, DeviceState]:
    """Those that are online, by id."""
    return {state.registration.device_id: state for state in states if state.online}


def utc_now() -> datetime:
    """The time that goes into the registry."""
    return datetime.now(UTC)
