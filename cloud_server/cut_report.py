"""What is to be known of a model's cut points, in one table: what crosses, what the head needs, whether it fits.

The figures are the converters'; here they are put side by side and marked. How they are shown is the command's matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cloud_server.allocation.memory_model import DEFAULT_RUNTIME, MODELS, ChosenCut, NoCut
from cloud_server.allocation.settings import MemoryModelName
from converters import Outline
from converters.graph import TensorInfo
from converters.peak import runtime_peaks
from edge_sdk.manifest import Precision
from edge_sdk.wire import DTYPES

FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A memory budget for a head that runs on ``runtime``. ``profile`` is who set it, ``None`` for a plain number."""

    budget_bytes: int
    runtime: str = DEFAULT_RUNTIME
    profile: str | None = None


@dataclass(frozen=True, kw_only=True)
class CutRow:
    """The cut after operation ``k``; k = n stands for the whole model.

    ``feature_bytes_float`` and ``feature_bytes_int8`` are those of one sample. What the head needs in the report's
    precision is predicted as ``peak_bytes`` for each runtime, and by the classic rule as ``cumulative_bytes``. ``fits``
    is ``None`` without a budget.
    """

    k: int
    name: str
    legal: bool
    reason: str
    tensors: tuple[TensorInfo, ...]
    feature_bytes_float: int
    feature_bytes_int8: int
    head_parameters: int
    peak_bytes: dict[str, int]
    cumulative_bytes: int
    fits: bool | None

    def to_document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "k": self.k,
            "name": self.name,
            "legal": self.legal,
            "reason": self.reason,
            "tensors": [
                {
                    "name": tensor.name,
                    "source": tensor.source,
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype,
                }
                for tensor in self.tensors
            ],
            "feature_bytes_float": self.feature_bytes_float,
            "feature_bytes_int8": self.feature_bytes_int8,
            "head_parameters": self.head_parameters,
            "cumulative_bytes": self.cumulative_bytes,
            "peak_bytes": {name.replace("-", "_"): size for name, size in self.peak_bytes.items()},
            "fits": self.fits,
        }


@dataclass(frozen=True, kw_only=True)
class CutReport:
    """All cut points of a model, k = 1 to n - 1, and the ``whole`` model as a last row of its own.

    ``chosen`` is where the memory model cuts for the budget: n when all of the model fits, ``None`` when nothing does
    or when there is no budget; ``refusal`` says why nothing does, and what to do about it. ``smallest`` is the legal
    cut with the fewest bytes of features, ``deepest`` the last legal one that fits.
    """

    model: str
    operations: int
    precision: Precision
    memory_model: MemoryModelName
    budget: Budget | None
    rows: tuple[CutRow, ...]
    whole: CutRow
    chosen: int | None
    refusal: str
    smallest: int | None
    deepest: int | None

    @property
    def legal(self) -> tuple[CutRow, ...]:
        return tuple(row for row in self.rows if row.legal)

    @property
    def runtime(self) -> str:
        """The one that the memory model reckons with."""
        return self.budget.runtime if self.budget else DEFAULT_RUNTIME

    @property
    def memory_title(self) -> str:
        """What :meth:`needed_bytes` is, in words."""
        return self._peak_title(self.runtime) if self.memory_model == "peak" else "size by the cumulative rule"

    def needed_bytes(self, row: CutRow) -> int:
        """What the memory model compares with the budget."""
        return row.peak_bytes[self.runtime] if self.memory_model == "peak" else row.cumulative_bytes

    def memory_series(self) -> dict[str, list[int]]:
        """All memory figures of the legal cuts, by what they are."""
        series = {
            self._peak_title(runtime): [row.peak_bytes[runtime] for row in self.legal]
            for runtime in self.whole.peak_bytes
        }
        return series | {"size by the cumulative rule": [row.cumulative_bytes for row in self.legal]}

    @staticmethod
    def _peak_title(runtime: str) -> str:
        return f"predicted peak, {runtime}"

    def marks(self, row: CutRow) -> tuple[str, ...]:
        """What is special about a row, in words."""
        marks = []
        if row.k == self.chosen:
            marks.append("chosen")
        if row.k == self.smallest:
            marks.append("smallest feature")
        if row.k == self.deepest:
            marks.append("deepest that fits")
        return tuple(marks)

    def to_document(self, *, illegal: bool) -> dict[str, Any]:
        """As JSON has it; without ``illegal``, the legal cuts only."""
        return {
            "model": self.model,
            "operations": self.operations,
            "precision": self.precision,
            "memory_model": self.memory_model,
            "runtime": self.runtime,
            "budget_bytes": self.budget.budget_bytes if self.budget else None,
            "profile": self.budget.profile if self.budget else None,
            "cuts": [row.to_document() for row in (self.rows if illegal else self.legal)],
            "whole": self.whole.to_document(),
            "chosen": self.chosen,
            "refusal": self.refusal,
            "smallest_feature": self.smallest,
            "deepest_that_fits": self.deepest,
        }


