"""What users brought: tasks with their labelled data, and models. Names are in the registry, files under their SHA-256
in a folder of the home, out of reach of devices.

A model is looked into by a worker process before it is taken in. How it is split and allocated from then on is as with
the zoo's.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import zoo_keras
from cloud_server import task_checks
from cloud_server.allocation.metrics import metric as known_metric
from cloud_server.home import Home
from cloud_server.models import CalibrationData, LoadOptions, ModelSource, file_source, load_with_inputs
from cloud_server.registry import Registry
from cloud_server.registry.library import ModelRecord, TaskRecord
from cloud_server.repository import ArtifactRepository
from cloud_server.task_checks import TaskFacts
from cloud_server.task_files import read_inputs, read_labelled
from converters import Outline, Recipe
from converters.calibration import check_calibration
from edge_sdk.errors import ConfigError, IntegrityError, UnknownBlobError
from zoo_keras.samples import Samples

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Library:
    """The library of a home and its registry."""

    def __init__(self, registry: Registry, home: Home) -> None:
        self._registry = registry
        self._files = ArtifactRepository(home.library)
        self._laid_out = home.library / "models"

    # Tasks

    def tasks(self) -> list[TaskRecord]:
        """All tasks of users, by name."""
        return self._registry.user_tasks()

    def task(self, name: str) -> TaskRecord:
        """Raises :class:`ConfigError` naming all tasks, those of the zoo too."""
        tasks = {task.name: task for task in self.tasks()}
        if name not in tasks:
            known = ", ".join(sorted({*tasks, *zoo_keras.tasks()}))
            raise ConfigError(f"there is no task {name!r}; the tasks are: {known}", task=name)
        return tasks[name]

    def add_task(self, name: str, *, validation: Path, calibration: Path, test: Path | None, metric: str) -> TaskRecord:
        """Take in a task and copies of its sets.

        Raises :class:`ConfigError` for a name that is taken or a metric that is none, :class:`InvalidInputError` for
        data that are wrong or do not belong together.
        """
        _check_name("task", name)
        known_metric(metric)
        if name in zoo_keras.tasks() or name in {task.name for task in self.tasks()}:
            raise ConfigError(f"there is a task {name!r} already; 'splitfleet tasks list' lists all")
        labelled = read_labelled(validation)
        task_checks.check_dtypes(validation, labelled.inputs)
        samples = read_inputs(calibration)
        task_checks.check_calibration_set(calibration, samples, labelled.inputs)
        tested = None if test is None else read_labelled(test)
        if test is not None and tested is not None:
            task_checks.check_dtypes(test, tested.inputs)
            task_checks.check_same_inputs(test, tested.inputs, labelled.inputs)
        record = TaskRecord(
            name=name,
            metric=metric,
            inputs=task_checks.inputs_of(labelled.inputs),
            classes=task_checks.classes_of(labelled, tested),
            validation_sha256=self._files.add_file(validation),
            validation_samples=len(labelled),
            calibration_sha256=self._files.add_file(calibration),
            calibration_samples=len(next(iter(samples.values()))),
            test_sha256=None if test is None else self._files.add_file(test),
            test_samples=None if tested is None else len(tested),
            added_at=datetime.now(UTC),
        )
        self._registry.add_user_task(record)
        return record

    def remove_task(self, name: str) -> None:
        """Forget a task and its files. Raises :class:`ConfigError` for an unknown one and while it has models."""
        record = self.task(name)
        self._registry.remove_user_task(name, now=datetime.now(UTC))
        self._forget(*record.files)

    def labelled(self, sha256: str) -> Samples:
        """A labelled set of a task."""
        return read_labelled(self._file(sha256))

    # Models

    def models(self) -> list[ModelRecord]:
        """All models of users, by task and name."""
        return self._registry.user_models()

    def model(self, name: str) -> ModelRecord:
        """Raises :class:`ConfigError` naming those there are."""
        models = {model.name: model for model in self.models()}
        if name not in models:
            known = f"it has: {', '.join(sorted(models))}" if models else "'splitfleet models add' adds one"
            raise ConfigError(f"the registry has no model {name!r}; {known}", model=name)
        return models[name]

    def add_model(
        self, name: str, path: Path, *, task: str, options: LoadOptions, outline: Callable[[Recipe], Outline]
    ) -> ModelRecord:
        """Take in a copy of the model file ``path``, to be called ``name``, if ``outline`` finds that it can be split
        and it fits the task.

        Raises :class:`ConfigError` for a name that is taken, :class:`ModelError` for a model that cannot be split or is
        not one of the task.
        """
        _check_name("model", name)
        facts = self._facts(task)
        taken = {model.name for model in self.models()}
        if name in taken or (task in zoo_keras.tasks() and name in zoo_keras.task(task).models):
            raise ConfigError(f"there is a model {name!r} already; 'splitfleet models list' lists all")
        given = self._of_task(file_source(path, options, name=name, task=task))
        # With random samples, so that data of another shape are told as what they are: those of another task.
        found = outline(given.recipe(None))
        task_checks.check_model(name, found, facts)
        if given.calibration is not None:
            check_calibration(given.calibration.load(), found.inputs)
        record = ModelRecord(
            name=name,
            task=task,
            file_sha256=self._files.add_file(path),
            file_bytes=path.stat().st_size,
            suffix=path.suffix,
            custom_objects=options.custom_objects,
            input_shapes=options.input_shapes,
            unsafe=options.unsafe,
            model_sha256=found.model_sha256,
            operations=found.n,
            parameters=sum(operation.parameters for operation in found.operations),
            added_at=datetime.now(UTC),
        )
        self._registry.add_user_model(record)
        return record

    def remove_model(self, name: str) -> None:
        """Forget a model and its file; what was allocated of it stays. Raises :class:`ConfigError`."""
        record = self.model(name)
        self._registry.remove_user_model(name, now=datetime.now(UTC))
        self._forget(record.file_sha256)

    def source(self, record: ModelRecord) -> ModelSource:
        """How to get at a model, with the calibration and validation data of its task."""
        options = LoadOptions(
            custom_objects=record.custom_objects, input_shapes=record.input_shapes, unsafe=record.unsafe
        )
        return self._of_task(file_source(self._lay_out(record), options, name=record.name, task=record.task))

    def _of_task(self, given: ModelSource) -> ModelSource:
        """A model from a file, with the inputs' names and the data of its task."""
        if given.task in zoo_keras.tasks():
            task = zoo_keras.task(given.task)
            names = tuple(task.samples("validation").inputs)
            calibration = CalibrationData.of_zoo(given.task)
            validation: Callable[[], Samples] = functools.partial(task.samples, "validation")
        else:
            known = self.task(given.task)
            names = tuple(known.inputs)
            calibration = CalibrationData.of_file(self._file(known.calibration_sha256))
            validation = functools.partial(self.labelled, known.validation_sha256)
        return dataclasses.replace(
            given,
            load=functools.partial(load_with_inputs, given.load, names),
            fingerprint=f"{given.fingerprint} {' '.join(names)}",
            calibration=calibration,
            validation=validation,
        )

    def _facts(self, task: str) -> TaskFacts:
        if task in zoo_keras.tasks():
            return task_checks.zoo_facts(task)
        known = self.task(task)
        return TaskFacts(name=task, metric=known.metric, inputs=known.inputs, classes=known.classes)

    def _file(self, sha256: str) -> Path:
        try:
            return self._files.file(sha256).absolute()
        except UnknownBlobError:
            raise IntegrityError(
                f"the library lost the file {sha256}: remove what it belongs to and add it again"
            ) from None

    def _lay_out(self, record: ModelRecord) -> Path:
        """The model's file under a name with its suffix, by which Keras tells the format."""
        path = self._laid_out / f"{record.file_sha256}{record.suffix}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            source = self._file(record.file_sha256)
            making = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                os.link(source, making)
            except OSError:
                shutil.copyfile(source, making)
            making.replace(path)
        return path

    def _forget(self, *digests: str) -> None:
        """Remove files that nothing refers to any more."""
        used = {model.file_sha256 for model in self.models()}
        used.update(digest for task in self.tasks() for digest in task.files)
        for digest in set(digests) - used:
            self._files.remove(digest)
            for laid_out in self._laid_out.glob(f"{digest}.*"):
                with suppress(FileNotFoundError):
                    laid_out.unlink()


def _check_name(what: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a {what}: expected 1 to 63 letters, digits, dots, dashes and underscores, "
            "a letter or digit first"
        )
