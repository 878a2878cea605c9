"""Recurrent layers in a head: unrolled, one copy of the cell for each step, since TensorFlow Lite has no int8 loop.

Within one layer there is no cut point: its state between two steps is no tensor of the model's graph. A cut lies before
or after the whole layer. Above :data:`MAX_STEPS` the unrolled graph would be too large for a device (and would take the
converter minutes), so such a layer belongs into the tail, where it stays a loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from converters.keras_backend import load_keras

if TYPE_CHECKING:
    from converters.outline import Outline

MAX_STEPS = 256


RECURRENT_KINDS = frozenset(
    {"RNN", "SimpleRNN", "LSTM", "GRU", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D", "Bidirectional"}
)


def why_no_cut_inside(outline: Outline, name: str) -> str:
    """Why there is no cut point ``name``, if it is within a recurrent layer (as its cell is); else empty."""
    for operation in outline.operations:
        if operation.kind in RECURRENT_KINDS and name.startswith(f"{operation.name}/"):
            return (
                f"{name!r} lies inside the recurrent layer {operation.name!r} ({operation.kind}), whose state from one "
                "step to the next is no tensor of the model: cut before or after the whole layer"
            )
    return ""


def recurrent_layers(layer: Any) -> list[Any]:
    """``layer`` and those that it wraps (as Bidirectional does), as far as they run over time steps."""
    keras = load_keras()
    if not isinstance(layer, keras.Layer):
        return []
    return [inner for inner in layer._flatten_layers() if isinstance(inner, keras.layers.RNN)]


def obstacle(layer: Any, shapes: Sequence[tuple[int, ...]]) -> str:
    """Why ``layer``, called on tensors of ``shapes`` (no batch axis), cannot be in a head; empty where it can."""
    if not shapes or not shapes[0] or not recurrent_layers(layer):
        return ""
    steps = shapes[0][0]
    if steps <= MAX_STEPS:
        return ""
    return (
        f"({type(layer).__name__}) runs over {steps} steps; a device runs recurrent layers unrolled, over at most "
        f"{MAX_STEPS} steps: cut before it"
    )


@contextmanager
def unrolled(layers: Iterable[Any]) -> Iterator[None]:
    """Within it all recurrent layers among ``layers`` run unrolled."""
    changed = [(inner, inner.unroll) for layer in layers for inner in recurrent_layers(layer)]
    for inner, _ in changed:
        inner.unroll = True
    try:
        yield
    finally:
        for inner, before in changed:
            inner.unroll = before
