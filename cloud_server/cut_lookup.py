"""Which cut a user means who names it, by number or by the operation that it lies after."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from converters.cuts import CutPoint
from converters.outline import Outline
from converters.recurrent import why_no_cut_inside
from edge_sdk.errors import IllegalCutError

NEAR = 3
# A longer number is the k of no model, and Python refuses to read the longest.
MAX_DIGITS = 9
MAX_SHOWN = 60


def find_cut(model: str, outline: Outline, wanted: str) -> int:
    """The k of the cut ``wanted``, a number or the name of an operation; n, the last operation, is the whole model.

    Raises :class:`IllegalCutError` for what is none, may mean several, or is not legal; it lists what is near.
    """
    places = sorted({*_named(outline, wanted), *_numbered(wanted)})
    if not places:
        raise _no_such_name(model, outline, wanted)
    if len(places) > 1:
        raise _ambiguous(model, outline, wanted, places)
    (k,) = places
    if not 1 <= k <= outline.n:
        raise IllegalCutError(
            f"model {model!r} has {outline.n} operations: expected a cut from 1 to {outline.n - 1} (or {outline.n} for "
            f"the whole model), got {_shortened(wanted)}; {_legal_near(outline, k)}"
        )
    if k < outline.n and not (cut := outline.cuts[k - 1]).legal:
        raise IllegalCutError(
            f"model {model!r} cannot be cut after operation {k} ({cut.name!r}): {cut.reason}; {_legal_near(outline, k)}"
        )
    if k == outline.n and outline.edge_only_reason:
        raise IllegalCutError(
            f"model {model!r} cannot run on a device as a whole: {outline.edge_only_reason}; {_legal_near(outline, k)}"
        )
    return k


def _named(outline: Outline, wanted: str) -> list[int]:
    return [operation.k for operation in outline.operations if operation.name == wanted]


def _numbered(wanted: str) -> list[int]:
    digits = wanted.removeprefix("-")
    if not digits.isdecimal():
        return []
    number = int(digits.lstrip("0")[:MAX_DIGITS] or "0")
    return [-number if wanted.startswith("-") else number]


def _ambiguous(model: str, outline: Outline, wanted: str, places: Sequence[int]) -> IllegalCutError:
    """An operation may be called "7", too, and one called "conv#2" is beside the second call of "conv"."""
    shown = " or ".join(f"{k} ({outline.operations[k - 1].name!r})" for k in places if 1 <= k <= outline.n)
    return IllegalCutError(
        f"model {model!r}: {wanted!r} may mean the cut after operation {shown}: give the number or the name that only "
        "one of them has"
    )


def _no_such_name(model: str, outline: Outline, wanted: str) -> IllegalCutError:
    if reason := why_no_cut_inside(outline, wanted):
        return IllegalCutError(f"model {model!r} has no such cut: {reason}; {_legal_near(outline, 0)}")
    names = {operation.name: operation.k for operation in outline.operations}
    near = difflib.get_close_matches(wanted[:MAX_SHOWN], names, n=NEAR, cutoff=0.4)
    meant = ", ".join(f"{name!r} (k={names[name]})" for name in near)
    hint = f"did you mean {meant}?" if near else f"{_legal_near(outline, 0)};"
    return IllegalCutError(
        f"model {model!r} has no operation {_shortened(wanted)!r} to cut after; {hint} 'splitfleet cuts' lists all"
    )


def _shortened(wanted: str) -> str:
    return wanted if len(wanted) <= MAX_SHOWN else f"{wanted[:MAX_SHOWN]}…"


def _legal_near(outline: Outline, k: int) -> str:
    legal = [cut for cut in outline.cuts if cut.legal]
    if not legal:
        return "it has no legal cut at all"
    nearest = sorted(sorted(legal, key=lambda cut: abs(cut.k - k))[:NEAR], key=lambda cut: cut.k)
    return f"the nearest legal cuts are {', '.join(map(_shown, nearest))}"


def _shown(cut: CutPoint) -> str:
    return f"{cut.k} ({cut.name!r})"
