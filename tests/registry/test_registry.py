"""What the registry promises, on the database that is there by default."""

from __future__ import annotations

import dataclasses
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from cloud_server.allocation.core import OutcomeState
from cloud_server.allocation.settings import AllocationSettings, Thresholds
from cloud_server.allocation.trial import Draw, Evaluation, Placement, Trial, TrialState
from cloud_server.registry import Registry
from cloud_server.registry.errors import RunUnderWayError
from cloud_server.registry.records import OutcomeRecord, RunState
from cloud_server.registry.schema import Base
from edge_sdk.errors import ConfigError, RegistryUnreachableError, SplitfleetError
from edge_sdk.protocol import Emulation, Register, Resources

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
LEASE_S = 10.0
BUNDLE = "ab" * 32
OTHER = "cd" * 32
SETTINGS = AllocationSettings(
    task="t",
    thresholds=Thresholds(min_accuracy=0.8, max_latency_ms=50.0, latency_statistic="p95"),
    devices=("camera", "board"),
    seed=-(2**63),
    max_rounds=3,
    baselines=True,
)
PLACEMENT = Placement(
    k=3,
    n=9,
    cut="block_3/relu",
    predicted_bytes=7_000_000,
    whole_bytes=9_000_000,
    bundle=BUNDLE,
    precision="float16",
    precision_reason="int8: no such kernel",
)
EVALUATION = Evaluation(
    samples=1000,
    accuracy=0.875,
    latency_samples=100,
    latency_mean_ms=20.0,
    latency_p50_ms=19.0,
    latency_p95_ms=30.0,
    edge_ms=10.0,
    transfer_ms=6.0,
    cloud_ms=4.0,
    sent_bytes=1234.5,
    head_bytes=5_000_000_000,
    measured_peak_bytes=6_000_000_000,
)


def register(device_id: str = "camera", *, ram: int = 8_000_000) -> Register:
    resources = Resources(
        ram_bytes=2**40, ram_available_bytes=2**39, cores=4, architecture="aarch64", runtimes={"litert": "2.3"}
    )
    return Register(
        device_id=device_id,
        resources=resources,
        model_ram_bytes=ram,
        profile="rpi-4",
        emulation=Emulation(cpu="sleep"),
        version="0.1.0",
    )


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'registry.db'}"


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with Registry(url) as opened:
        yield opened


def started_trial(registry: Registry, *, device_id: str = "camera", model: str = "m", run_id: int | None = None) -> int:
    registry.record_device(register(device_id), now=NOW)
    if run_id is None:
        run_id = registry.start_run(SETTINGS, lease_s=LEASE_S, now=NOW)
        registry.start_round(run_id, 1, now=NOW)
    draw = Draw(round=1, device_id=device_id, trial=1, model=model)
    return registry.start_trial(run_id, draw, memory_budget_bytes=8_000_000, now=NOW)


def accept(registry: Registry, trial_id: int, *, bundle: str = BUNDLE, device_id: str = "camera") -> None:
    registry.place_trial(trial_id, dataclasses.replace(PLACEMENT, bundle=bundle))
    draw = Draw(round=1, device_id=device_id, trial=1, model="m")
    trial = Trial(draw=draw, state=TrialState.ACCEPTED, evaluation=EVALUATION)
    registry.end_trial(trial_id, trial, now=later(5))


def test_a_device_is_recorded_and_seen_again(registry: Registry) -> None:
    registry.record_device(register(ram=1), now=NOW)
    registry.record_device(register(ram=2), now=later(1))
    registry.mark_seen("camera", later(2))
    registry.mark_seen("stranger", later(2))
    (device,) = registry.devices()
    assert (device.device_id, device.model_ram_bytes, device.profile) == ("camera", 2, "rpi-4")
    assert (device.first_seen, device.last_seen) == (NOW, later(2))
    assert device.resources["runtimes"] == {"litert": "2.3"}
    assert device.emulation == {"cpu": "sleep"}
    assert device.bundle is None


def test_a_run_keeps_its_settings_and_ends_once(registry: Registry) -> None:
    run_id = registry.start_run(SETTINGS, lease_s=LEASE_S, now=NOW)
    registry.start_round(run_id, 1, now=NOW)
    registry.end_round(run_id, 1, now=later(1))
    registry.start_round(run_id, 2, now=later(1))
    assert registry.run(run_id).settings == SETTINGS
    assert registry.run(run_id).rounds == 2
    registry.end_run(run_id, RunState.INFEASIBLE, reason="no", now=later(9))
    registry.end_run(run_id, RunState.ACCEPTED, reason="too late", now=later(10))
    run = registry.run(run_id)
    assert (run.state, run.reason, run.started_at, run.ended_at) == (RunState.INFEASIBLE, "no", NOW, later(9))


