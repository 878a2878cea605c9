"""A user's model from a file: a ``.keras`` file, or a legacy ``.h5``/``.hdf5`` one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from converters.keras_backend import load_keras
from edge_sdk.errors import ModelError

Shape = tuple[int, ...]


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
    keras = load_keras()
    del custom_objects, input_shapes
    try:
        return keras.saving.load_model(str(source), compile=False, safe_mode=not unsafe)
    except Exception as error:  # Keras raises whatever the file provokes
        raise ModelError(f"{source}: cannot be loaded: {error}") from error
