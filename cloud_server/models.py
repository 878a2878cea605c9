"""Where a model comes from: a file, ``zoo:NAME`` or ``registry:NAME``, as a recipe that a worker process can load.

Nothing here loads TensorFlow. A model of a task brings the data of its task; a file brings none.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud_server.task_files import Array, read_inputs
from converters import Recipe
from converters.calibration import check_calibration
from converters.graph import TensorInfo
from converters.model_file import folder_error
from converters.user_code import code_sha256
from edge_sdk.bundle import file_sha256
from edge_sdk.errors import ConfigError, InvalidInputError, ModelError
from zoo_keras.samples import Samples

ZOO = "zoo:"
REGISTRY = "registry:"
InputShape = tuple[str | None, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model file is loaded: see :func:`converters.loading.load_model`. A shape without a name is that of the one
    input there is.
    """

    custom_objects: tuple[str, ...] = ()
    input_shapes: tuple[InputShape, ...] = ()
    unsafe: bool = False

    @property
    def code_sha256(self) -> str:
        """Covers the code of the custom objects (:mod:`converters.user_code`); empty where there are none.

        Raises :class:`ConfigError` for a module that cannot be found.
        """
        digests = []
        for module in sorted({each.partition(":")[0] for each in self.custom_objects}):
            try:
                digests.append(code_sha256([module]))
            except (ImportError, ValueError) as error:
                raise _no_module(module, str(error)) from None
        return " ".join(digests)


@dataclass(frozen=True, kw_only=True)
class CalibrationData:
    """Real samples of a model's inputs, to be loaded in a worker process; ``sha256`` stands for them."""

    load: Callable[[], Mapping[str, Array]]
    sha256: str

    @classmethod
    def of_file(cls, path: Path) -> CalibrationData:
        """The inputs in an ``.npz`` file, by the names that they have there."""
        return cls(load=functools.partial(read_inputs, path.absolute()), sha256=file_sha256(path))

    @classmethod
    def of_file_for(cls, path: Path, inputs: Sequence[TensorInfo]) -> CalibrationData:
        """The same for a model that takes ``inputs``; with one input there is nothing to mix up, whatever its name.

        Raises :class:`InvalidInputError` for data that cannot calibrate the model.
        """
        load = functools.partial(_named_inputs, path.absolute(), tuple(tensor.name for tensor in inputs))
        try:
            check_calibration(load(), inputs)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error.message}") from None
        return cls(load=load, sha256=file_sha256(path))

    @classmethod
    def of_zoo(cls, task: str) -> CalibrationData:
        """Those of a task of the zoo."""
        return cls(load=functools.partial(_zoo_calibration, task), sha256=_zoo_calibration_sha256(task))


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model and how to get at it.

    ``task`` is empty for a file. ``fingerprint`` covers model and loading, not the calibration data. ``calibration``
    and ``validation`` are those of its task.
    """

    task: str
    name: str
    load: Callable[[], Any]
    fingerprint: str
    calibration: CalibrationData | None = None
    validation: Callable[[], Samples] | None = None

    def recipe(self, calibration: CalibrationData | None) -> Recipe:
        """For a workshop; without ``calibration``, random samples stand in for real ones."""
        return Recipe(
            task=self.task,
            model_name=self.name,
            load=self.load,
            calibration=None if calibration is None else calibration.load,
            fingerprint=f"{self.fingerprint} {'random' if calibration is None else calibration.sha256}",
        )


def file_source(path: Path, options: LoadOptions, *, name: str | None = None, task: str = "") -> ModelSource:
    """The model in a file. Raises :class:`ConfigError` when there is no such file, :class:`ModelError` for a folder."""
    if options.custom_objects:
        import_from_here()
    try:
        sha256 = file_sha256(path)
    except IsADirectoryError:
        raise folder_error(path) from None
    except OSError as error:
        hint = (
            ""
            if path.suffix or path.exists()
            else f"; a model of the zoo is {ZOO}{path}, one of the registry {REGISTRY}{path}"
        )
        raise ConfigError(f"{path}: cannot be read ({error.strerror}){hint}") from None
    described = json.dumps([options.custom_objects, options.input_shapes, options.unsafe])
    return ModelSource(
        task=task,
        name=name or path.stem,
        load=functools.partial(load_file, path.absolute(), options),
        fingerprint=f"{sha256} {described} {options.code_sha256}",
    )


def zoo_source(text: str) -> ModelSource:
    """The zoo's model ``NAME``, or ``TASK/NAME`` where several tasks have one of that name.

    Raises :class:`ConfigError` naming those that exist.
    """
    import zoo_keras
    from cloud_server.allocation.candidates import zoo_recipe

    task, _, name = text.rpartition("/")
    tasks = [each for each in zoo_keras.tasks() if name in zoo_keras.task(each).models and task in ("", each)]
    if len(tasks) != 1:
        if tasks:
            raise ConfigError(f"several tasks have a model {name!r}; name one of {ZOO}{f', {ZOO}'.join(tasks)}/{name}")
        known = [f"{ZOO}{model}" for each in zoo_keras.tasks() for model in zoo_keras.task(each).models]
        raise ConfigError(f"the zoo has no model {text!r}; it has: {', '.join(known)}")
    recipe = zoo_recipe(tasks[0], name)
    data = zoo_keras.task(tasks[0])
    return ModelSource(
        task=tasks[0],
        name=name,
        load=recipe.load,
        fingerprint=recipe.fingerprint or "",
        calibration=CalibrationData.of_zoo(tasks[0]),
        validation=functools.partial(data.samples, "validation"),
    )


def named_as(names: Sequence[str], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """Arrays under the names of a model's inputs: with one of each there is nothing to mix up."""
    return dict(zip(names, arrays.values(), strict=True)) if len(names) == len(arrays) == 1 else arrays


