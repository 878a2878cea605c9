"""How an allocation goes on, on stderr: a line for each event, and in a terminal what each device does right now."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cloud_server.allocation.observer import Observer
from cloud_server.allocation.settings import AllocationSettings, LatencyStatistic
from cloud_server.allocation.trial import Draw, Trial
from edge_sdk.protocol import DeviceState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class AllocationProgress(Observer):
    """A context manager. ``console`` is where it shows; lines only, where that is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._draws: dict[str, Draw] = {}
        self._statistic: LatencyStatistic = "mean"
        self._waiting = False

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def waiting(self) -> None:
        if not self._waiting:
            self._line("waiting for a device to register")
        self._waiting = True

    def run_started(
        self, run_id: int, settings: AllocationSettings, devices: Sequence[DeviceState], models: Sequence[str]
    ) -> None:
        self._statistic = settings.thresholds.latency_statistic
        wanted = []
        if settings.thresholds.min_accuracy is not None:
            wanted.append(f"accuracy of {settings.thresholds.min_accuracy:g} or more")
        if settings.thresholds.max_latency_ms is not None:
            wanted.append(f"{self._statistic} latency of {settings.thresholds.max_latency_ms:g} ms or less")
        self._line(
            f"run {run_id}: {settings.task}, devices: {len(devices)}, models: {len(models)}, seed: {settings.seed}; "
            f"wanted: {' and '.join(wanted) or 'any result'}"
        )

    def round_started(self, number: int, draws: Sequence[Draw]) -> None:
        self._line(f"round {number}: {', '.join(draw.device_id for draw in draws)}")

    def trial_started(self, draw: Draw) -> None:
        self._draws[draw.device_id] = draw
        self._line(f"  {draw.device_id}: trial {draw.trial}: {draw.model}")

    def progress(self, device_id: str, doing: str) -> None:
        if self._bars is None:
            return
        draw = self._draws.get(device_id)
        text = f"{device_id}: {draw.model}: {doing}" if draw else f"{device_id}: {doing}"
        with self._lock:
            task = self._tasks.get(device_id)
            if task is None:
                self._tasks[device_id] = self._bars.add_task(text, total=None)
            else:
                self._bars.update(task, description=text)

    def trial_ended(self, trial: Trial) -> None:
        draw = trial.draw
        verdict = trial.state.replace("_", " ")
        if trial.evaluation is not None:
            latency_ms = trial.evaluation.latency_ms(self._statistic)
            verdict += f": accuracy {trial.evaluation.accuracy:.3f}, {self._statistic} latency {latency_ms:.1f} ms"
        if trial.reason:
            verdict += f" ({trial.reason})"
        self._line(f"  {draw.device_id}: trial {draw.trial}: {draw.model}: {verdict}")
        self._rest(draw.device_id)

    def phase_started(self, name: str) -> None:
        self._draws.clear()
        for device_id in list(self._tasks):
            self._rest(device_id)
        self._line(name)

    def warned(self, message: str) -> None:
        self._line(f"warning: {message}")

    def _rest(self, device_id: str) -> None:
        with self._lock:
            task = self._tasks.pop(device_id, None)
            if task is not None and self._bars is not None:
                self._bars.remove_task(task)

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
