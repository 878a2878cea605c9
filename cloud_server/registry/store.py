"""The registry's one class: every read and write of the database, each a small transaction.

The contract of all methods:

- A method that returns has committed. A server and several allocators may use one database at once, from any thread.
- ``now`` is an aware ``datetime``; the registry has no clock of its own.
- :class:`RegistryUnreachableError` when the database does not answer. A method that raises has changed nothing.
- A trial moves on from ``running`` once; a run too. Rows are never deleted: history is what a registry is for.

What users brought, tasks and models, is in :mod:`cloud_server.registry.library`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.orm import Session, selectinload

from cloud_server.allocation.settings import AllocationSettings
from cloud_server.allocation.trial import Draw, Evaluation, Placement, Trial, TrialState
from cloud_server.registry import rows
from cloud_server.registry.errors import RunUnderWayError
from cloud_server.registry.library import LibraryTables
from cloud_server.registry.records import (
    AllocationRecord,
    DeviceRecord,
    OutcomeRecord,
    RunRecord,
    RunState,
    TrialRecord,
    Variant,
)
from cloud_server.registry.schema import (
    AllocationRow,
    DeviceRow,
    EvaluationRow,
    OutcomeRow,
    RoundRow,
    RunRow,
    TrialRow,
)
from edge_sdk.errors import ConfigError, SplitfleetError
from edge_sdk.protocol import Register


class Registry(LibraryTables):
    """The registry at a database URL; see :class:`~cloud_server.registry.database.Database` for opening it."""

    # Devices

    def record_device(self, register: Register, *, now: datetime) -> None:
        """A device registered: store what it says of itself; it was first seen now if it is new."""
        with self._write() as session:
            row = session.get(DeviceRow, register.device_id)
            if row is None:
                row = DeviceRow(id=register.device_id, first_seen=now)
                session.add(row)
            row.profile = register.profile
            row.model_ram_bytes = register.model_ram_bytes
            row.resources = register.resources.to_body()
            row.emulation = register.emulation.to_body()
            row.version = register.version
            row.last_seen = now

    def mark_seen(self, device_id: str, now: datetime) -> None:
        """A device was heard of; one that never registered is ignored."""
        with self._write() as session:
            session.execute(sa.update(DeviceRow).where(DeviceRow.id == device_id).values(last_seen=now))

    def devices(self) -> list[DeviceRecord]:
        """All devices that ever registered, by id."""
        with self._read() as session:
            bundles = {row.device_id: row.bundle for row in session.scalars(_ACTIVE)}
            found = session.scalars(sa.select(DeviceRow).order_by(DeviceRow.id))
            return [rows.device(row, bundles.get(row.id)) for row in found]

    # Runs and rounds

    def start_run(self, settings: AllocationSettings, *, lease_s: float, now: datetime) -> int:
        """A run begins; returns its id. It counts as alive for ``lease_s`` and must be renewed before.

        Raises :class:`RunUnderWayError` while another run that is alive has any of the same devices: they would load
        and unload each other's bundles.
        """
        with self._write() as session:
            alive = sa.select(RunRow).where(RunRow.state == RunState.RUNNING, RunRow.lease_until >= now)
            for other in session.scalars(alive.order_by(RunRow.id)):
                # To name none is to name all.
                shared = sorted(set(settings.devices) & set(other.devices))
                if shared or not settings.devices or not other.devices:
                    raise RunUnderWayError(rows.run(other), shared, lease_until=other.lease_until)
            row = RunRow(
                **rows.settings_columns(settings),
                state=RunState.RUNNING,
                reason="",
                started_at=now,
                lease_until=now + timedelta(seconds=lease_s),
            )
            session.add(row)
            session.flush()
            return row.id

    def renew_run(self, run_id: int, *, lease_s: float, now: datetime) -> bool:
        """The run's allocator lives. False when the run is no longer running: someone took it for dead."""
        with self._write() as session:
            row = session.get_one(RunRow, run_id)
            if row.state != RunState.RUNNING:
                return False
            row.lease_until = now + timedelta(seconds=lease_s)
            return True

    def end_run(self, run_id: int, state: RunState, *, reason: str, now: datetime) -> None:
        """A run ended, and with it the trials that were under way: they are ``interrupted``."""
        with self._write() as session:
            _end_runs(session, [run_id], state, reason, now)

    def interrupt_dead_runs(self, *, now: datetime) -> list[int]:
        """Mark runs whose lease ran out as ``interrupted``, with their trials under way; returns their ids."""
        with self._write() as session:
            dead = list(
                session.scalars(sa.select(RunRow.id).where(RunRow.state == RunState.RUNNING, RunRow.lease_until < now))
            )
            _end_runs(session, dead, RunState.INTERRUPTED, "its allocator stopped without a word", now)
            return dead

    def runs(self) -> list[RunRecord]:
        """All runs, the newest first."""
        with self._read() as session:
            found = session.scalars(sa.select(RunRow).order_by(RunRow.id.desc()).options(selectinload(RunRow.rounds)))
            return [rows.run(row) for row in found]

    def run(self, run_id: int) -> RunRecord:
        """One run; :class:`ConfigError` when there is none of that id."""
        with self._read() as session:
            row = session.get(RunRow, run_id)
            if row is None:
                raise ConfigError(
                    f"the registry {self.url} has no run {run_id}; 'splitfleet allocations list' lists them"
                )
            return rows.run(row)

    def start_round(self, run_id: int, number: int, *, now: datetime) -> None:
        """Round ``number`` of a run begins."""
        with self._write() as session:
            session.add(RoundRow(run_id=run_id, number=number, started_at=now))

    def end_round(self, run_id: int, number: int, *, now: datetime) -> None:
        """All trials of a round are told."""
        with self._write() as session:
            _round(session, run_id, number).ended_at = now

    # Trials

    def start_trial(self, run_id: int, draw: Draw, *, memory_budget_bytes: int, now: datetime) -> int:
        """A draw is tried; returns the trial's id. Its device must be recorded and its round begun."""
        with self._write() as session:
            row = TrialRow(
                run_id=run_id,
                round_id=_round(session, run_id, draw.round).id,
                device_id=draw.device_id,
                number=draw.trial,
                model=draw.model,
                memory_budget_bytes=memory_budget_bytes,
                state=TrialState.RUNNING,
                missed_accuracy=False,
                missed_latency=False,
                reason="",
                started_at=now,
            )
            session.add(row)
            session.flush()
            return row.id

    def place_trial(self, trial_id: int, placement: Placement) -> None:
        """The trial's cut is chosen and its bundle built."""
        with self._write() as session:
            row = session.get_one(TrialRow, trial_id)
            row.k, row.n, row.cut, row.bundle = placement.k, placement.n, placement.cut, placement.bundle
            row.predicted_bytes, row.whole_bytes = placement.predicted_bytes, placement.whole_bytes
            row.precision, row.precision_reason = placement.precision, placement.precision_reason

    def end_trial(self, trial_id: int, trial: Trial, *, now: datetime) -> None:
        """A trial is judged; its evaluation, if it has one, becomes that of its ``split``."""
        with self._write() as session:
            row = session.get_one(TrialRow, trial_id)
            if row.state != TrialState.RUNNING:
                raise SplitfleetError(f"trial {trial_id} is {row.state} already: its run was taken for dead")
            row.state, row.reason, row.ended_at = trial.state, trial.reason, now
            row.missed_accuracy = "accuracy" in trial.missed
            row.missed_latency = "latency" in trial.missed
            if trial.evaluation is not None:
                if row.bundle is None or row.k is None:
                    raise RuntimeError(f"trial {trial_id} was evaluated before it was placed")
                _add_evaluation(session, trial_id, "split", row.bundle, row.k, trial.evaluation)

    def add_baseline(self, trial_id: int, variant: Variant, *, bundle: str, k: int, evaluation: Evaluation) -> None:
        """The same model on the same device, cut elsewhere, measured beside the trial."""
        with self._write() as session:
            _add_evaluation(session, trial_id, variant, bundle, k, evaluation)

    def record_float_accuracy(self, trial_id: int, accuracy: float) -> None:
        """Accuracy of the trial's whole model in floating point, on the validation set."""
        with self._write() as session:
            session.get_one(TrialRow, trial_id).float_accuracy = accuracy

    def record_test(self, trial_id: int, *, accuracy: float, samples: int) -> None:
        """Accuracy of an accepted trial's split on the test set."""
        with self._write() as session:
            row = session.get_one(TrialRow, trial_id)
            row.test_accuracy, row.test_samples = accuracy, samples

    def trials(self, run_id: int) -> list[TrialRecord]:
        """The trials of a run in the order they were begun."""
        with self._read() as session:
            found = session.scalars(
                sa.select(TrialRow)
                .where(TrialRow.run_id == run_id)
                .order_by(TrialRow.id)
                .options(selectinload(TrialRow.evaluations), selectinload(TrialRow.round))
            )
            return [rows.trial(row) for row in found]

    def record_outcomes(self, run_id: int, outcomes: Iterable[OutcomeRecord]) -> None:
        """How a run ended for each of its devices; to be told once."""
        with self._write() as session:
            session.add_all(
                OutcomeRow(run_id=run_id, device_id=each.device_id, state=each.state, trial_id=each.trial_id)
                for each in outcomes
            )

    def outcomes(self, run_id: int) -> list[OutcomeRecord]:
        """What :meth:`record_outcomes` was told, by device id; empty for a run that did not come to its end."""
        with self._read() as session:
            found = session.scalars(
                sa.select(OutcomeRow).where(OutcomeRow.run_id == run_id).order_by(OutcomeRow.device_id)
            )
            return [rows.outcome(row) for row in found]

    # Allocations

    def activate(self, trial_id: int, *, now: datetime) -> None:
        """A trial's bundle is its device's allocation from now on; the one before is superseded."""
        with self._write() as session:
            trial = session.get_one(TrialRow, trial_id)
            if trial.bundle is None:
                raise RuntimeError(f"trial {trial_id} has no bundle to allocate")
            session.execute(
                sa.update(AllocationRow)
                .where(AllocationRow.device_id == trial.device_id, AllocationRow.superseded_at.is_(None))
                .values(superseded_at=now)
            )
            session.add(
                AllocationRow(device_id=trial.device_id, trial_id=trial_id, bundle=trial.bundle, activated_at=now)
            )

    def active_allocations(self) -> list[AllocationRecord]:
        """The allocation of each device that has one, by device id."""
        with self._read() as session:
            found = session.scalars(_ACTIVE.options(selectinload(AllocationRow.trial)))
            return [rows.allocation(row) for row in found]

    def active_bundles(self) -> list[str]:
        """The bundles of all active allocations, each once, sorted: the tails that a server needs."""
        with self._read() as session:
            return sorted({row.bundle for row in session.scalars(_ACTIVE)})


