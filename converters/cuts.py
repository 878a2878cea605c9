"""The cut points of a graph: which tensors cross each boundary, and whether a model may be cut there.

A cut point k lies after operation k; 1 to n - 1 are all there are. Running a model as a whole on one side (k = 0 and
k = n) is not a cut. Which cut point a device gets is :mod:`converters.memory`'s matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from converters.graph import Graph, TensorInfo
from edge_sdk.errors import IllegalCutError


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


def cut_points(graph: Graph) -> tuple[CutPoint, ...]:
    """All cut points of ``graph``, k = 1 to n - 1, legal or not."""
    born, last = graph.born(), graph.last_used()
    order = sorted(range(len(graph.tensors)), key=lambda position: (born[position], position))
    cuts = []
    for k in range(1, graph.n):
        crossing = tuple(position for position in order if born[position] <= k < last[position])
        reason = _reason(graph, k, crossing)
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
    """Raise :class:`IllegalCutError` unless ``k`` is a legal cut point of ``graph``."""
    if not 1 <= k < graph.n:
        raise IllegalCutError(
            f"model {graph.name!r} has {graph.n} operations: its cut points are 1 to {graph.n - 1}, got {k}"
        )
    reason = _reason(graph, k, crossing_positions(graph, k))
    if reason:
        raise IllegalCutError(
            f"model {graph.name!r} cannot be cut after operation {k} ({graph.operations[k - 1].name!r}): {reason}"
        )


def _reason(graph: Graph, k: int, crossing: tuple[int, ...]) -> str:
    """Why a cut is not legal; empty where it is."""
    if not crossing:
        return "no tensor crosses: the operations after it take nothing from those before it"
    for position in crossing:
        tensor = graph.tensors[position]
        if position in graph.inputs:
            user = next(op.name for op in graph.operations[k:] if position in op.inputs)
            return f"it would send the raw input {tensor.name!r} to the server, which {user!r} takes after the cut"
        if not tensor.batched:
            return f"the tensor {tensor.name!r} that crosses has no batch axis"
    return ""
