"""The data of a task that an allocation needs: labelled sets and the metric that scores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import zoo_keras
from cloud_server.allocation.metrics import Metric, metric
from edge_sdk.errors import ConfigError
from zoo_keras.samples import Samples


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskData:
    """Decisions fall on ``validation``; ``test`` is looked at once, when all is decided."""

    models: Sequence[str]
    metric: Metric
    validation: Samples
    test: Samples


def zoo_task(name: str) -> TaskData:
    """A task of the zoo with those of its models that are trained.

    Raises :class:`ConfigError` for an unknown task or one without a trained model.
    """
    task = zoo_keras.task(name)
    trained = [model for model in task.models if _is_trained(name, model)]
    if not trained:
        raise ConfigError(f"no model of the task {name!r} is trained: train them with 'splitfleet zoo train'")
    return TaskData(
        models=trained,
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
