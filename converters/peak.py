"""The memory rule ``peak``: what a process that loads and runs a head grows by, for each TFLite runtime.

That is the figure which :mod:`edge_sdk.memory` measures, predicted from the graph alone: the kernels that the head will
have (:mod:`converters.lowering`), the pages of its file (:mod:`converters.peak_parts`) and what the runtime allocates
for it (:mod:`converters.peak_litert`, :mod:`converters.peak_tflite_runtime`). What is too small for a formula, and the
pages of the runtime's code, are a few coefficients, fitted to measured heads on x86-64; ``benchmarks/memory.py`` tells
how well all of it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.flatten import FlatModel
from converters.kernels import HeadKernels
from converters.lowering import lower
from converters.memory import check_budget
from converters.peak_litert import litert_parts
from converters.peak_parts import Parts, file_bytes, quantized_channels, unpacked_constants
from converters.peak_tflite_runtime import tflite_runtime_parts
from converters.precision import PRECISIONS
from edge_sdk.errors import ConfigError
from edge_sdk.manifest import Precision

if TYPE_CHECKING:
    from converters.outline import Outline

# The fit leaves up to 5 % of a prediction unexplained, either way, and a device must not be told too little.
MARGIN = 1.07


@dataclass(frozen=True, kw_only=True)
class Code:
    """What a runtime takes besides what is known of a head, in bytes, fitted by least squares of relative errors.

    ``base``: what any head takes, mostly code. ``per_kind``: code of each further kind of kernel. ``floats``: code that
    only kernels on floats need, in an int8 head. ``per_kernel`` and ``per_channel``: descriptions of kernels and of
    channels with a scale of their own, in memory.
    """

    base: int
    per_kind: int = 0
    floats: int = 0
    per_kernel: int
    per_channel: int = 0


@dataclass(frozen=True, kw_only=True)
class RuntimeMemory:
    """A runtime: what it allocates for a head, and its code by the head's precision."""

    parts: Callable[[HeadKernels, Precision], Parts]
    code: Mapping[Precision, Code]

    def peak_bytes(self, head: HeadKernels, precision: Precision) -> int:
        """The predicted growth, margin included."""
        kinds = {kernel.kind for kernel in head.kernels}
        parts, code = self.parts(head, precision), self.code[precision]
        known = file_bytes(head, precision) + parts.weights + parts.tables + parts.activations
        own = code.base + code.per_kind * max(len(kinds) - 1, 0) + code.floats * ("float" in kinds)
        kernels = len(head.kernels) + unpacked_constants(head, precision)
        descriptions = code.per_kernel * kernels + code.per_channel * quantized_channels(head, precision)
        return round(MARGIN * (known + own + descriptions))


RUNTIME_MEMORY = {
    "litert": RuntimeMemory(
        parts=litert_parts,
        code={
            "int8": Code(base=3_600_000, per_kind=18_500, per_kernel=4_900, per_channel=29),
            "int8-weights": Code(base=3_710_000, per_kind=17_400, per_kernel=1_370, per_channel=71),
            "float16": Code(base=3_510_000, per_kind=8_050, per_kernel=3_550),
            "float32": Code(base=3_630_000, per_kind=13_700, per_kernel=3_870),
        },
    ),
    "tflite-runtime": RuntimeMemory(
        parts=tflite_runtime_parts,
        code={
            "int8": Code(base=2_950_000, floats=430_000, per_kernel=2_000, per_channel=36),
            "int8-weights": Code(base=3_460_000, per_kernel=5_500, per_channel=9),
            "float16": Code(base=3_280_000, per_kernel=3_030),
            "float32": Code(base=3_200_000, per_kernel=6_000),
        },
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


def predicted_peaks(flat: FlatModel, k: int, precision: Precision) -> dict[str, int]:
    """For each runtime the predicted growth in bytes of the head that ends after operation ``k``, 1 to n."""
    head = lower(flat, quantized=precision == "int8").head(k)
    return {name: runtime.peak_bytes(head, precision) for name, runtime in RUNTIME_MEMORY.items()}


def all_peaks(flat: FlatModel) -> dict[Precision, dict[str, tuple[int, ...]]]:
    """By precision, :func:`predicted_peaks` of all k from 1 to n."""
    every = range(1, flat.graph.n + 1)
    lowered = {quantized: lower(flat, quantized=quantized) for quantized in (True, False)}
    heads = {quantized: [made.head(k) for k in every] for quantized, made in lowered.items()}
    return {
        precision: {
            name: tuple(runtime.peak_bytes(head, precision) for head in heads[precision == "int8"])
            for name, runtime in RUNTIME_MEMORY.items()
        }
        for precision in PRECISIONS
    }


def choose_peak(outline: Outline, budget_bytes: int, runtime: str, precision: Precision = "int8") -> PeakChoice:
    """The deepest cut whose head is predicted to fit a budget for the growth of the process, with ``runtime``.

    Raises :class:`InvalidInputError` for a negative budget, :class:`ConfigError` for an unknown runtime.
    """
    check_budget(budget_bytes)
    peaks = runtime_peaks(outline, runtime, precision)
    legal = [cut.k for cut in outline.cuts if cut.legal]
    if not outline.edge_only_reason:
        legal.append(outline.n)
    k = max((k for k in legal if peaks[k - 1] <= budget_bytes), default=None)
    return PeakChoice(k=k, peak_bytes=peaks[k - 1] if k else 0)


def runtime_peaks(outline: Outline, runtime: str, precision: Precision) -> tuple[int, ...]:
    """An outline's predictions for one runtime. Raises :class:`ConfigError` for an unknown one."""
    try:
        return outline.peak_bytes[precision][runtime]
    except KeyError:
        raise ConfigError(
            f"there is no prediction of memory for the runtime {runtime!r}; there is for {', '.join(RUNTIME_MEMORY)}"
        ) from None