def load_file(path: Path, options: LoadOptions) -> Any:
    """The ``keras.Model`` in a file; called in a worker process. Raises :class:`ModelError`."""
    from converters.loading import load_model

    unnamed = [shape for name, shape in options.input_shapes if name is None]
    named = {name: shape for name, shape in options.input_shapes if name is not None}
    return load_model(
        path,
        custom_objects=options.custom_objects,
        input_shapes=unnamed[0] if unnamed else named or None,
        unsafe=options.unsafe,
    )


def load_with_inputs(load: Callable[[], Any], names: Sequence[str]) -> Any:
    """The model that ``load`` returns, with its inputs called ``names``; called in a worker process.

    Keras makes up names for unnamed inputs, so a model of one input is renamed where its name is another. Raises
    :class:`ModelError` when the inputs of one of several are others.
    """
    from converters.keras_backend import load_keras
    from converters.keras_graph import end_names, graph_ends

    model = load()
    inputs, outputs = graph_ends(model, f"model {getattr(model, 'name', model)!r}")
    own = end_names(getattr(model, "_inputs_struct", inputs), inputs)
    if set(own) == set(names):
        return model
    if len(own) != 1 or len(names) != 1:
        raise ModelError(
            f"model {model.name!r} has the inputs {', '.join(sorted(own))}; the data has {', '.join(sorted(names))}"
        )
    keras = load_keras()
    return keras.Model({names[0]: inputs[0]}, getattr(model, "_outputs_struct", outputs), name=model.name)


def _named_inputs(path: Path, names: Sequence[str]) -> Mapping[str, Array]:
    return named_as(names, read_inputs(path))


def _zoo_calibration(task: str) -> Mapping[str, Array]:
    import zoo_keras

    return zoo_keras.task(task).samples("calibration").inputs


@functools.cache
def _zoo_calibration_sha256(task: str) -> str:
    import zoo_keras

    return zoo_keras.task(task).samples("calibration").digest


def import_from_here() -> None:
    """Let modules in the current folder be imported, here and in worker processes, as ``python -m`` would."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _no_module(module: str, reason: str) -> ConfigError:
    return ConfigError(
        f"custom objects: the module {module!r} cannot be found ({reason}); "
        "run the command in the folder where it lies, or name that folder in PYTHONPATH"
    )
