"""The two halves of a model as functions: the head computes what crosses the cut, the tail goes on from there.

A half calls the model's own layers in inference mode (no dropout, batch normalization with its moving statistics), so
head and tail together are exactly the whole. Making one builds no Keras model and leaves no trace in the layers: a
model may be split at as many cut points as wanted. :mod:`converters.head` and :mod:`converters.tail` make files of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from converters.cuts import crossing_positions, require_legal
from converters.flatten import FlatModel, Step
from converters.graph import TensorInfo
from converters.keras_backend import load_keras
from converters.substitutes import exact_sum


@dataclass(frozen=True, kw_only=True, eq=False)
class Half:
    """Some consecutive steps of a model, from the tensors ``inputs`` to the tensors ``outputs`` (positions)."""

    flat: FlatModel
    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __call__(self, values: Sequence[Any], call: Callable[[Any, Any, Any], Any] | None = None) -> list[Any]:
        """Run on TensorFlow tensors or numpy arrays with a batch axis, parallel to ``inputs``.

        ``call(layer, args, kwargs)`` may run a layer in another way than by calling it.
        """
        keras = load_keras()
        known = dict(zip(self.inputs, values, strict=True))
        with exact_sum():
            for step in self.steps:
                arguments = {symbol: known[position] for symbol, position in step.bound}
                args, kwargs = step.arguments.fill_in(arguments)
                if isinstance(step.layer, keras.Layer):
                    kwargs["training"] = False
                made = step.layer(*args, **kwargs) if call is None else call(step.layer, args, kwargs)
                known.update(zip(step.outputs, keras.tree.flatten(made), strict=True))
        return [known[position] for position in self.outputs]

    def tensors(self, positions: Sequence[int]) -> tuple[TensorInfo, ...]:
        """What is known of the tensors at ``positions``."""
        return tuple(self.flat.graph.tensors[position] for position in positions)


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """A model cut after operation ``k`` of n. ``head`` is absent at k = 0, ``tail`` at k = n.

    The head's outputs are the ``crossing`` tensors, then those outputs of the model (``head_outputs``, places in the
    model's order) that lie inside it. The tail takes the crossing tensors and makes the outputs ``tail_outputs``.
    """

    k: int
    head: Half | None
    tail: Half | None
    crossing: tuple[int, ...]
    head_outputs: tuple[int, ...]
    tail_outputs: tuple[int, ...]


def split(flat: FlatModel, k: int) -> Split:
    """``flat`` cut after operation ``k``; k = 0 makes all of it the tail, k = n all of it the head.

    Raises :class:`IllegalCutError` when ``k`` is neither of these nor a legal cut point.
    """
    graph = flat.graph
    if k:
        require_legal(graph, k)
    born = graph.born()
    crossing = crossing_positions(graph, k) if k else graph.inputs
    head_outputs = tuple(place for place, position in enumerate(graph.outputs) if born[position] <= k)
    tail_outputs = tuple(place for place, position in enumerate(graph.outputs) if born[position] > k)
    head = Half(
        flat=flat,
        steps=flat.steps[:k],
        inputs=graph.inputs,
        outputs=crossing + tuple(graph.outputs[place] for place in head_outputs),
    )
    tail = Half(
        flat=flat,
        steps=flat.steps[k:],
        inputs=crossing,
        outputs=tuple(graph.outputs[place] for place in tail_outputs),
    )
    return Split(
        k=k,
        head=head if k else None,
        tail=tail if k < graph.n else None,
        crossing=crossing,
        head_outputs=head_outputs,
        tail_outputs=tail_outputs,
    )
