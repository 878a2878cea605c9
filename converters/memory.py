"""The classic memory rule, ``cumulative``: layer sizes are summed until they exceed the budget.

size(layer) = parameters × bytes at the head's precision + output bytes at batch 1 at that precision. A layer that is
called several times counts once, where it is called first. The rule knows nothing of what a runtime really needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.graph import Graph
from edge_sdk.errors import InvalidInputError
from edge_sdk.manifest import Precision

if TYPE_CHECKING:
    from converters.outline import Outline

INT8_BYTES, FLOAT32_BYTES = 1, 4
PARAMETER_BYTES: dict[Precision, int] = {"int8": 1, "int8-weights": 1, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class OperationMemory:
    """Operation ``k``: its own size by the rule, and the sum of the sizes up to and with it, in a head.

    ``parameters`` and ``size_bytes`` are 0 for a layer that was called before.
    """

    k: int
    name: str
    kind: str
    parameters: int
    output_bytes: int
    size_bytes: int
    cumulative_bytes: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where the rule cuts. ``k`` is ``None`` when nothing of the model fits before a legal cut, and n when all of it
    does; ``cumulative_bytes`` is the size of what then runs on the device.
    """

    k: int | None
    cumulative_bytes: int


def operation_memory(graph: Graph, precision: Precision = "int8") -> tuple[OperationMemory, ...]:
    """The rule's sizes of all operations of ``graph``, for a head of that precision."""
    float_bytes = INT8_BYTES if precision == "int8" else FLOAT32_BYTES
    table: list[OperationMemory] = []
    seen: set[int] = set()
    total = 0
    for k, operation in enumerate(graph.operations, start=1):
        first = operation.layer not in seen
        seen.add(operation.layer)
        parameters = operation.parameters if first else 0
        output_bytes = sum(graph.tensors[position].bytes_with_floats_of(float_bytes) for position in operation.outputs)
        size = parameters * PARAMETER_BYTES[precision] + output_bytes if first else 0
        total += size
        table.append(
            OperationMemory(
                k=k,
                name=operation.name,
                kind=operation.kind,
                parameters=parameters,
                output_bytes=output_bytes,
                size_bytes=size,
                cumulative_bytes=total,
            )
        )
    return tuple(table)


def choose_cumulative(outline: Outline, budget_bytes: int, precision: Precision = "int8") -> Choice:
    """Where the rule cuts this model for a memory budget, its head being of that precision.

    Raises :class:`InvalidInputError` for a negative budget.
    """
    check_budget(budget_bytes)
    cumulative = outline.cumulative_bytes[precision]
    legal = {cut.k for cut in outline.cuts if cut.legal} | (set() if outline.edge_only_reason else {outline.n})
    k = cumulative_cut(cumulative, legal, budget_bytes)
    return Choice(k=k, cumulative_bytes=cumulative[k - 1] if k else 0)


def check_budget(budget_bytes: int) -> None:
    """Raise :class:`InvalidInputError` for a negative budget."""
    if budget_bytes < 0:
        raise InvalidInputError(f"a memory budget is a number of bytes, 0 or more; got {budget_bytes}")


def cumulative_cut(cumulative_bytes: Sequence[int], legal: Collection[int], budget_bytes: int) -> int | None:
    """The rule itself, on sums that grow: the cut lies before the first layer whose sum exceeds the budget, moved back
    to the nearest legal cut point.

    Sums of 2, 6 and 12 MB against 8 MB: after layer 2. All of them fit: n, if that is ``legal`` (a device can run it
    all). ``None`` when the first layer does not fit, or when no cut before the first layer that does not is legal.
    """
    fitting = next((k for k, total in enumerate(cumulative_bytes) if total > budget_bytes), len(cumulative_bytes))
    return next((k for k in range(fitting, 0, -1) if k in legal), None)
