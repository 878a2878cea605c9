"""The part of Keras's own graph that splitting needs: which models have one, its ends, and its nodes in order.

A *node* is one call of a layer or operation, with the symbolic tensors that it took and made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from converters.keras_backend import load_keras
from edge_sdk.errors import UnsupportedModelError


def is_graph_model(operation: Any) -> bool:
    """Whether this is a model whose call is to run its graph: a Functional or Sequential that overrides nothing."""
    keras = load_keras()
    known = isinstance(operation, (keras.Function, keras.Sequential))
    return known and type(operation).call.__module__.startswith("keras.")


def graph_ends(model: Any, where: str) -> tuple[list[Any], list[Any]]:
    """The symbolic inputs and outputs of a model with a graph; :class:`UnsupportedModelError` where it has none."""
    keras = load_keras()
    if not is_graph_model(model):
        kind = type(model).__name__
        if not isinstance(model, keras.Model):
            raise UnsupportedModelError(f"{where}: expected a keras.Model, got {kind}")
        raise UnsupportedModelError(
            f"{where} is a subclassed model ({kind}) whose call() is plain Python, so it has no graph to cut; "
            "build it as a Functional or Sequential model"
        )
    try:
        inputs, outputs = list(model.inputs), list(model.outputs)
    except AttributeError:
        raise UnsupportedModelError(
            f"{where} is a Sequential model that was never built; begin it with keras.Input(shape)"
        ) from None
    return inputs, outputs


def end_names(structure: Any, tensors: Sequence[Any]) -> tuple[str, ...]:
    """Names of a model's inputs or outputs: the keys of a flat dict, else the operations that make them."""
    if isinstance(structure, dict) and len(structure) == len(tensors):
        keys = {id(tensor): str(key) for key, tensor in structure.items()}
        if all(id(tensor) in keys for tensor in tensors):
            return tuple(keys[id(tensor)] for tensor in tensors)
    names = [tensor._keras_history.operation.name for tensor in tensors]
    if len(set(names)) != len(names):
        names = [f"{name}_{number}" for number, name in enumerate(names)]
    return tuple(names)


def ordered_nodes(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The nodes between ``inputs`` and ``outputs`` in topological order.

    A node's depth is its longest way to an output. The deepest come first, as Keras has it, and among equals the one
    that is found first on the way from the outputs back.
    """
    found = _found_backwards(inputs, outputs)
    places = {id(node): place for place, node in enumerate(found)}
    depths = [0] * len(found)
    for place in range(len(found) - 1, -1, -1):
        for parent in found[place].parent_nodes:
            if (above := places.get(id(parent))) is not None:
                depths[above] = max(depths[above], depths[place] + 1)
    return [found[place] for place in sorted(range(len(found)), key=lambda place: (-depths[place], place))]


def _found_backwards(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The nodes that ``outputs`` need, each after those it needs itself, found depth first."""
    ends = {id(tensor) for tensor in inputs}
    found: list[Any] = []
    seen: set[int] = set()

    def unseen(tensors: Iterable[Any]) -> Iterator[Any]:
        for tensor in tensors:
            if id(tensor) in ends:
                continue
            node = _node_of(tensor)
            if id(node) not in seen:
                seen.add(id(node))
                yield node

    # An explicit stack: models may be deeper than Python's recursion limit.
    stack: list[tuple[Any, Iterator[Any]]] = []
    for root in unseen(outputs):
        stack.append((root, unseen(root.input_tensors)))
        while stack:
            node, needed = stack[-1]
            child = next(needed, None)
            if child is None:
                found.append(node)
                stack.pop()
            else:
                stack.append((child, unseen(child.input_tensors)))
    return found


def _node_of(tensor: Any) -> Any:
    history = tensor._keras_history
    return history.operation._inbound_nodes[history.node_index]
