"""Which cut a device's memory budget allows, by the memory model that the user names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cloud_server.allocation.settings import MemoryModelName
from converters.memory import choose_cumulative
from converters.outline import Outline
from converters.peak import RUNTIME_MEMORY, choose_peak, runtime_peaks
from converters.precision import Ladder
from converters.precision import Precision as WantedPrecision
from edge_sdk.manifest import Precision
from edge_sdk.protocol import Resources
from edge_sdk.sizes import format_need, format_size

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
    """No head of this model fits, and why. ``needed_bytes`` would do for the smallest, ``None`` if nothing would."""

    reason: str
    needed_bytes: int | None

    @property
    def advice(self) -> str:
        """What a user may do."""
        return advice(self.needed_bytes)


MemoryModel = Callable[[Outline, int, str, Precision], ChosenCut | NoCut]
"""From an outline, a budget in bytes, the name of the device's TFLite runtime and the head's precision to a cut."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where a memory model cuts, for each precision that may be tried in turn; for one of them at least it does."""

    cuts: Mapping[Precision, ChosenCut | NoCut]
    ladder: Ladder

    @property
    def first(self) -> ChosenCut:
        """The cut that is tried first."""
        return next(cut for cut in self.cuts.values() if isinstance(cut, ChosenCut))

    def at(self, precision: Precision) -> ChosenCut:
        """The cut for a precision that there is one for."""
        cut = self.cuts[precision]
        assert isinstance(cut, ChosenCut)
        return cut


def choose(
    memory_model: MemoryModel,
    outline: Outline,
    budget_bytes: int,
    runtime: str,
    *,
    precision: WantedPrecision = "auto",
    max_error: float | None = None,
) -> Choice | NoCut:
    """Where ``memory_model`` cuts for a budget, at each of the precisions that ``precision`` stands for.

    Where no precision fits, this is told of the one that would be tried first. Raises :class:`InvalidInputError` for a
    negative budget, :class:`ConfigError` for a runtime without predictions and what :meth:`Ladder.of` refuses.
    """
    cuts: dict[Precision, ChosenCut | NoCut] = {}

    def cut(each: Precision) -> int | str:
        cuts[each] = chosen = memory_model(outline, budget_bytes, runtime, each)
        return chosen.k if isinstance(chosen, ChosenCut) else chosen.reason

    ladder = Ladder.of(precision, max_error, cut)
    if all(isinstance(each, NoCut) for each in cuts.values()):
        return next(each for each in cuts.values() if isinstance(each, NoCut))
    return Choice(cuts=cuts, ladder=ladder)


def advice(needed_bytes: int | None) -> str:
    """What a user may do about a model that does not fit, of which so many bytes would do for the smallest head."""
    if needed_bytes is None:
        return "take another model"
    return f"give it at least {format_need(needed_bytes)}, or take a smaller model"


def runtime_of(resources: Resources) -> str:
    """The runtime that a device runs heads with: the first that it names."""
    return next((name for name in resources.runtimes if name in RUNTIME_MEMORY), DEFAULT_RUNTIME)


def peak(outline: Outline, budget_bytes: int, runtime: str, precision: Precision) -> ChosenCut | NoCut:
    """What the process grows by: see :mod:`converters.peak`."""
    choice = choose_peak(outline, budget_bytes, runtime, precision)
    needs = runtime_peaks(outline, runtime, precision)
    if choice.k is None:
        return _no_cut(outline, budget_bytes, needs, f"is predicted to grow a process with {runtime} by", precision)
    return ChosenCut(
        k=choice.k,
        n=outline.n,
        cut=outline.operations[choice.k - 1].name,
        predicted_bytes=choice.peak_bytes,
        whole_bytes=needs[-1],
    )


def cumulative(
    outline: Outline,
    budget_bytes: int,
    runtime: str,  # noqa: ARG001
    precision: Precision,
) -> ChosenCut | NoCut:
    """The classic rule: see :mod:`converters.memory`."""
    choice = choose_cumulative(outline, budget_bytes, precision)
    needs = outline.cumulative_bytes[precision]
    if choice.k is None:
        return _no_cut(outline, budget_bytes, needs, "needs by the cumulative rule", precision)
    return ChosenCut(
        k=choice.k,
        n=outline.n,
        cut=outline.operations[choice.k - 1].name,
        predicted_bytes=choice.cumulative_bytes,
        whole_bytes=needs[-1],
    )


def _no_cut(outline: Outline, budget_bytes: int, needs: Sequence[int], how: str, precision: Precision) -> NoCut:
    legal = [cut.k for cut in outline.cuts if cut.legal] + ([] if outline.edge_only_reason else [outline.n])
    if not legal:
        return NoCut(reason="it has no legal cut, and no device can run all of it", needed_bytes=None)
    k = min(legal, key=lambda place: needs[place - 1])
    name = outline.operations[k - 1].name
    where = f"cut after operation {k} ({name!r})" if k < outline.n else f"all {k} operations"
    return NoCut(
        reason=f"its smallest {precision} head, {where}, {how} {format_size(needs[k - 1])}, "
        f"the budget is {format_size(budget_bytes)}",
        needed_bytes=needs[k - 1],
    )


MODELS: dict[MemoryModelName, MemoryModel] = {"peak": peak, "cumulative": cumulative}
