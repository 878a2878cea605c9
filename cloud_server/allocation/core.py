"""The allocation core: ask for the draws of a round, tell what came of each. No I/O, no clock, no threads.

::

    core = Allocator(models=…, thresholds=…, strategy=RandomDraw(seed=0))
    while draws := core.ask(online):
        for draw in draws:
            core.tell(draw, evaluation_or_failure)
    core.outcomes()

Why it ends: a draw is a model that its device has not had, so a device has at most as many trials as there are models,
apart from those that were broken off, and two of these in a row are the end of it;
:meth:`Allocator.ask` returns nothing exactly when no device that is online can and need draw, and what it does return
must be told before it is asked again. Only a fleet that grows for ever keeps it going for ever, unless ``max_rounds``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cloud_server.allocation.draw import History, Strategy
from cloud_server.allocation.settings import Redraw, Thresholds
from cloud_server.allocation.trial import Draw, Evaluation, Failure, Trial, TrialState, judge, shortfall

# A device that hung is given one more chance: it may have been restarted. Each costs the others a timeout.
MAX_UNREACHABLE = 2
# A draw that was broken off by a fault that is not the candidate's is repeated once.
MAX_BROKEN_OFF = 2


class OutcomeState(StrEnum):
    """How it ended for a device.

    ``INFEASIBLE``: it has had every model, and each was judged. ``FAILED``: its trials were broken off by what is no
    model's fault. ``UNREACHABLE``: it is gone, or was at a trial that it would have needed. ``UNDECIDED``: the rounds
    ran out before.
    """

    ACCEPTED = "accepted"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of it for one device: ``accepted`` is its accepted trial; without one, ``nearest_miss`` is the evaluated
    trial of the smallest total relative shortfall, ``None`` if no trial was evaluated.
    """

    device_id: str
    state: OutcomeState
    accepted: Trial | None
    nearest_miss: Trial | None
    trials: tuple[Trial, ...]


@dataclass(kw_only=True)
class _Device:
    device_id: str
    trials: list[Trial] = field(default_factory=list)
    drawn: set[str] = field(default_factory=set)
    open: Draw | None = None

    @property
    def accepted(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.state is TrialState.ACCEPTED), None)

    @property
    def latest(self) -> Evaluation | None:
        """What the device has now; nothing when its last trial was not evaluated."""
        return self.trials[-1].evaluation if self.trials else None

    @property
    def gave_up(self) -> bool:
        """Whether it had all the chances that faults of anything but a candidate are given."""
        last = [trial.state for trial in self.trials[-MAX_BROKEN_OFF:]]
        return self.times_unreachable >= MAX_UNREACHABLE or last == [TrialState.BROKEN_OFF] * MAX_BROKEN_OFF

    @property
    def broken_off(self) -> bool:
        return bool(self.trials) and self.trials[-1].state is TrialState.BROKEN_OFF

    @property
    def times_unreachable(self) -> int:
        return sum(trial.state is TrialState.UNREACHABLE for trial in self.trials)


