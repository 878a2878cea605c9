"""Precisions of a head: what may be asked for, and what ``auto`` tries one after another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from edge_sdk import manifest
from edge_sdk.errors import ConfigError

Precision = Literal["int8", "int8-weights", "float16", "float32", "auto"]

# From the smallest and fastest to the one that always works.
LADDER: tuple[manifest.Precision, ...] = ("int8", "int8-weights", "float16", "float32")

# Good enough for ``auto``: noise of a tenth of the signal (see converters.deviation). Heads of the zoo whose accuracy
# int8 costs at most 1.5 points have 0.01 to 0.06, of which 0.01 to 0.02 are the rounding of the features alone.
DEFAULT_MAX_ERROR = 0.1


@dataclass(frozen=True, kw_only=True)
class Request:
    """The precisions to try, in order, and the error that is allowed, infinite unless several are tried."""

    precisions: tuple[manifest.Precision, ...]
    max_error: float


def checked_request(precision: str, max_error: float | None) -> Request:
    """What a precision and a largest error ask for.

    Raises :class:`ConfigError` for an unknown precision, and for a ``max_error`` that is no positive number or that is
    given without ``auto``: a precision that is asked for by name is what one gets.
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"{precision!r} is no precision; expected one of {', '.join(get_args(Precision))}")
    if precision == "auto":
        allowed = DEFAULT_MAX_ERROR if max_error is None else max_error
        if not allowed > 0:
            raise ConfigError(f"the largest error must be a positive number, got {max_error}")
        return Request(precisions=LADDER, max_error=allowed)
    if max_error is not None:
        raise ConfigError(f"a largest error goes with the precision 'auto' only, got it with {precision!r}")
    return Request(precisions=tuple(rung for rung in LADDER if rung == precision), max_error=math.inf)
