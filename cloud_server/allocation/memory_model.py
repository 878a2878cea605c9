"""Which cut a device's memory budget allows, by the memory model that the user names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cloud_server.allocation.settings import MemoryModelName
from converters.memory import choose_cumulative
from converters.outline import Outline
from converters.peak import RUNTIME_MEMORY, choose_peak, runtime_peaks
from edge_sdk.protocol import Resources
from edge_sdk.sizes import format_size

# Of a device that names none; it needs more than the other.
DEFAULT_RUNTIME = "litert"


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


MemoryModel = Callable[[Outline, int, str], ChosenCut | NoCut]
"""From an outline, a budget in bytes and the name of the device's TFLite runtime to a cut."""


def runtime_of(resources: Resources) -> str:
    """The runtime that a device runs heads with: the first that it names."""
    return next((name for name in resources.runtimes if name in RUNTIME_MEMORY), DEFAULT_RUNTIME)


def peak(outline: Outline, budget_bytes: int, runtime: str) -> ChosenCut | NoCut:
    """What the process grows by: see :mod:`converters.peak`."""
    choice = choose_peak(outline, budget_bytes, runtime)
    needs = runtime_peaks(outline, runtime)
    if choice.k is None:
        legal = [cut.k for cut in outline.cuts if cut.legal] + ([] if outline.edge_only_reason else [outline.n])
        if not legal:
            return NoCut(reason="it has no legal cut, and no device can run all of it")
        return NoCut(
            reason=f"its smallest head is predicted to grow a process with {runtime} by "
            f"{format_size(min(needs[k - 1] for k in legal))}, the budget is {format_size(budget_bytes)}"
        )
    return ChosenCut(
        k=choice.k,
        n=outline.n,
        cut=outline.operations[choice.k - 1].name,
        predicted_bytes=choice.peak_bytes,
        whole_bytes=needs[-1],
    )


def cumulative(outline: Outline, budget_bytes: int, runtime: str) -> ChosenCut | NoCut:  # noqa: ARG001
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


MODELS: dict[MemoryModelName, MemoryModel] = {"peak": peak, "cumulative": cumulative}