def test_runs_come_newest_first(registry: Registry) -> None:
    first = registry.start_run(SETTINGS, lease_s=LEASE_S, now=NOW)
    registry.end_run(first, RunState.ACCEPTED, reason="", now=NOW)
    second = registry.start_run(SETTINGS, lease_s=LEASE_S, now=NOW)
    assert [run.run_id for run in registry.runs()] == [second, first]


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (("camera", "board"), ("board",), "run 1 of task 't' is under way and has the devices board; wait"),
        (("camera",), (), "has devices that this one may need"),
        ((), ("camera",), "has devices that this one may need"),
        ((), (), "has devices that this one may need"),
        (("camera",), ("board",), None),
    ],
)
def test_two_runs_never_have_the_same_device(
    registry: Registry, first: tuple[str, ...], second: tuple[str, ...], told: str | None
) -> None:
    registry.start_run(AllocationSettings(task="t", devices=first), lease_s=LEASE_S, now=NOW)
    settings = AllocationSettings(task="t", devices=second)
    if told is not None:
        with pytest.raises(RunUnderWayError, match=told) as caught:
            registry.start_run(settings, lease_s=LEASE_S, now=later(LEASE_S))
        assert caught.value.run_id == 1
        assert caught.value.lease_until == later(LEASE_S)
        # Its allocator is dead by then, whether or not anyone has marked it so.
        assert registry.start_run(settings, lease_s=LEASE_S, now=later(LEASE_S + 1)) == 2
    else:
        assert registry.start_run(settings, lease_s=LEASE_S, now=NOW) == 2


def test_a_run_that_ended_has_no_devices(registry: Registry) -> None:
    run_id = registry.start_run(SETTINGS, lease_s=LEASE_S, now=NOW)
    registry.end_run(run_id, RunState.FAILED, reason="", now=NOW)
    assert registry.start_run(SETTINGS, lease_s=LEASE_S, now=NOW) == 2


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_went_away_under_an_open_registry_is_told(url: str, tmp_path: Path, replaced: bool) -> None:
    with Registry(url) as registry:
        registry.record_device(register(), now=NOW)
        for file in tmp_path.glob("registry.db*"):
            file.unlink()
        if replaced:
            Registry(url).close()
        with pytest.raises(RegistryUnreachableError, match="deleted or replaced"):
            registry.mark_seen("camera", later(1))
        with pytest.raises(RegistryUnreachableError, match="deleted or replaced"):
            registry.devices()


def test_an_unknown_run_is_told(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="has no run 7"):
        registry.run(7)


def test_everything_of_a_trial_survives_a_restart(url: str) -> None:
    with Registry(url) as registry:
        trial_id = started_trial(registry)
        accept(registry, trial_id)
        registry.add_baseline(trial_id, "cloud-only", bundle=OTHER, k=0, evaluation=EVALUATION)
        registry.record_float_accuracy(trial_id, 0.9)
        registry.record_test(trial_id, accuracy=0.86, samples=1000)
        before = registry.trials(1)
    with Registry(url) as registry:
        (trial,) = registry.trials(1)
    assert [trial] == before
    assert trial.placement == PLACEMENT
    assert trial.evaluation == EVALUATION
    assert [(record.variant, record.bundle, record.k) for record in trial.evaluations] == [
        ("split", BUNDLE, 3),
        ("cloud-only", OTHER, 0),
    ]
    assert (trial.float_accuracy, trial.test_accuracy, trial.test_samples) == (0.9, 0.86, 1000)
    assert (trial.state, trial.started_at, trial.ended_at) == (TrialState.ACCEPTED, NOW, later(5))


def test_both_missed_thresholds_are_recorded(registry: Registry) -> None:
    trial_id = started_trial(registry)
    registry.place_trial(trial_id, PLACEMENT)
    draw = Draw(round=1, device_id="camera", trial=1, model="m")
    trial = Trial(
        draw=draw, state=TrialState.MISSED, evaluation=EVALUATION, missed=("accuracy", "latency"), reason="too bad"
    )
    registry.end_trial(trial_id, trial, now=NOW)
    (found,) = registry.trials(1)
    assert (found.missed, found.reason) == (("accuracy", "latency"), "too bad")


def test_a_trial_of_an_unrecorded_device_is_refused(registry: Registry) -> None:
    run_id = registry.start_run(SETTINGS, lease_s=LEASE_S, now=NOW)
    registry.start_round(run_id, 1, now=NOW)
    with pytest.raises(sa.exc.IntegrityError):
        registry.start_trial(
            run_id, Draw(round=1, device_id="nobody", trial=1, model="m"), memory_budget_bytes=1, now=NOW
        )
    assert registry.trials(run_id) == []


