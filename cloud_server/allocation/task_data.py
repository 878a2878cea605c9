"""The data of a task that an allocation needs: its models, labelled sets, and the metric that scores them.

A task is the zoo's or a user's; from here on nobody can tell which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import zoo_keras
from cloud_server.allocation.candidates import zoo_recipe
from cloud_server.allocation.metrics import Metric, metric
from cloud_server.library import Library
from converters import Recipe
from edge_sdk.errors import ConfigError
from zoo_keras.samples import Samples


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskData:
    """``recipes`` are the models by name. Decisions fall on ``validation``; ``test`` is looked at once, when all is
    decided, and ``None`` where the user has none.
    """

    recipes: Mapping[str, Recipe]
    metric: Metric
    validation: Samples
    test: Samples | None


def task_data(name: str, library: Library) -> TaskData:
    """A task with its models: those of the zoo that are trained, and those that users added.

    Raises :class:`ConfigError` for an unknown task or one without a model, :class:`IntegrityError` when a file of the
    library is gone.
    """
    sources = [library.source(record) for record in library.models() if record.task == name]
    recipes = {source.name: source.recipe(source.calibration) for source in sources}
    if name in zoo_keras.tasks():
        return _zoo_task(name, recipes)
    task = library.task(name)
    if not recipes:
        raise ConfigError(
            f"the task {name!r} has no model: add one with 'splitfleet models add NAME FILE --task {name}'"
        )
    return TaskData(
        recipes=recipes,
        metric=metric(task.metric),
        validation=library.labelled(task.validation_sha256),
        test=None if task.test_sha256 is None else library.labelled(task.test_sha256),
    )


def _zoo_task(name: str, added: Mapping[str, Recipe]) -> TaskData:
    task = zoo_keras.task(name)
    recipes = {model: zoo_recipe(name, model) for model in task.models if _is_trained(name, model)} | dict(added)
    if not recipes:
        raise ConfigError(f"no model of the task {name!r} is trained: train them with 'splitfleet zoo train'")
    return TaskData(
        recipes=recipes,
        metric=metric(task.metric),
        validation=task.samples("validation"),
        test=task.samples("test"),
    )


def _is_trained(task: str, model: str) -> bool:
    try:
        zoo_keras.model_info(task, model)
    except ConfigError:
        return False
    return True
