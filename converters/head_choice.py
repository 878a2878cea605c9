"""Which precision a head gets: the first of some that converts and is close enough to float."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from converters.calibration import Calibration
from converters.deviation import Reference
from converters.head import Head, write_head
from converters.precision import Request
from converters.quantization import Quantization
from converters.split import Half
from edge_sdk.errors import ConversionError
from edge_sdk.manifest import Precision


@dataclass(frozen=True, kw_only=True)
class ChosenHead:
    """``sent`` tells, by key, how each feature crosses: as int8 wherever it is a floating-point number.

    ``reason`` tells why the precisions before this one were not taken; ``head`` is ``None`` where there is none.
    """

    head: Head | None
    precision: Precision
    reason: str
    sent: dict[str, Quantization]


def choose_head(
    half: Half,
    features: Sequence[str],
    outputs: Sequence[str],
    calibration: Calibration,
    path: Path,
    request: Request,
    int8_failed: str,
) -> ChosenHead:
    """Write ``half`` to ``path`` in the first of the precisions that converts and whose error is small enough.

    The last one is taken whatever its error is. ``int8_failed`` is why int8 need not be tried, empty where it must be.
    Raises :class:`ConversionError` when none converts.
    """
    keys = (*features, *outputs)
    reference: Reference | None = None
    max_error = request.max_error
    reasons = [f"int8: {int8_failed}"] if int8_failed else []
    for precision in request.precisions:
        if precision == "int8" and int8_failed:
            continue
        try:
            head = write_head(half, keys, calibration, path, precision)
        except ConversionError as error:
            reasons.append(f"{precision}: {error.message}")
            continue
        emits_float = any(head.outputs[key].dtype.startswith("float") for key in features)
        if reference is None and (emits_float or math.isfinite(max_error)):
            reference = Reference.of(half, keys, calibration)
        sent = {key: _sent(key, head, reference) for key in features}
        if reference is not None and math.isfinite(max_error):
            error_made = reference.error(path, head, sent)
            if error_made > max_error:
                reasons.append(f"{precision}: its error is {error_made:.3g} of the signal, {max_error:g} is allowed")
                if precision != request.precisions[-1]:
                    continue
        return ChosenHead(head=head, precision=precision, reason="; ".join(reasons), sent=sent)
    path.unlink(missing_ok=True)
    raise ConversionError("; ".join(reasons) if len(reasons) > 1 else reasons[0].partition(": ")[2])


def _sent(key: str, head: Head, reference: Reference | None) -> Quantization:
    emitted = head.outputs[key]
    if reference is not None and emitted.dtype.startswith("float"):
        return reference.int8(key)
    return emitted