class Allocator:
    """One allocation under way.

    ``redraw="failing"``: each round all devices without an accepted trial draw. ``"worst"``: of those that miss the
    accuracy threshold only the least accurate draws, of those that miss the latency threshold only the slowest (it may
    be the same device), and so does every device that has no evaluation to be compared by. A trial that meets all
    thresholds is accepted for good.
    """

    def __init__(
        self,
        *,
        models: Iterable[str],
        thresholds: Thresholds,
        strategy: Strategy,
        redraw: Redraw = "failing",
        max_rounds: int | None = None,
    ) -> None:
        self._models = sorted(set(models))
        self._thresholds = thresholds
        self._strategy = strategy
        self._redraw = redraw
        self._max_rounds = max_rounds
        self._devices: dict[str, _Device] = {}
        self._online: frozenset[str] = frozenset()
        self._round = 0

    @property
    def round(self) -> int:
        """The number of the round that was asked for last, from 1."""
        return self._round

    def expect(self, device_ids: Iterable[str]) -> None:
        """Devices that must get an allocation whether or not they are ever online."""
        for device_id in device_ids:
            self._devices.setdefault(device_id, _Device(device_id=device_id))

    def ask(self, online: Iterable[str]) -> tuple[Draw, ...]:
        """Begin the next round with the devices that are online now: its draws, by device id.

        Devices not seen before are taken up. Empty: the allocation is over, unless another device comes online.
        Raises ``RuntimeError`` while a draw of the round before has not been told.
        """
        waiting = [device.device_id for device in self._devices.values() if device.open]
        if waiting:
            raise RuntimeError(f"the draws of these devices were not told: {', '.join(sorted(waiting))}")
        self._online = frozenset(online)
        self.expect(self._online)
        if self._rounds_ran_out():
            return ()
        devices = self._who_draws([self._devices[device_id] for device_id in sorted(self._online)])
        if not devices:
            return ()
        self._round += 1
        return tuple(self._draw(device) for device in devices)

    def tell(self, draw: Draw, result: Evaluation | Failure) -> Trial:
        """What came of a draw; returns the finished trial."""
        device = self._devices[draw.device_id]
        if device.open != draw:
            raise RuntimeError(f"{draw} is not the open draw of its device")
        trial = judge(draw, result, self._thresholds)
        device.trials.append(trial)
        device.open = None
        if trial.state is TrialState.BROKEN_OFF:
            device.drawn.discard(draw.model)
        return trial

    def ask_again(self, device_id: str) -> Draw | None:
        """Another draw for a device within the round, when the last turned out to be no candidate for it before
        anything was deployed; ``None`` when the device has had every model.
        """
        device = self._devices[device_id]
        if device.open:
            raise RuntimeError(f"the draw of {device_id} was not told")
        return self._draw(device) if self._left(device) else None

    def absent(self) -> tuple[str, ...]:
        """Devices that took part, are not online and would draw if they were: worth waiting for."""
        if self._rounds_ran_out():
            return ()
        return tuple(
            device.device_id
            for device in self._devices.values()
            if device.trials and device.device_id not in self._online and self._can_draw(device)
        )

    def outcomes(self) -> dict[str, Outcome]:
        """How it stands for each device, by device id."""
        return {device_id: self._outcome(self._devices[device_id]) for device_id in sorted(self._devices)}

    def _rounds_ran_out(self) -> bool:
        return self._max_rounds is not None and self._round >= self._max_rounds

    def _can_draw(self, device: _Device) -> bool:
        return device.accepted is None and not device.gave_up and bool(self._left(device))

    def _left(self, device: _Device) -> list[str]:
        return [model for model in self._models if model not in device.drawn]

    def _draw(self, device: _Device) -> Draw:
        counted = tuple(trial for trial in device.trials if trial.state is not TrialState.BROKEN_OFF)
        history = History(device_id=device.device_id, trials=counted, models=self._left(device))
        model = self._strategy.choose(history)
        if model not in history.models:
            raise RuntimeError(f"the strategy chose {model!r}, which is not one of {', '.join(history.models)}")
        device.drawn.add(model)
        device.open = Draw(round=self._round, device_id=device.device_id, trial=len(device.trials) + 1, model=model)
        return device.open

    def _who_draws(self, online: Sequence[_Device]) -> list[_Device]:
        able = [device for device in online if self._can_draw(device)]
        if self._redraw == "failing":
            return able
        chosen = {device.device_id for device in able if device.latest is None}
        statistic = self._thresholds.latency_statistic
        inaccurate = [
            (device.latest.accuracy, device.device_id)
            for device in able
            if device.latest and "accuracy" in device.trials[-1].missed
        ]
        slow = [
            (-device.latest.latency_ms(statistic), device.device_id)
            for device in able
            if device.latest and "latency" in device.trials[-1].missed
        ]
        # Ties go by device id, so that the order of registration decides nothing.
        chosen |= {min(group)[1] for group in (inaccurate, slow) if group}
        return [device for device in able if device.device_id in chosen]

    def _outcome(self, device: _Device) -> Outcome:
        accepted = device.accepted
        if accepted:
            state = OutcomeState.ACCEPTED
        elif not self._left(device) and not device.open:
            # Models lost to a vanished device were not shown to fall short: that is no proof of infeasibility.
            state = OutcomeState.UNREACHABLE if device.times_unreachable else OutcomeState.INFEASIBLE
        elif device.broken_off and (device.gave_up or device.device_id in self._online):
            state = OutcomeState.FAILED
        elif device.device_id not in self._online or device.times_unreachable >= MAX_UNREACHABLE:
            state = OutcomeState.UNREACHABLE
        else:
            state = OutcomeState.UNDECIDED
        return Outcome(
            device_id=device.device_id,
            state=state,
            accepted=accepted,
            nearest_miss=None if accepted else self._nearest_miss(device.trials),
            trials=tuple(device.trials),
        )

    def _nearest_miss(self, trials: Sequence[Trial]) -> Trial | None:
        misses = [
            (shortfall(trial.evaluation, self._thresholds), trial.draw.trial, trial)
            for trial in trials
            if trial.evaluation is not None
        ]
        return min(misses, key=lambda miss: miss[:2])[2] if misses else None
