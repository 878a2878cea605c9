"""The tables. Portable SQL only: what runs on SQLite here runs on PostgreSQL.

A change here goes with a migration in ``migrations/versions``; a test compares the two.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    TypeDecorator,
    text,
)
from sqlalchemy import UniqueConstraint as Unique
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


class UtcDateTime(TypeDecorator[datetime]):
    """A point in time; SQLite forgets the time zone, so it is put back on the way out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone; pass datetime.now(UTC)")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


class Base(DeclarativeBase):
    """Names every constraint, so that a later migration can address it on any database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012
        str: String(255),
        float: Double(),
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
        list[str]: JSON,
        list[Any]: JSON,
    }


class DeviceRow(Base):
    __tablename__ = "devices"

    id: Mapped[str] = mapped_column(primary_key=True)
    profile: Mapped[str | None]
    model_ram_bytes: Mapped[int] = mapped_column(BigInteger)
    resources: Mapped[dict[str, Any]]
    emulation: Mapped[dict[str, Any]]
    version: Mapped[str]
    first_seen: Mapped[datetime]
    last_seen: Mapped[datetime]


class RunRow(Base):
    """``lease_until``: the allocator renews it while it lives; a running run whose lease ran out is dead."""

    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(primary_key=True)
    task: Mapped[str]
    min_accuracy: Mapped[float | None]
    max_latency_ms: Mapped[float | None]
    latency_statistic: Mapped[str]
    latency_samples: Mapped[int]
    redraw: Mapped[str]
    memory_model: Mapped[str]
    max_rounds: Mapped[int | None]
    device_timeout_s: Mapped[float]
    seed: Mapped[int] = mapped_column(BigInteger)
    devices: Mapped[list[str]]
    baselines: Mapped[bool]
    state: Mapped[str] = mapped_column(index=True)
    reason: Mapped[str] = mapped_column(Text)
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    lease_until: Mapped[datetime]

    rounds: Mapped[list[RoundRow]] = relationship(order_by="RoundRow.number")


class RoundRow(Base):
    __tablename__ = "rounds"
    __table_args__ = (Unique("run_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    number: Mapped[int]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class TrialRow(Base):
    """``k``, ``n``, ``cut``, the predicted sizes, the precision and ``bundle`` are known once the bundle is built."""

    __tablename__ = "trials"
    __table_args__ = (Unique("run_id", "device_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id"), index=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), index=True)
    number: Mapped[int]
    model: Mapped[str]
    memory_budget_bytes: Mapped[int] = mapped_column(BigInteger)
    k: Mapped[int | None]
    n: Mapped[int | None]
    cut: Mapped[str | None] = mapped_column(Text)
    predicted_bytes: Mapped[int | None] = mapped_column(BigInteger)
    whole_bytes: Mapped[int | None] = mapped_column(BigInteger)
    bundle: Mapped[str | None] = mapped_column(String(64))
    precision: Mapped[str | None]
    precision_reason: Mapped[str | None] = mapped_column(Text)
    state: Mapped[str] = mapped_column(index=True)
    missed_accuracy: Mapped[bool]
    missed_latency: Mapped[bool]
    reason: Mapped[str] = mapped_column(Text)
    float_accuracy: Mapped[float | None]
    test_accuracy: Mapped[float | None]
    test_samples: Mapped[int | None]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]

    round: Mapped[RoundRow] = relationship()
    evaluations: Mapped[list[EvaluationRow]] = relationship(order_by="EvaluationRow.id")


class EvaluationRow(Base):
    """``variant``: the split itself, or a baseline of the same model on the same device."""

    __tablename__ = "evaluations"
    __table_args__ = (Unique("trial_id", "variant"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("trials.id"))
    variant: Mapped[str]
    bundle: Mapped[str] = mapped_column(String(64))
    k: Mapped[int]
    tag: Mapped[str]
    samples: Mapped[int]
    accuracy: Mapped[float]
    latency_samples: Mapped[int]
    latency_mean_ms: Mapped[float]
    latency_p50_ms: Mapped[float]
    latency_p95_ms: Mapped[float]
    edge_ms: Mapped[float]
    transfer_ms: Mapped[float]
    cloud_ms: Mapped[float]
    sent_bytes: Mapped[float]
    head_bytes: Mapped[int] = mapped_column(BigInteger)
    measured_peak_bytes: Mapped[int] = mapped_column(BigInteger)


class OutcomeRow(Base):
    """How a run ended for a device; one that was expected and never came has an outcome too, but no row in
    ``devices``.
    """

    __tablename__ = "outcomes"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    device_id: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    trial_id: Mapped[int | None] = mapped_column(ForeignKey("trials.id"))


class AllocationRow(Base):
    """Active until ``superseded_at`` is set; a device has at most one active allocation."""

    __tablename__ = "allocations"

    id: Mapped[int] = mapped_column(primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), index=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("trials.id"))
    bundle: Mapped[str] = mapped_column(String(64))
    activated_at: Mapped[datetime]
    superseded_at: Mapped[datetime | None]

    trial: Mapped[TrialRow] = relationship()


def _one_active(table: str) -> Index:
    """A name is free again once its row is marked as removed."""
    active = text("removed_at IS NULL")
    return Index(f"ix_{table}_active_name", "name", unique=True, sqlite_where=active, postgresql_where=active)


class UserTaskRow(Base):
    """A task that a user brought; the data are files of the library, by SHA-256. ``inputs`` are shape and dtype of each
    input by name, ``classes`` is one more than the largest label.
    """

    __tablename__ = "user_tasks"
    __table_args__ = (_one_active("user_tasks"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    metric: Mapped[str]
    inputs: Mapped[dict[str, Any]]
    classes: Mapped[int]
    validation_sha256: Mapped[str] = mapped_column(String(64))
    validation_samples: Mapped[int]
    calibration_sha256: Mapped[str] = mapped_column(String(64))
    calibration_samples: Mapped[int]
    test_sha256: Mapped[str | None] = mapped_column(String(64))
    test_samples: Mapped[int | None]
    added_at: Mapped[datetime]
    removed_at: Mapped[datetime | None]


class UserModelRow(Base):
    """A model that a user brought, for a task of a user or of the zoo; ``file_sha256`` is a file of the library."""

    __tablename__ = "user_models"
    __table_args__ = (_one_active("user_models"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    task: Mapped[str] = mapped_column(index=True)
    file_sha256: Mapped[str] = mapped_column(String(64))
    file_bytes: Mapped[int] = mapped_column(BigInteger)
    suffix: Mapped[str]
    custom_objects: Mapped[list[str]]
    input_shapes: Mapped[list[Any]]
    unsafe: Mapped[bool]
    model_sha256: Mapped[str] = mapped_column(String(64))
    operations: Mapped[int]
    parameters: Mapped[int] = mapped_column(BigInteger)
    added_at: Mapped[datetime]
    removed_at: Mapped[datetime | None]