_ACTIVE = sa.select(AllocationRow).where(AllocationRow.superseded_at.is_(None)).order_by(AllocationRow.device_id)


def _round(session: Session, run_id: int, number: int) -> RoundRow:
    return session.scalars(sa.select(RoundRow).where(RoundRow.run_id == run_id, RoundRow.number == number)).one()


def _end_runs(session: Session, run_ids: Sequence[int], state: RunState, reason: str, now: datetime) -> None:
    running = sa.select(RunRow.id).where(RunRow.id.in_(run_ids), RunRow.state == RunState.RUNNING)
    session.execute(
        sa.update(TrialRow)
        .where(TrialRow.run_id.in_(running), TrialRow.state == TrialState.RUNNING)
        .values(state=TrialState.INTERRUPTED, reason=reason, ended_at=now)
        .execution_options(synchronize_session=False)
    )
    session.execute(
        sa.update(RunRow)
        .where(RunRow.id.in_(run_ids), RunRow.state == RunState.RUNNING)
        .values(state=state, reason=reason, ended_at=now)
        .execution_options(synchronize_session=False)
    )


def _add_evaluation(
    session: Session, trial_id: int, variant: Variant, bundle: str, k: int, evaluation: Evaluation
) -> None:
    session.add(
        EvaluationRow(trial_id=trial_id, variant=variant, bundle=bundle, k=k, **rows.evaluation_columns(evaluation))
    )
