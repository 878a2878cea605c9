"""Precisions of a head: what may be asked for, and what ``auto`` tries one after another."""

from __future__ import annotations

import math
from typing import Literal, get_args

from edge_sdk import manifest
from edge_sdk.errors import ConfigError

Precision = Literal["int8", "int8-weights", "float16", "float32", "auto"]

# From the smallest and fastest to the one that always works.
LADDER: tuple[manifest.Precision, ...] = ("int8", "int8-weights", "float16", "float32")

# A head whose noise is a quarter of its signal, or less, is good enough for ``auto``: see converters.deviation.
DEFAULT_MAX_ERROR = 0.25


def checked_request(precision: str, max_error: float | None) -> tuple[tuple[manifest.Precision, ...], float]:
    """The precisions to try, in order, and the error that is allowed, infinite unless several are tried.

    Raises :class:`ConfigError` for an unknown precision, and for a ``max_error`` that is no positive number or that is
    given without ``auto``: a precision that is asked for by name is what one gets.
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"{precision!r} is no precision; expected one of {', '.join(get_args(Precision))}")
    if precision == "auto":
        allowed = DEFAULT_MAX_ERROR if max_error is None else max_error
        if not allowed > 0:
            raise ConfigError(f"the largest error must be a positive number, got {max_error}")
        return LADDER, allowed
    if max_error is not None:
        raise ConfigError(f"a largest error goes with the precision 'auto' only, got it with {precision!r}")
    return tuple(rung for rung in LADDER if rung == precision), math.inf
