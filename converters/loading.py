"""A user's model from a file: a ``.keras`` file, or a legacy ``.h5``/``.hdf5`` one.

What the file asks for is checked first (:mod:`converters.model_file`); what only the old Keras reads goes through it
(:mod:`converters.old_keras`). The model that is returned has fixed input shapes and a free batch axis.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from converters.keras_backend import load_keras
from converters.keras_graph import end_names, graph_ends
from converters.model_file import ModelFile, open_model_file, require_known, unknown_objects
from converters.retrace import run_symbolically
from edge_sdk.errors import ConfigError, ModelError, SplitfleetError, UnsupportedModelError

Shape = tuple[int, ...]

# As Keras says it, of .keras files and of legacy ones.
_LACKS = re.compile(r"(?:Could not locate (?:class|function)|Unknown \w+:?) '([\w>.]+)'")


def load_model(
    source: Path,
    *,
    custom_objects: Sequence[str] = (),
    input_shapes: Mapping[str, Shape] | Shape | None = None,
    unsafe: bool = False,
) -> Any:
    """The ``keras.Model`` in the file ``source``.

    ``custom_objects`` names the user's own layers and functions as ``"module:attribute"``. ``input_shapes`` fixes free
    dimensions, without the batch axis: one shape for a model of one input, else shapes by the name of the input.
    ``unsafe`` allows to run Python code that the file holds (Lambda layers): only for files from someone you trust.

    Picklable as ``functools.partial(load_model, path, ...)``. Raises :class:`ModelError` for a file that cannot be
    read, :class:`UnsupportedModelError` for a model that cannot be split, :class:`ConfigError` for a wrong argument.
    """
    source = Path(source)
    file = open_model_file(source)
    custom = _custom_objects(custom_objects)
    require_known(file, custom, unsafe=unsafe)
    model = _loaded(file, custom, unsafe=unsafe)
    return _with_shapes(model, source, input_shapes)


def _custom_objects(names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        module_name, colon, attribute = name.partition(":")
        if not (module_name and colon and attribute):
            raise ConfigError(f"custom object {name!r}: expected 'module:attribute', such as 'my_layers:Attention'")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # whatever the user's module does when it is imported
            raise ConfigError(
                f"custom object {name!r}: the module {module_name!r} cannot be imported "
                f"({type(error).__name__}: {error}); is its folder on PYTHONPATH?"
            ) from error
        try:
            found[attribute] = getattr(module, attribute)
        except AttributeError:
            raise ConfigError(f"custom object {name!r}: the module {module_name!r} has no {attribute!r}") from None
    return found


def _loaded(file: ModelFile, custom: Mapping[str, Any], *, unsafe: bool) -> Any:
    keras = load_keras()
    try:
        if file.legacy:
            from keras.src.legacy.saving import legacy_h5_format

            # The public function goes by the suffix, which some name .keras.
            return legacy_h5_format.load_model_from_hdf5(
                str(file.path), custom_objects=dict(custom), compile=False, safe_mode=not unsafe
            )
        return keras.saving.load_model(str(file.path), custom_objects=dict(custom), compile=False, safe_mode=not unsafe)
    except SplitfleetError:
        raise
    except Exception as error:  # Keras raises whatever the file provokes, MemoryError and RecursionError among it
        unknown = _unknown_object(error)
        if file.legacy and not file.keras_version.startswith("3"):
            from converters.old_keras import load_through_old_keras

            reason = f"it does not know {unknown}" if unknown else _reason(error)
            return load_through_old_keras(file, custom, reason, unsafe=unsafe)
        if unknown:
            raise UnsupportedModelError(unknown_objects(file.path, {unknown: ""})) from error
        writer = f" (written by Keras {file.keras_version})" if file.keras_version else ""
        raise ModelError(
            f"{file.path}{writer} cannot be loaded by Keras {keras.__version__}: {_reason(error)}"
        ) from error


def _unknown_object(error: BaseException) -> str:
    """The name of the class or function that Keras lacks, if that is what it says, else empty."""
    found = _LACKS.search(_innermost(error))
    return found.group(1) if found else ""


def _innermost(error: BaseException) -> str:
    """Keras wraps the reason into pages of configuration and puts it last."""
    return str(error).rpartition("Exception encountered:")[2].strip()


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in _innermost(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "…"


def _with_shapes(model: Any, source: Path, input_shapes: Mapping[str, Shape] | Shape | None) -> Any:
    """``model`` where its shapes are fixed and nothing is asked for, else its layers on inputs of such shapes."""
    keras = load_keras()
    where = f"{source}: model {getattr(model, 'name', model)!r}"
    if isinstance(model, keras.Sequential) and model._functional is None:
        if not isinstance(input_shapes, tuple):
            raise UnsupportedModelError(
                f"{where} does not tell its input shape; give it with --input-shape 96,96,3, say"
            )
        try:
            model.build((None, *input_shapes))
        except Exception as error:  # layers raise what they like
            raise UnsupportedModelError(
                f"{where} does not take the shape {list(input_shapes)}: {_reason(error)}"
            ) from error
    inputs, _ = graph_ends(model, where)
    names = end_names(getattr(model, "_inputs_struct", inputs), inputs)
    declared = {name: tuple(tensor.shape[1:]) for name, tensor in zip(names, inputs, strict=True)}
    shapes = declared | _asked_for(declared, input_shapes, where)
    free = next((name for name, shape in shapes.items() if None in shape), None)
    if free is not None:
        raise UnsupportedModelError(
            f"{where}: its input {free!r} has free dimensions, {_shown(shapes[free])}; fix them with --input-shape "
            f"{'' if len(names) == 1 else f'{free}='}{_example(shapes[free])}, say"
        )
    if shapes == declared and all(tensor.shape[0] is None for tensor in inputs):
        return model
    fixed = [
        keras.Input(shapes[name], dtype=tensor.dtype, name=tensor.name)
        for name, tensor in zip(names, inputs, strict=True)
    ]
    function = model._functional if isinstance(model, keras.Sequential) else model
    try:
        outputs = run_symbolically(function, fixed)
    except Exception as error:  # layers raise what they like
        asked = ", ".join(f"{name} {_shown(shape)}" for name, shape in shapes.items())
        raise UnsupportedModelError(f"{where} does not run on inputs of the shape {asked}: {_reason(error)}") from error
    return keras.Model(
        keras.tree.pack_sequence_as(function._inputs_struct, fixed),
        keras.tree.pack_sequence_as(function._outputs_struct, outputs),
        name=model.name,
    )


def _asked_for(
    declared: Mapping[str, tuple[int | None, ...]], asked: Mapping[str, Shape] | Shape | None, where: str
) -> dict[str, Shape]:
    if asked is None:
        return {}
    if isinstance(asked, tuple):
        if len(declared) > 1:
            raise ConfigError(f"{where} has {len(declared)} inputs: give a shape by name for {', '.join(declared)}")
        asked = {next(iter(declared)): asked}
    for name, shape in asked.items():
        if name not in declared:
            raise ConfigError(f"{where} has no input {name!r}; expected one of {', '.join(declared)}")
        own = declared[name]
        matches = len(shape) == len(own) and all(a in (None, b) for a, b in zip(own, shape, strict=True))
        if not matches or any(axis < 1 for axis in shape):
            raise ConfigError(f"{where}: its input {name!r} has shape {_shown(own)}, got {_shown(shape)}")
    return dict(asked)


def _shown(shape: Sequence[int | None]) -> str:
    return "(" + ", ".join("?" if axis is None else str(axis) for axis in shape) + ")"


def _example(shape: Sequence[int | None]) -> str:
    return ",".join("96" if axis is None else str(axis) for axis in shape)