def test_a_device_has_one_active_allocation(registry: Registry) -> None:
    first = started_trial(registry)
    accept(registry, first)
    registry.activate(first, now=NOW)
    other = started_trial(registry, device_id="board", run_id=1)
    accept(registry, other, device_id="board")
    registry.activate(other, now=NOW)
    assert registry.active_bundles() == [BUNDLE]
    registry.end_run(1, RunState.ACCEPTED, reason="", now=NOW)
    second = started_trial(registry)
    accept(registry, second, bundle=OTHER)
    registry.activate(second, now=later(1))
    assert registry.active_bundles() == [BUNDLE, OTHER]
    assert [(a.device_id, a.bundle, a.run_id) for a in registry.active_allocations()] == [
        ("board", BUNDLE, 1),
        ("camera", OTHER, 2),
    ]
    assert [(device.device_id, device.bundle) for device in registry.devices()] == [
        ("board", BUNDLE),
        ("camera", OTHER),
    ]


def test_a_run_whose_allocator_died_is_interrupted_and_its_trials_too(registry: Registry) -> None:
    trial_id = started_trial(registry)
    done = started_trial(registry, device_id="board", run_id=1)
    accept(registry, done, device_id="board")
    assert registry.renew_run(1, lease_s=LEASE_S, now=later(9))
    assert registry.interrupt_dead_runs(now=later(18)) == []
    assert registry.interrupt_dead_runs(now=later(20)) == [1]
    assert registry.interrupt_dead_runs(now=later(30)) == []
    assert not registry.renew_run(1, lease_s=LEASE_S, now=later(21))
    assert registry.run(1).state is RunState.INTERRUPTED
    states = {trial.trial_id: trial.state for trial in registry.trials(1)}
    assert states == {trial_id: TrialState.INTERRUPTED, done: TrialState.ACCEPTED}
    with pytest.raises(SplitfleetError, match="taken for dead"):
        accept(registry, trial_id)


def test_the_outcomes_of_a_run_are_kept(registry: Registry) -> None:
    trial_id = started_trial(registry)
    assert registry.outcomes(1) == []
    outcomes = [
        OutcomeRecord(device_id="camera", state=OutcomeState.ACCEPTED, trial_id=trial_id),
        OutcomeRecord(device_id="never seen", state=OutcomeState.UNREACHABLE, trial_id=None),
    ]
    registry.record_outcomes(1, reversed(outcomes))
    assert registry.outcomes(1) == outcomes


def test_times_without_a_zone_are_refused(registry: Registry) -> None:
    with pytest.raises(sa.exc.StatementError, match="no time zone"):
        registry.record_device(register(), now=datetime(2030, 1, 1))


def test_the_migrations_make_the_schema_of_the_code(registry: Registry, url: str) -> None:
    registry.close()
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_a_newer_schema_is_told(registry: Registry, url: str, tmp_path: Path) -> None:
    registry.close()
    with sqlite3.connect(tmp_path / "registry.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(ConfigError, match=r"newer splitfleet: its schema is '9999', this one knows up to '\d+'"):
        Registry(url)


def test_tables_of_someone_else_are_left_alone(url: str, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "registry.db") as connection:
        connection.execute("CREATE TABLE devices (name TEXT)")
    connection.close()
    with pytest.raises(ConfigError, match="is not a registry, but has tables named devices"):
        Registry(url)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("no url", "is not a database URL"),
        ("nosuchdb://host/name", "no database called 'nosuchdb'"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("mysql+pymysql://user:secret@host/name", r"mysql\+pymysql://user:\*\*\*@host/name: its driver is missing"),
    ],
)
def test_a_bad_url_is_told(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Registry(url)


def test_a_database_that_cannot_be_opened_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(RegistryUnreachableError, match="unable to open database file") as caught:
        Registry(f"sqlite:///{tmp_path / 'missing' / 'registry.db'}")
    assert caught.value.exit_code == 4


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database, whatever its length may be" * 50)
    with pytest.raises(ConfigError, match="is not a registry: file is not a database"):
        Registry(f"sqlite:///{tmp_path / 'notes.txt'}")


def test_threads_share_a_registry(registry: Registry) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: registry.record_device(register(f"d{number % 10}"), now=NOW), range(80)))
    assert len(registry.devices()) == 10


def test_processes_may_open_a_new_registry_at_once(url: str) -> None:
    script = (
        "import sys; from datetime import UTC, datetime; from cloud_server.registry import Registry\n"
        "from cloud_server.allocation.settings import AllocationSettings\n"
        "with Registry(sys.argv[1]) as registry:\n"
        "    for number in range(20):\n"
        "        settings = AllocationSettings(task='t', devices=(f'{sys.argv[2]}-{number}',))\n"
        "        registry.start_run(settings, lease_s=9, now=datetime.now(UTC))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script, url, str(number)], stderr=subprocess.PIPE, text=True)
        for number in range(4)
    ]
    assert [process.communicate(timeout=120)[1] for process in processes] == [""] * 4
    with Registry(url) as registry:
        assert len(registry.runs()) == 80


def test_the_url_is_shown_without_its_password(url: str) -> None:
    with Registry(url) as registry:
        assert registry.url == url
