"""Layers of the old Keras as they are, each within a Keras 3 layer: it has its weights and calls it."""

from __future__ import annotations

from typing import Any

from converters.keras_backend import load_keras, valid_name


def carried(old: Any) -> Any:
    """A Keras 3 layer that computes what the built layer ``old`` computes.

    Its class is called as that of ``old``, or, for a plain TensorFlow operation, as that.
    """
    base: Any = load_keras().layers.Layer

    def begin(layer: Any) -> None:
        base.__init__(layer, name=valid_name(old.name))
        # Behind a function, since Keras looks into attributes for what it knows.
        layer._old = lambda: old
        layer.built = True

    operation = str(getattr(old, "symbol", "") or "").rpartition(".")[2]
    kind = operation.title().replace("_", "") or type(old).__name__
    body = {
        "__init__": begin,
        "call": lambda layer, *args, **kwargs: layer._old()(*args, **kwargs),
        "weights": property(lambda layer: list(layer._old().weights)),
        "get_config": lambda layer: layer._old().get_config(),
    }
    return type(kind, (base,), body)()


def is_carried(layer: Any) -> bool:
    """Whether ``layer`` was made by :func:`carried`."""
    return hasattr(layer, "_old")
