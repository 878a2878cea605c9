"""A model as a plain graph: operations in topological order, and the tensors between them.

Nothing here knows Keras: cut points, memory and shapes are worked out on these immutable values, as often as wanted.
:mod:`converters.flatten` makes a graph from a Keras model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edge_sdk.errors import UnsupportedModelError
from edge_sdk.wire import DTYPES


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor. ``shape`` has no batch axis; ``source`` is the operation, or the model input, that makes it.

    ``batched`` is false for a tensor that has no batch axis at all, such as a constant made inside the model.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    batched: bool = True

    @property
    def int8_bytes(self) -> int:
        """Bytes for one sample in an int8 model: a floating-point value takes one byte, any other its own size."""
        return self.bytes_with_floats_of(1)

    def bytes_with_floats_of(self, float_bytes: int) -> int:
        """Bytes for one sample where a floating-point value takes so many of them."""
        return math.prod(self.shape) * (float_bytes if self.is_float else DTYPES[self.dtype].itemsize)

    @property
    def is_float(self) -> bool:
        return self.dtype in ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One call of a layer or of an operation without a layer. ``inputs`` and ``outputs`` are tensor positions.

    A layer called twice is two operations with the same ``layer`` number; ``parameters`` are those of its layer.
    ``obstacle`` says why a device cannot run it, and is empty where it can: what has one belongs into the tail.
    """

    name: str
    kind: str
    layer: int
    parameters: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    obstacle: str = ""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A whole model. The model's inputs are tensors, not operations.

    ``inputs`` and ``outputs`` are tensor positions in the model's own order; ``output_names`` is parallel to
    ``outputs``. Raises :class:`UnsupportedModelError` when the operations are not in topological order.
    """

    name: str
    tensors: tuple[TensorInfo, ...]
    inputs: tuple[int, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[int, ...]
    output_names: tuple[str, ...]

    def __post_init__(self) -> None:
        known = set(self.inputs)
        for operation in self.operations:
            missing = [self.tensors[position].name for position in operation.inputs if position not in known]
            if missing:
                raise UnsupportedModelError(
                    f"model {self.name!r}: operation {operation.name!r} needs {missing[0]!r}, which no operation "
                    "before it and no input of the model provides"
                )
            known.update(operation.outputs)
        if not set(self.outputs) <= known:
            raise UnsupportedModelError(f"model {self.name!r}: an output is made by no operation of the model")

    @property
    def n(self) -> int:
        """How many operations there are."""
        return len(self.operations)

    def obstacle(self, k: int) -> str:
        """Why no device can run the first ``k`` operations; empty where one can."""
        return next((f"{op.name!r} {op.obstacle}" for op in self.operations[:k] if op.obstacle), "")

    def born(self) -> tuple[int, ...]:
        """For each tensor the k of the operation that makes it, 1 to n; 0 for an input of the model."""
        born = [0] * len(self.tensors)
        for k, operation in enumerate(self.operations, start=1):
            for position in operation.outputs:
                born[position] = k
        return tuple(born)

    def last_used(self) -> tuple[int, ...]:
        """For each tensor the k of the last operation that takes it, 1 to n; 0 where none does."""
        last = [0] * len(self.tensors)
        for k, operation in enumerate(self.operations, start=1):
            for position in operation.inputs:
                last[position] = k
        return tuple(last)