def cut_report(
    model: str,
    outline: Outline,
    memory_model: MemoryModelName,
    budget: Budget | None,
    precision: Precision = "int8",
) -> CutReport:
    """The report of a model that the user calls ``model``, for heads of a precision.

    Raises :class:`ConfigError` for a budget whose runtime has no predictions.
    """
    parameters = tuple(itertools.accumulate(operation.parameters for operation in outline.operations))
    needs = _needs(outline, memory_model, budget, precision)

    def row(k: int, *, legal: bool, reason: str, tensors: tuple[TensorInfo, ...]) -> CutRow:
        operation = outline.operations[k - 1]
        return CutRow(
            k=k,
            name=operation.name,
            legal=legal,
            reason=reason,
            tensors=tensors,
            feature_bytes_float=sum(map(_float_bytes, tensors)),
            feature_bytes_int8=sum(tensor.int8_bytes for tensor in tensors),
            head_parameters=parameters[k - 1],
            peak_bytes={runtime: peaks[k - 1] for runtime, peaks in outline.peak_bytes.get(precision, {}).items()},
            cumulative_bytes=outline.cumulative_bytes[precision][k - 1],
            fits=None if budget is None else needs[k - 1] <= budget.budget_bytes,
        )

    rows = tuple(row(cut.k, legal=cut.legal, reason=cut.reason, tensors=cut.crossing) for cut in outline.cuts)
    whole = row(outline.n, legal=not outline.edge_only_reason, reason=outline.edge_only_reason, tensors=())
    legal = [each for each in rows if each.legal]
    choice = None if budget is None else MODELS[memory_model](outline, budget.budget_bytes, budget.runtime, precision)
    return CutReport(
        model=model,
        operations=outline.n,
        precision=precision,
        memory_model=memory_model,
        budget=budget,
        rows=rows,
        whole=whole,
        chosen=choice.k if isinstance(choice, ChosenCut) else None,
        refusal=f"{choice.reason}; {choice.advice}" if isinstance(choice, NoCut) else "",
        smallest=min(legal, key=lambda each: (each.feature_bytes_int8, each.k)).k if legal else None,
        deepest=max((each.k for each in legal if each.fits), default=None),
    )


def _needs(
    outline: Outline, memory_model: MemoryModelName, budget: Budget | None, precision: Precision
) -> Sequence[int]:
    """What the memory model says that each head needs, k = 1 to n."""
    if memory_model == "peak":
        return runtime_peaks(outline, budget.runtime if budget else DEFAULT_RUNTIME, precision)
    return outline.cumulative_bytes[precision]


def _float_bytes(tensor: TensorInfo) -> int:
    """Bytes for one sample as float32; a tensor that is no floating-point number has its own size."""
    return math.prod(tensor.shape) * (FLOAT_BYTES if tensor.is_float else DTYPES[tensor.dtype].itemsize)
