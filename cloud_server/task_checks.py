"""Whether what a user brings belongs together: the sets of a task with each other, a model with the data of a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zoo_keras
from cloud_server.registry.library import InputFacts
from cloud_server.task_files import Array
from converters import Outline
from converters.calibration import check_calibration
from converters.graph import TensorInfo
from edge_sdk.errors import InvalidInputError, ModelError
from edge_sdk.wire import DTYPES
from zoo_keras.samples import Samples


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What a model of a task must take and make. ``classes`` is one more than the largest label."""

    name: str
    metric: str
    inputs: Mapping[str, InputFacts]
    classes: int


def zoo_facts(name: str) -> TaskFacts:
    """Those of a task of the zoo."""
    task = zoo_keras.task(name)
    inputs = inputs_of(task.samples("validation").inputs)
    return TaskFacts(name=name, metric=task.metric, inputs=inputs, classes=len(task.labels))


def inputs_of(arrays: Mapping[str, Array]) -> dict[str, InputFacts]:
    """Shape and dtype of each input."""
    return {name: InputFacts(shape=array.shape[1:], dtype=array.dtype.name) for name, array in arrays.items()}


def check_same_inputs(path: Path, arrays: Mapping[str, Array], validation: Mapping[str, Array]) -> None:
    """Raise :class:`InvalidInputError` unless the set in ``path`` has the inputs of the validation set."""
    found, expected = inputs_of(arrays), inputs_of(validation)
    if set(found) != set(expected):
        raise InvalidInputError(
            f"{path}: has the inputs {', '.join(sorted(found))}; the validation set has {', '.join(sorted(expected))}"
        )
    for name, facts in found.items():
        if facts.shape != expected[name].shape:
            raise InvalidInputError(
                f"{path}: {name!r} has samples of shape {list(facts.shape)}, "
                f"those of the validation set are {list(expected[name].shape)}"
            )


def check_calibration_set(path: Path, arrays: Mapping[str, Array], validation: Mapping[str, Array]) -> None:
    """Raise :class:`InvalidInputError` unless the set in ``path`` can calibrate heads for the validation set."""
    check_same_inputs(path, arrays, validation)
    tensors = [
        TensorInfo(name=name, source=name, shape=array.shape[1:], dtype=array.dtype.name)
        for name, array in validation.items()
    ]
    try:
        check_calibration(arrays, tensors, validation)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error.message}") from None


def check_dtypes(path: Path, arrays: Mapping[str, Array]) -> None:
    """Raise :class:`InvalidInputError` for a dtype that no device takes."""
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise InvalidInputError(f"{path}: {name!r} has dtype {array.dtype}; expected one of {', '.join(DTYPES)}")


def classes_of(*sets: Samples | None) -> int:
    """One more than the largest label in any of the sets."""
    return max(int(samples.labels.max()) for samples in sets if samples is not None) + 1


def check_model(name: str, model: Outline, task: TaskFacts) -> None:
    """Raise :class:`ModelError` unless the model takes the task's data and its outputs can be scored."""
    for tensor in model.inputs:
        facts = task.inputs[tensor.name]
        if tensor.shape != facts.shape:
            raise ModelError(
                f"model {name!r}: its input {tensor.name!r} takes samples of shape {list(tensor.shape)}, "
                f"the data of the task {task.name!r} has {list(facts.shape)}"
            )
        if not tensor.is_float and DTYPES[facts.dtype].kind == "f":
            raise ModelError(
                f"model {name!r}: its input {tensor.name!r} takes {tensor.dtype}, "
                f"the data of the task {task.name!r} is {facts.dtype}"
            )
    output = model.outputs[0]
    if task.metric == "accuracy" and (len(output.shape) != 1 or output.shape[0] < max(task.classes, 2)):
        raise ModelError(
            f"model {name!r}: its first output, {output.name!r}, has the shape {list(output.shape)}; "
            f"the accuracy of the task {task.name!r} needs one number for each of its {task.classes} classes"
        )
