"""The memory rule ``peak``: what a process that loads and runs an int8 head grows by, for each TFLite runtime.

That is the figure which :mod:`edge_sdk.memory` measures, predicted from the graph alone: the kernels that the head will
have (:mod:`converters.lowering`), the pages of its file (:mod:`converters.peak_parts`) and what the runtime allocates
for it (:mod:`converters.peak_litert`, :mod:`converters.peak_tflite_runtime`). What is too small for a formula, and the
pages of the runtime's code, are a few coefficients, fitted to measured heads on x86-64; ``benchmarks/memory.py`` tells
how well all of it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.flatten import FlatModel
from converters.kernels import HeadKernels
from converters.lowering import lower
from converters.memory import check_budget
from converters.peak_litert import litert_parts
from converters.peak_parts import Parts, file_bytes, quantized_channels
from converters.peak_tflite_runtime import tflite_runtime_parts
from edge_sdk.errors import ConfigError

if TYPE_CHECKING:
    from converters.outline import Outline

# The fit leaves up to 5 % of a prediction unexplained, either way, and a device must not be told too little.
MARGIN = 1.07


@dataclass(frozen=True, kw_only=True)
class RuntimeMemory:
    """A runtime. The coefficients are bytes, fitted by least squares of relative errors.

    ``base``: what any head takes, mostly code. ``per_kind``: code of each further kind of kernel. ``floats``: code that
    only kernels on floats need. ``per_kernel`` and ``per_channel``: descriptions of kernels and of channels with a
    scale of their own, in memory.
    """

    parts: Callable[[HeadKernels], Parts]
    base: int
    per_kind: int
    floats: int
    per_kernel: int
    per_channel: int

    def peak_bytes(self, head: HeadKernels) -> int:
        """The predicted growth, margin included."""
        kinds = {kernel.kind for kernel in head.kernels}
        parts = self.parts(head)
        known = file_bytes(head) + parts.weights + parts.tables + parts.activations
        code = self.base + self.per_kind * max(len(kinds) - 1, 0) + self.floats * ("float" in kinds)
        descriptions = self.per_kernel * len(head.kernels) + self.per_channel * quantized_channels(head)
        return round(MARGIN * (known + code + descriptions))


RUNTIME_MEMORY = {
    "litert": RuntimeMemory(
        parts=litert_parts, base=3_600_000, per_kind=18_500, floats=0, per_kernel=4_900, per_channel=29
    ),
    "tflite-runtime": RuntimeMemory(
        parts=tflite_runtime_parts, base=2_950_000, per_kind=0, floats=430_000, per_kernel=2_000, per_channel=36
    ),
}
"""By the names of :data:`edge_sdk.runtime.RUNTIMES`."""


@dataclass(frozen=True, kw_only=True)
class PeakChoice:
    """Where the rule cuts. ``k`` is ``None`` when not even the head of the first legal cut fits, and n when the whole
    model does; ``peak_bytes`` is the predicted growth with what then runs on the device.
    """

    k: int | None
    peak_bytes: int


def predicted_peaks(flat: FlatModel, k: int) -> dict[str, int]:
    """For each runtime the predicted growth in bytes of the int8 head that ends after operation ``k``, 1 to n."""
    head = lower(flat).head(k)
    return {name: runtime.peak_bytes(head) for name, runtime in RUNTIME_MEMORY.items()}


def all_peaks(flat: FlatModel) -> dict[str, tuple[int, ...]]:
    """For each runtime :func:`predicted_peaks` of all k from 1 to n."""
    lowered = lower(flat)
    heads = [lowered.head(k) for k in range(1, flat.graph.n + 1)]
    return {name: tuple(runtime.peak_bytes(head) for head in heads) for name, runtime in RUNTIME_MEMORY.items()}


def choose_peak(outline: Outline, budget_bytes: int, runtime: str) -> PeakChoice:
    """The deepest cut whose head is predicted to fit a budget for the growth of the process, with ``runtime``.

    Raises :class:`InvalidInputError` for a negative budget, :class:`ConfigError` for an unknown runtime.
    """
    check_budget(budget_bytes)
    peaks = runtime_peaks(outline, runtime)
    legal = [cut.k for cut in outline.cuts if cut.legal]
    if not outline.edge_only_reason:
        legal.append(outline.n)
    k = max((k for k in legal if peaks[k - 1] <= budget_bytes), default=None)
    return PeakChoice(k=k, peak_bytes=peaks[k - 1] if k else 0)


def runtime_peaks(outline: Outline, runtime: str) -> tuple[int, ...]:
    """An outline's predictions for one runtime. Raises :class:`ConfigError` for an unknown one."""
    try:
        return outline.peak_bytes[runtime]
    except KeyError:
        raise ConfigError(
            f"there is no prediction of memory for the runtime {runtime!r}; there is for {', '.join(RUNTIME_MEMORY)}"
        ) from None
