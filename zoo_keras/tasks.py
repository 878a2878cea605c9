"""Tasks: what is inferred, on which labelled data, and which models of the zoo can do it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_sdk.errors import ConfigError
from zoo_keras.builders import ARCHITECTURES, architecture
from zoo_keras.info import ModelInfo
from zoo_keras.quiet import load_keras
from zoo_keras.samples import Samples, load_samples
from zoo_keras.weights import load_float16

ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to infer. `labels` are the class names in the order of the models' outputs.

    The models of a task are interchangeable: each takes one sample as the input `image`, float32 (28, 28, 1) with raw
    pixels 0..255, and returns `probabilities`, float32 (10,).
    """

    name: str
    title: str
    labels: tuple[str, ...]
    metric: str
    models: tuple[str, ...]

    def samples(self, split: str) -> Samples:
        """The shipped set `calibration`, `validation` or `test`; `ConfigError` for any other name."""
        return load_samples(ASSETS / self.name, split)


_TASKS = {
    "fashion-mnist": Task(
        name="fashion-mnist",
        title="Which kind of clothing is in the picture? (Fashion-MNIST, 28 x 28 grey pixels)",
        labels=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
        metric="accuracy",
        models=tuple(ARCHITECTURES),
    )
}


def tasks() -> tuple[str, ...]:
    """The names of all tasks."""
    return tuple(_TASKS)


def task(name: str) -> Task:
    """The task of that name; `ConfigError` names those that exist."""
    try:
        return _TASKS[name]
    except KeyError:
        raise ConfigError(f"there is no task {name!r}; the tasks are: {', '.join(_TASKS)}", task=name) from None


def model_info(task_name: str, model_name: str, *, assets: Path = ASSETS) -> ModelInfo:
    """What is known of a trained model; does not load TensorFlow.

    Raises `ConfigError` for an unknown task or model, or one that has not been trained.
    """
    return ModelInfo.read(_paths(task_name, model_name, assets)[1])


def load_model(task_name: str, model_name: str, *, assets: Path = ASSETS) -> Any:
    """A trained `keras.Model`, not compiled, with the shipped float16 weights cast to float32.

    Raises `ConfigError` for an unknown task or model, or one that has not been trained; `IntegrityError` when the
    weights file was altered.
    """
    weights_path, info_path = _paths(task_name, model_name, assets)
    info = ModelInfo.read(info_path)
    load_keras()
    model = architecture(model_name).build(len(task(task_name).labels))
    load_float16(model, weights_path, sha256=info.weights_sha256)
    return model


def _paths(task_name: str, model_name: str, assets: Path) -> tuple[Path, Path]:
    """Where the weights and the facts of a model lie."""
    known = task(task_name)
    if model_name not in known.models:
        raise ConfigError(
            f"the task {task_name!r} has no model {model_name!r}; it has: {', '.join(known.models)}", model=model_name
        )
    directory = assets / task_name / "models"
    return directory / f"{model_name}.npz", directory / f"{model_name}.json"
