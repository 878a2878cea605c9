"""The cut points of a graph: which tensors cross each boundary, and whether a model may be cut there.

A cut point k lies after operation k; 1 to n - 1 are all there are. Running a model as a whole on one side (k = 0 and
k = n) is not a cut. Which cut point a device gets is :mod:`converters.memory`'s matter.

No raw data may cross. *Raw* is an input of the model, and whatever an operation makes of a raw tensor without weights
of its own: rescaled, resized, cropped, padded, reshaped, pooled, added to a constant, or concatenated with a tensor
that is not raw, the input is still there. Weights that only shift and scale values (normalizations) leave it raw too.
The first operation with any other weights ends it, and so does a comparison: a mask tells where something was, not
what. So a device always computes at least one layer that was learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from converters.graph import Graph, TensorInfo
from edge_sdk.errors import IllegalCutError

# Layers whose weights shift and scale values, or whole samples, one by one: what they make shows what they took.
SCALING_KINDS = frozenset(
    {"Normalization", "BatchNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization", "PReLU"}
)


@dataclass(frozen=True, kw_only=True)
class CutPoint:
    """The boundary after operation ``k``, which is called ``name``.

    ``crossing`` are the tensors that operations after the cut take from before it, in the order they are made.
    ``reason`` says why the cut is not legal, and is empty where it is. ``feature_bytes`` is their size for one sample
    as int8.
    """

    k: int
    name: str
    legal: bool
    reason: str
    crossing: tuple[TensorInfo, ...]
    feature_bytes: int


def crossing_positions(graph: Graph, k: int) -> tuple[int, ...]:
    """The tensors that cross the cut after operation ``k``, by position, in the order they are made.

    An output of the model that no later operation takes does not cross: its side returns it.
    """
    born, last = graph.born(), graph.last_used()
    crossing = [position for position in range(len(graph.tensors)) if born[position] <= k < last[position]]
    return tuple(sorted(crossing, key=lambda position: (born[position], position)))


def raw_tensors(graph: Graph) -> dict[int, int]:
    """The tensors of ``graph`` that are still raw data, by position, each with the model's input that it shows."""
    raw = {position: position for position in graph.inputs}
    for operation in graph.operations:
        if operation.parameters and operation.kind not in SCALING_KINDS:
            continue
        shown = next((raw[position] for position in operation.inputs if position in raw), None)
        if shown is not None:
            raw |= {made: shown for made in operation.outputs if graph.tensors[made].dtype != "bool"}
    return raw


def cut_points(graph: Graph) -> tuple[CutPoint, ...]:
    """All cut points of ``graph``, k = 1 to n - 1, legal or not."""
    born, last = graph.born(), graph.last_used()
    raw = raw_tensors(graph)
    order = sorted(range(len(graph.tensors)), key=lambda position: (born[position], position))
    cuts = []
    for k in range(1, graph.n):
        crossing = tuple(position for position in order if born[position] <= k < last[position])
        reason = _reason(graph, k, crossing, raw)
        tensors = tuple(graph.tensors[position] for position in crossing)
        cuts.append(
            CutPoint(
                k=k,
                name=graph.operations[k - 1].name,
                legal=not reason,
                reason=reason,
                crossing=tensors,
                feature_bytes=sum(tensor.int8_bytes for tensor in tensors),
            )
        )
    return tuple(cuts)


def require_legal(graph: Graph, k: int) -> None:
    """Raise :class:`IllegalCutError` unless ``k`` is a legal cut point of ``graph``, or n and a device can run all."""
    if k == graph.n and (obstacle := graph.obstacle(k)):
        raise IllegalCutError(f"model {graph.name!r} cannot run on a device as a whole: {obstacle}")
    if not 1 <= k <= graph.n:
        raise IllegalCutError(
            f"model {graph.name!r} has {graph.n} operations: its cut points are 1 to {graph.n - 1}, got {k}"
        )
    if k == graph.n:
        return
    reason = _reason(graph, k, crossing_positions(graph, k), raw_tensors(graph))
    if reason:
        raise IllegalCutError(
            f"model {graph.name!r} cannot be cut after operation {k} ({graph.operations[k - 1].name!r}): {reason}"
        )


def _reason(graph: Graph, k: int, crossing: tuple[int, ...], raw: Mapping[int, int]) -> str:
    """Why a cut is not legal; empty where it is."""
    if obstacle := graph.obstacle(k):
        return f"the head would hold what belongs into the tail: {obstacle}"
    if not crossing:
        return "no tensor crosses: the operations after it take nothing from those before it"
    for position in crossing:
        tensor = graph.tensors[position]
        if position in raw:
            user = next(op.name for op in graph.operations[k:] if position in op.inputs)
            shown = graph.tensors[raw[position]].name
            if position in graph.inputs:
                return f"it would send the raw input {shown!r} to the server, which {user!r} takes after the cut"
            return (
                f"it would send the raw input {shown!r} to the server, only preprocessed: {tensor.name!r}, which "
                f"{user!r} takes after the cut, is made of it without anything learned"
            )
        if not tensor.batched:
            return f"the tensor {tensor.name!r} that crosses has no batch axis"
    return ""
