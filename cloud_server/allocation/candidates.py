"""Candidates: the models of a task, where each may be cut, and the bundles that become of it.

:class:`Candidates` is what the loop needs; :class:`WorkshopCandidates` has it of recipes, through a workshop.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from cloud_server.allocation.fleet import Array
from cloud_server.allocation.memory_model import Choice, MemoryModel, NoCut, choose
from cloud_server.allocation.predictions import Predictions
from converters import Recipe, Workshop
from edge_sdk.bundle import Bundle, file_sha256
from zoo_keras.samples import Samples


class Candidates(Protocol):
    """All methods may be called from any thread; they raise :class:`SplitfleetError`."""

    @property
    def models(self) -> Sequence[str]:
        """The names of the task's models."""
        ...

    def choose(self, model: str, budget_bytes: int, runtime: str) -> Choice | NoCut:
        """Where the memory model cuts for the budget of a device with ``runtime``, at each precision; may have to load
        the model first.
        """
        ...

    def build(self, model: str, choice: Choice) -> Bundle:
        """The bundle of a model in the first precision that is good enough; minutes if it was not built before.

        Raises :class:`DoesNotFitError` where only precisions are that do not fit.
        """
        ...

    def build_cloud_only(self, model: str) -> Bundle:
        """The bundle whose tail is all of the model."""
        ...

    def predict(self, model: str, samples: Samples) -> Sequence[Array]:
        """The outputs (N, …) of the whole model in floating point."""
        ...


class WorkshopCandidates:
    """The models that some recipes, by name, lead to."""

    def __init__(
        self,
        workshop: Workshop,
        predictions: Predictions,
        recipes: Mapping[str, Recipe],
        memory_model: MemoryModel,
    ) -> None:
        self._workshop = workshop
        self._predictions = predictions
        self._memory_model = memory_model
        self._recipes = dict(recipes)

    @property
    def models(self) -> Sequence[str]:
        return tuple(self._recipes)

    def choose(self, model: str, budget_bytes: int, runtime: str) -> Choice | NoCut:
        outline = self._workshop.outline(self._recipes[model]).result()
        return choose(self._memory_model, outline, budget_bytes, runtime)

    def build(self, model: str, choice: Choice) -> Bundle:
        return Bundle.open(self._workshop.build_first(self._recipes[model], choice.ladder).result())

    def build_cloud_only(self, model: str) -> Bundle:
        return Bundle.open(self._workshop.build(self._recipes[model], 0).result())

    def predict(self, model: str, samples: Samples) -> Sequence[Array]:
        return self._predictions.of(self._recipes[model], samples)


def zoo_recipe(task: str, model: str) -> Recipe:
    """How a worker process gets at a model of the zoo. Raises :class:`ConfigError` if it was not trained."""
    import zoo_keras

    weights_sha256 = zoo_keras.model_info(task, model).weights_sha256
    return Recipe(
        task=task,
        model_name=model,
        load=functools.partial(zoo_keras.load_model, task, model),
        calibration=functools.partial(_calibration, task),
        fingerprint=f"{weights_sha256} {_calibration_sha256(task)} {_builders_sha256()}",
    )


def _calibration(task: str) -> Mapping[str, Array]:
    import zoo_keras

    return zoo_keras.task(task).samples("calibration").inputs


@functools.cache
def _calibration_sha256(task: str) -> str:
    import zoo_keras

    return zoo_keras.task(task).samples("calibration").digest


@functools.cache
def _builders_sha256() -> str:
    """The architectures are code: the same weights in another one are another model."""
    from zoo_keras import builders

    folder = Path(builders.__file__).parent
    digests = [file_sha256(path) for path in sorted(folder.glob("*.py"))]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()
