"""Which cut a device's memory budget allows, by the memory model that the user names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cloud_server.allocation.settings import MemoryModelName
from converters.memory import choose_cumulative
from converters.outline import Outline
from edge_sdk.sizes import format_size


@dataclass(frozen=True, kw_only=True)
class ChosenCut:
    """After operation ``k`` of ``n``, which is called ``cut``. What the memory model says the head needs, and the whole
    model: ``predicted_bytes`` and ``whole_bytes``.
    """

    k: int
    n: int
    cut: str
    predicted_bytes: int
    whole_bytes: int


@dataclass(frozen=True, kw_only=True)
class NoCut:
    """No head of this model fits, and why."""

    reason: str


MemoryModel = Callable[[Outline, int], ChosenCut | NoCut]


def cumulative(outline: Outline, budget_bytes: int) -> ChosenCut | NoCut:
    """The classic rule: see :mod:`converters.memory`."""
    choice = choose_cumulative(outline, budget_bytes)
    if choice.k is None:
        first = next((cut for cut in outline.cuts if cut.legal), None)
        needs = outline.operations[first.k - 1 if first else -1].cumulative_bytes
        return NoCut(
            reason=f"its smallest head needs {format_size(needs)} by the cumulative rule, "
            f"the budget is {format_size(budget_bytes)}"
        )
    return ChosenCut(
        k=choice.k,
        n=outline.n,
        cut=outline.operations[choice.k - 1].name,
        predicted_bytes=choice.cumulative_bytes,
        whole_bytes=outline.operations[-1].cumulative_bytes,
    )


MODELS: dict[MemoryModelName, MemoryModel] = {"cumulative": cumulative}
