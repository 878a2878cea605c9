"""The graph of a model for one call of it, where that is not the graph it was built with.

Keras records a nested model as it was built, for its own input shapes and without masks; when it runs, shapes and masks
are those of the call. Here it is run once more on the symbolic tensors of that call, which records what happens then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from converters.keras_backend import load_keras


@contextmanager
def retraced(model: Any, inputs: Sequence[Any], masks: Sequence[Any]) -> Iterator[list[Any]]:
    """The flat outputs of ``model`` (Functional or Sequential) on the symbolic tensors ``inputs``, in its order.

    ``masks`` are parallel to ``inputs``, ``None`` where an input keeps the mask that it has. The outputs are reached
    from inputs and masks by nodes that the model's layers have within this context only.
    """
    keras = load_keras()
    function = model._functional if isinstance(model, keras.Sequential) else model
    before = [(operation, len(operation._inbound_nodes)) for operation in function.operations]
    own = [mask_of(tensor) for tensor in inputs]
    try:
        _attach(inputs, [mine if mask is None else mask for mine, mask in zip(own, masks, strict=True)])
        taken = [_cast(outer, inner) for outer, inner in zip(inputs, function.inputs, strict=True)]
        yield run_symbolically(function, taken)
    finally:
        _attach(inputs, own)
        for operation, count in before:
            del operation._inbound_nodes[count:]


def run_symbolically(function: Any, inputs: Sequence[Any]) -> list[Any]:
    """The flat outputs of a Functional model, its operations called anew on the symbolic tensors ``inputs``."""
    outputs: list[Any] = load_keras().tree.flatten(function._run_through_graph(inputs, operation_fn=_with_masks))
    return outputs


def is_called_otherwise(inputs: Sequence[Any], masks: Sequence[Any], inner_inputs: Sequence[Any]) -> bool:
    """Whether a nested model, called on ``inputs``, runs otherwise than its own graph on ``inner_inputs`` says."""
    return any(mask is not None for mask in (*masks, *map(mask_of, inputs))) or any(
        outer.shape[1:] != inner.shape[1:] or outer.dtype != inner.dtype
        for outer, inner in zip(inputs, inner_inputs, strict=True)
    )


def hides_masks(nodes: Iterable[Any]) -> bool:
    """Whether one of ``nodes`` runs with a mask that it was recorded without.

    Keras fills in the mask of a layer's input, but records that only where no other keyword was given.
    """
    return any(_unmentioned_masks(node.operation, node.arguments.args, node.arguments.kwargs) for node in nodes)


def mask_of(tensor: Any) -> Any:
    """The symbolic mask that Keras attached to a symbolic tensor, or ``None``."""
    return getattr(tensor, "_keras_mask", None)


def _attach(tensors: Sequence[Any], masks: Sequence[Any]) -> None:
    for tensor, mask in zip(tensors, masks, strict=True):
        tensor._keras_mask = mask


def _with_masks(operation: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return operation(*args, **kwargs | _unmentioned_masks(operation, args, kwargs))

    return call


def _unmentioned_masks(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The masks that Keras fills in when a layer is called with these arguments, by keyword."""
    keras = load_keras()
    if not isinstance(operation, keras.Layer):
        return {}
    signature = inspect.signature(operation.call)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return {}
    taken = {
        name: value
        for name, value in given.items()
        if not name.endswith("mask") and any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten(value))
    }
    names = {"mask": next(iter(taken))} if len(taken) == 1 else {f"{name}_mask": name for name in taken}
    masks = {
        keyword: keras.tree.map_structure(mask_of, taken[name])
        for keyword, name in names.items()
        if keyword in signature.parameters and given.get(keyword) is None
    }
    return {name: mask for name, mask in masks.items() if any(part is not None for part in keras.tree.flatten(mask))}


def _cast(outer: Any, inner: Any) -> Any:
    if outer.dtype == inner.dtype:
        return outer
    made = load_keras().ops.cast(outer, inner.dtype)
    if mask_of(outer) is not None:
        made._keras_mask = mask_of(outer)
    return made
