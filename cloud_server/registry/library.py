"""Tasks and models that users brought, as the registry knows them: names, digests and facts, no files.

A removed one is marked and hidden; its name is free again. The files are :mod:`cloud_server.library`'s matter.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from cloud_server.registry.database import Database
from cloud_server.registry.schema import UserModelRow, UserTaskRow
from edge_sdk.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class InputFacts:
    """An input as the data of a task has it; ``shape`` without the batch axis."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """A task of a user. ``classes`` is one more than the largest label in its labelled data."""

    name: str
    metric: str
    inputs: dict[str, InputFacts]
    classes: int
    validation_sha256: str
    validation_samples: int
    calibration_sha256: str
    calibration_samples: int
    test_sha256: str | None
    test_samples: int | None
    added_at: datetime

    @property
    def files(self) -> tuple[str, ...]:
        """The SHA-256 of each of its files."""
        return tuple(filter(None, (self.validation_sha256, self.calibration_sha256, self.test_sha256)))


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A model of a user, and how its file is loaded. ``input_shapes`` are those that the user fixed, by name or, for a
    model of one input, without.
    """

    name: str
    task: str
    file_sha256: str
    file_bytes: int
    suffix: str
    custom_objects: tuple[str, ...]
    input_shapes: tuple[tuple[str | None, tuple[int, ...]], ...]
    unsafe: bool
    model_sha256: str
    operations: int
    parameters: int
    added_at: datetime


class LibraryTables(Database):
    """The part of the registry that users fill; the contract is that of :mod:`cloud_server.registry.store`."""

    def add_user_task(self, record: TaskRecord) -> None:
        """Raises :class:`ConfigError` when there is a task of that name."""
        columns = asdict(record)
        try:
            with self._write() as session:
                session.add(UserTaskRow(**columns))
        except IntegrityError:
            raise ConfigError(f"there is a task {record.name!r} already; 'splitfleet tasks list' lists all") from None

    def user_tasks(self) -> list[TaskRecord]:
        """All that are not removed, by name."""
        with self._read() as session:
            found = session.scalars(
                sa.select(UserTaskRow).where(UserTaskRow.removed_at.is_(None)).order_by(UserTaskRow.name)
            )
            return [_task(row) for row in found]

    def remove_user_task(self, name: str, *, now: datetime) -> None:
        """Raises :class:`ConfigError` while it has models; one that is not there is removed already."""
        with self._write() as session:
            models = session.scalars(
                sa.select(UserModelRow.name)
                .where(UserModelRow.task == name, UserModelRow.removed_at.is_(None))
                .order_by(UserModelRow.name)
            ).all()
            if models:
                raise ConfigError(
                    f"the task {name!r} has the models {', '.join(models)}; "
                    "remove them first with 'splitfleet models remove'"
                )
            session.execute(
                sa.update(UserTaskRow)
                .where(UserTaskRow.name == name, UserTaskRow.removed_at.is_(None))
                .values(removed_at=now)
            )

    def add_user_model(self, record: ModelRecord) -> None:
        """Raises :class:`ConfigError` when there is a model of that name."""
        columns = asdict(record)
        columns["custom_objects"] = list(record.custom_objects)
        columns["input_shapes"] = [[name, list(shape)] for name, shape in record.input_shapes]
        try:
            with self._write() as session:
                session.add(UserModelRow(**columns))
        except IntegrityError:
            raise ConfigError(f"there is a model {record.name!r} already; 'splitfleet models list' lists all") from None

    def user_models(self) -> list[ModelRecord]:
        """All that are not removed, by task and name."""
        with self._read() as session:
            found = session.scalars(
                sa.select(UserModelRow)
                .where(UserModelRow.removed_at.is_(None))
                .order_by(UserModelRow.task, UserModelRow.name)
            )
            return [_model(row) for row in found]

    def remove_user_model(self, name: str, *, now: datetime) -> None:
        """One that is not there is removed already."""
        with self._write() as session:
            session.execute(
                sa.update(UserModelRow)
                .where(UserModelRow.name == name, UserModelRow.removed_at.is_(None))
                .values(removed_at=now)
            )


def _task(row: UserTaskRow) -> TaskRecord:
    values = {field.name: getattr(row, field.name) for field in fields(TaskRecord)}
    inputs = {name: InputFacts(shape=tuple(facts["shape"]), dtype=facts["dtype"]) for name, facts in row.inputs.items()}
    return TaskRecord(**values | {"inputs": inputs})


def _model(row: UserModelRow) -> ModelRecord:
    values = {field.name: getattr(row, field.name) for field in fields(ModelRecord)}
    shapes = tuple((name, tuple(shape)) for name, shape in row.input_shapes)
    return ModelRecord(**values | {"custom_objects": tuple(row.custom_objects), "input_shapes": shapes})
