"""Precisions of a head: what may be asked for, and the ladder of attempts that ``auto`` goes down."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from edge_sdk import manifest
from edge_sdk.errors import ConfigError, ConversionError, DoesNotFitError

Precision = Literal["int8", "int8-weights", "float16", "float32", "auto"]

# From the smallest and fastest to the one that always works.
PRECISIONS: tuple[manifest.Precision, ...] = ("int8", "int8-weights", "float16", "float32")

# Good enough for ``auto``: noise of a tenth of the signal (see converters.deviation). Heads of the zoo whose accuracy
# int8 costs at most 1.5 points have 0.01 to 0.06, of which 0.01 to 0.02 are the rounding of the features alone.
DEFAULT_MAX_ERROR = 0.1

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One head to try: where it ends, its precision, and the error up to which it is good.

    ``before`` tells why the attempts before this one came to nothing.
    """

    k: int
    precision: manifest.Precision
    max_error: float = math.inf
    before: str = ""

    @property
    def refused_above(self) -> float:
        """The error of a head that is refused, its features as the head makes them.

        One in float32 is the last resort, however small an error is wanted. It is exact but for the order of sums: if
        not, TensorFlow Lite computes something else than the model.
        """
        return max(self.max_error, DEFAULT_MAX_ERROR) if self.precision == "float32" else self.max_error


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Precisions to try one after another, and for each the cut: after operation k, or in words why there is none."""

    cuts: tuple[tuple[manifest.Precision, int | str], ...]
    max_error: float

    @classmethod
    def of(
        cls,
        precision: str,
        max_error: float | None,
        cut: Callable[[manifest.Precision], int | str],
    ) -> Ladder:
        """The ladder for a precision that is asked for; ``cut`` tells where a head of a precision would end.

        Raises :class:`ConfigError` for an unknown precision, and for a ``max_error`` that is no positive number or that
        is given without ``auto``: a precision that is asked for by name is what one gets.
        """
        if precision not in get_args(Precision):
            raise ConfigError(f"{precision!r} is no precision; expected one of {', '.join(get_args(Precision))}")
        if precision != "auto" and max_error is not None:
            raise ConfigError(f"a largest error goes with the precision 'auto' only, got it with {precision!r}")
        if max_error is not None and not max_error > 0:
            raise ConfigError(f"the largest error must be a positive number, got {max_error}")
        if max_error is None:
            max_error = DEFAULT_MAX_ERROR if precision in ("auto", "float32") else math.inf
        tried = (each for each in PRECISIONS if precision in (each, "auto"))
        return cls(cuts=tuple((each, cut(each)) for each in tried), max_error=max_error)

    @property
    def first_k(self) -> int:
        """The cut of the first attempt."""
        return next(cut for _, cut in self.cuts if isinstance(cut, int))

    def climb(self, build: Callable[[Attempt], T]) -> T:
        """What ``build`` makes of the first attempt that it does not refuse with a :class:`ConversionError`.

        When it refuses all, raises that error, or :class:`DoesNotFitError` where there was no cut to try for some.
        """
        reasons: list[str] = []
        unfit = False
        last: ConversionError | None = None
        places = {cut for _, cut in self.cuts if isinstance(cut, int)}
        for precision, cut in self.cuts:
            if isinstance(cut, str):
                unfit = True
                reasons.append(f"{precision}: {cut}")
                continue
            before = "; ".join(reasons)
            attempt = Attempt(k=cut, precision=precision, max_error=self.max_error, before=before)
            try:
                return build(attempt)
            except ConversionError as error:
                if error.details.get("closed"):
                    raise
                last = error
                where = f" at k={cut}" if len(places) > 1 else ""
                reasons.append(f"{precision}{where}: {error.message}")
        if unfit:
            raise DoesNotFitError("; ".join(reasons)) from last
        if last is not None and len(reasons) == 1:
            raise last
        raise ConversionError("; ".join(reasons)) from last
