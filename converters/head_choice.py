"""One attempt at a head: it is written, and taken if it is close enough to float."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from converters.calibration import Calibration
from converters.deviation import Reference
from converters.head import Head, write_head
from converters.precision import Attempt
from converters.quantization import Quantization
from converters.split import Split
from edge_sdk.errors import ConversionError
from edge_sdk.manifest import Precision


@dataclass(frozen=True, kw_only=True)
class ChosenHead:
    """``sent`` tells, by key, how each feature crosses: a floating-point number as int8, where that is close enough.

    ``reason`` tells why nothing before this was taken; ``head`` is ``None`` where there is none.
    """

    head: Head | None
    precision: Precision
    reason: str
    sent: dict[str, Quantization]


def choose_head(halves: Split, calibration: Calibration, path: Path, attempt: Attempt) -> ChosenHead:
    """Write the head of ``halves``, which have one, to ``path``.

    Raises :class:`ConversionError` when it does not convert or does not run, and when its error is larger than the
    attempt allows.
    """
    assert halves.head is not None
    features = tuple(f"feature_{number}" for number in range(len(halves.crossing)))
    returned = output_keys(halves.head_outputs)
    head = write_head(halves.head, (*features, *returned), calibration, path, attempt.precision)
    reference = Reference(halves=halves, features=features, returned=returned, calibration=calibration)
    emitted = {key: head.outputs[key] for key in features}
    sent = {
        key: reference.int8(key) if quantization.dtype.startswith("float") else quantization
        for key, quantization in emitted.items()
    }
    if math.isinf(attempt.max_error):
        return ChosenHead(head=head, precision=attempt.precision, reason=attempt.before, sent=sent)
    made = reference.run(path, head)
    found = reference.deviation(made, sent)
    reasons = [attempt.before] if attempt.before else []
    if found.error > attempt.max_error and sent != emitted:
        # What is lost by rounding the features is no fault of the head's.
        exact = reference.deviation(made, emitted)
        if exact.error <= attempt.refused_above:
            reasons.append(f"features in int8: {found}, {attempt.max_error:g} is allowed")
        found, sent = exact, emitted
    if found.error > attempt.refused_above:
        reason = f"{found}, {attempt.refused_above:g} is allowed"
        if attempt.precision == "float32":
            reason += ": TensorFlow Lite computes something else than the model; cut before what it gets wrong"
        raise ConversionError(reason)
    return ChosenHead(head=head, precision=attempt.precision, reason="; ".join(reasons), sent=sent)


def output_keys(places: tuple[int, ...]) -> tuple[str, ...]:
    """Signature keys of the model's outputs at ``places``."""
    return tuple(f"output_{place}" for place in places)
