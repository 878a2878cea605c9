"""A Keras model, flattened: its plain graph, and for each operation the Keras call to repeat.

Keras keeps a graph of *nodes*, one for each call of a layer or operation. A model that is used as a layer is one node;
here its own nodes stand in its place, so that it can be cut inside. Nothing is copied and nothing is added to the
model: the steps call the very layers of the model, with their weights. Only a layer whose name TensorFlow does not take
is called otherwise from then on.

A nested model stands as a whole where it is called; within a model the order is Keras's own
(:mod:`converters.keras_graph`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from converters.float32 import in_float32
from converters.graph import Graph, Operation, TensorInfo
from converters.keras_backend import load_keras, valid_name
from converters.keras_graph import end_names, graph_ends, is_graph_model, ordered_nodes
from converters.recurrent import obstacle
from converters.retrace import hides_masks, is_called_otherwise, retraced
from edge_sdk.errors import UnsupportedModelError
from edge_sdk.wire import DTYPES, MAX_RANK


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """How to run one operation: ``call(args, kwargs)`` on the arguments that Keras recorded.

    ``bound`` pairs each symbolic tensor of the arguments with the tensor position that takes its place.
    """

    layer: Any
    arguments: Any
    bound: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatModel:
    """``steps`` are parallel to ``graph.operations``. ``model`` is what was flattened; it owns the layers."""

    graph: Graph
    steps: tuple[Step, ...]
    model: Any


def flatten(model: Any) -> FlatModel:
    """The flat form of a built Functional or Sequential ``keras.Model``.

    Raises :class:`UnsupportedModelError` for a model without a graph, and for one that holds what cannot be split; it
    names the culprit.
    """
    graph_ends(model, f"model {getattr(model, 'name', model)!r}")
    model = in_float32(model)
    inputs, outputs = graph_ends(model, f"model {model.name!r}")
    builder = _Builder(name=model.name, batches={tensor.shape[0] for tensor in inputs if tensor.shape})
    names = end_names(getattr(model, "_inputs_struct", inputs), inputs)
    output_names = end_names(getattr(model, "_outputs_struct", outputs), outputs)
    scope = {id(tensor): builder.add_input(tensor, name) for tensor, name in zip(inputs, names, strict=True)}
    if hides_masks(ordered_nodes(inputs, outputs)):
        with retraced(model, inputs, [None] * len(inputs)) as outputs:
            builder.walk(inputs, outputs, scope, prefix="")
    else:
        builder.walk(inputs, outputs, scope, prefix="")
    positions = tuple(scope[id(tensor)] for tensor in outputs)
    for position, name in zip(positions, output_names, strict=True):
        if position < len(inputs):
            raise UnsupportedModelError(f"model {model.name!r}: its output {name!r} is its raw input, unchanged")
    graph = Graph(
        name=model.name,
        tensors=tuple(builder.tensors),
        inputs=tuple(range(len(inputs))),
        operations=tuple(builder.operations),
        outputs=positions,
        output_names=output_names,
    )
    if not graph.n:
        raise UnsupportedModelError(f"model {model.name!r} has no operations")
    for step in builder.steps:
        _name_for_tensorflow(step.layer)
    return FlatModel(graph=graph, steps=tuple(builder.steps), model=model)


class _Builder:
    """Collects tensors, operations and steps while a model and those nested in it are walked."""

    def __init__(self, *, name: str, batches: set[int | None]) -> None:
        self.name = name
        self.tensors: list[TensorInfo] = []
        self.operations: list[Operation] = []
        self.steps: list[Step] = []
        self._batches = batches
        self._layers: dict[int, int] = {}
        self._calls: dict[str, int] = {}

    def add_input(self, tensor: Any, name: str) -> int:
        # Of inputs only: Keras marks results as sparse that are not, such as that of ``x * 2.0``.
        if tensor.sparse or tensor.ragged:
            raise UnsupportedModelError(f"model {self.name!r}: its input {name!r} is sparse or ragged; expected dense")
        if tensor.dtype not in DTYPES:
            raise UnsupportedModelError(
                f"model {self.name!r}: its input {name!r} has dtype {tensor.dtype}; expected one of {', '.join(DTYPES)}"
            )
        return self._add_tensor(tensor, name, name)

    def walk(self, inputs: Sequence[Any], outputs: Sequence[Any], scope: dict[int, int], prefix: str) -> None:
        """Add the operations between ``inputs`` and ``outputs``; ``scope`` maps symbolic tensors to positions."""
        for node in ordered_nodes(inputs, outputs):
            operation = node.operation
            where = f"model {self.name!r}: operation {prefix + operation.name!r}"
            if is_graph_model(operation):
                self._walk_nested(node, scope, prefix + operation.name + "/", where)
            else:
                bound = tuple((id(tensor), scope[id(tensor)]) for tensor in node.input_tensors)
                self._add_step(operation, node.arguments, bound, node.outputs, scope, prefix + operation.name, where)

    def _walk_nested(self, node: Any, scope: dict[int, int], prefix: str, where: str) -> None:
        inner_inputs, inner_outputs = graph_ends(node.operation, where)
        taken = _nested_arguments(node, inner_inputs, where)
        masks = _nested_masks(node, len(taken))
        if is_called_otherwise(taken, masks, inner_inputs) or hides_masks(ordered_nodes(inner_inputs, inner_outputs)):
            with retraced(node.operation, taken, masks) as outputs:
                self.walk(node.input_tensors, outputs, scope, prefix)
            inner_outputs, inner = outputs, scope
        else:
            inner = {id(tensor): scope[id(outer)] for outer, tensor in zip(taken, inner_inputs, strict=True)}
            self.walk(inner_inputs, inner_outputs, inner, prefix)
        for outer, tensor in zip(node.outputs, inner_outputs, strict=True):
            scope[id(outer)] = inner[id(tensor)]

    def _add_step(
        self,
        layer: Any,
        arguments: Any,
        bound: tuple[tuple[int, int], ...],
        outputs: Sequence[Any],
        scope: dict[int, int],
        name: str,
        where: str,
    ) -> None:
        calls = self._calls[name] = self._calls.get(name, 0) + 1
        if calls > 1:
            name = f"{name}#{calls}"
        made = []
        for number, tensor in enumerate(outputs):
            label = name if len(outputs) == 1 else f"{name}:{number}"
            scope[id(tensor)] = self._add_tensor(tensor, label, name, where)
            made.append(scope[id(tensor)])
        shapes = [self.tensors[position].shape for _, position in bound]
        self.operations.append(
            Operation(
                name=name,
                kind=type(layer).__name__.removeprefix("_"),
                layer=self._layers.setdefault(id(layer), len(self._layers)),
                parameters=sum(_size(variable) for variable in getattr(layer, "weights", ())),
                inputs=tuple(position for _, position in bound),
                outputs=tuple(made),
                obstacle=obstacle(layer, shapes),
            )
        )
        self.steps.append(Step(layer=layer, arguments=arguments, bound=bound, outputs=tuple(made)))

    def _add_tensor(self, tensor: Any, name: str, source: str, where: str = "") -> int:
        where = where or f"model {self.name!r}: input {name!r}"
        batched = bool(tensor.shape) and tensor.shape[0] in self._batches
        shape = tuple(tensor.shape[1:] if batched else tensor.shape)
        if any(axis is None for axis in shape):
            raise UnsupportedModelError(
                f"{where}: {name!r} has free dimensions: {tuple(tensor.shape)}; only the batch axis may be free, "
                "so give the model a fixed input shape"
            )
        if tensor.dtype not in DTYPES and tensor.dtype != "bfloat16":
            raise UnsupportedModelError(
                f"{where}: {name!r} has dtype {tensor.dtype}; expected bfloat16 or one of {', '.join(DTYPES)}"
            )
        if len(shape) >= MAX_RANK:
            raise UnsupportedModelError(f"{where}: {name!r} has rank {len(shape) + 1}; at most {MAX_RANK} is supported")
        self.tensors.append(TensorInfo(name=name, source=source, shape=shape, dtype=tensor.dtype, batched=batched))
        return len(self.tensors) - 1


def _nested_arguments(node: Any, inner_inputs: Sequence[Any], where: str) -> list[Any]:
    """The symbolic tensors that a nested model is called on, in the order of its inputs."""
    keras = load_keras()
    args, kwargs = node.arguments.args, dict(node.arguments.kwargs)
    value = args[0] if args else kwargs.pop("inputs", None)
    if isinstance(value, dict) and not isinstance(getattr(node.operation, "_inputs_struct", None), dict):
        value = [value.get(tensor.name) for tensor in inner_inputs]
    flat: list[Any] = keras.tree.flatten(value)
    if len(flat) != len(inner_inputs) or not all(isinstance(tensor, keras.KerasTensor) for tensor in flat):
        raise UnsupportedModelError(
            f"{where}: the nested model takes {len(inner_inputs)} tensors of the outer one, got {value!r}"
        )
    return flat


def _nested_masks(node: Any, count: int) -> list[Any]:
    """The masks that a nested model is called with, for each of ``count`` inputs."""
    masks: list[Any] = load_keras().tree.flatten(node.arguments.kwargs.get("mask"))
    return masks if len(masks) == count else [None] * count


def _name_for_tensorflow(operation: Any) -> None:
    """Within a TensorFlow graph a layer opens a scope of its name, and not every name of a layer may be one."""
    layers = operation._flatten_layers() if isinstance(operation, load_keras().Layer) else [operation]
    for layer in layers:
        if layer.name != valid_name(layer.name):
            layer.name = valid_name(layer.name)


def _size(variable: Any) -> int:
    size = 1
    for axis in variable.shape:
        size *= int(axis)
    return size
