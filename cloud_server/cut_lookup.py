"""Which cut a user means who names it, by number or by the operation that it lies after."""

from __future__ import annotations

import difflib

from converters.cuts import CutPoint
from converters.outline import Outline
from converters.recurrent import why_no_cut_inside
from edge_sdk.errors import IllegalCutError

NEAR = 3


def find_cut(model: str, outline: Outline, wanted: str) -> int:
    """The k of the cut ``wanted``, a number or the name of an operation; n, the last operation, is the whole model.

    Raises :class:`IllegalCutError` for what is none, or is not legal; it lists what is near.
    """
    k = _number(outline, wanted) if wanted.lstrip("-").isdecimal() else _named(model, outline, wanted)
    if k is None or not 1 <= k <= outline.n:
        raise IllegalCutError(
            f"model {model!r} has {outline.n} operations: expected a cut from 1 to {outline.n - 1} (or {outline.n} for "
            f"the whole model), got {wanted}; {_legal_near(outline, k or 0)}"
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


def _number(outline: Outline, wanted: str) -> int | None:
    # An operation may be called "7" too; then its name counts, as the table shows it.
    named = [operation.k for operation in outline.operations if operation.name == wanted]
    return named[0] if named else int(wanted)


def _named(model: str, outline: Outline, wanted: str) -> int:
    names = {operation.name: operation.k for operation in outline.operations}
    if wanted in names:
        return names[wanted]
    if reason := why_no_cut_inside(outline, wanted):
        raise IllegalCutError(f"model {model!r} has no such cut: {reason}; {_legal_near(outline, 0)}")
    near = difflib.get_close_matches(wanted, names, n=NEAR, cutoff=0.4)
    hint = f"did you mean {', '.join(f'{name!r} (k={names[name]})' for name in near)}?" if near else ""
    raise IllegalCutError(
        f"model {model!r} has no operation {wanted!r} to cut after; "
        f"{hint or _legal_near(outline, 0)} 'splitfleet cuts' lists all"
    )


def _legal_near(outline: Outline, k: int) -> str:
    legal = [cut for cut in outline.cuts if cut.legal]
    if not legal:
        return "it has no legal cut at all"
    nearest = sorted(sorted(legal, key=lambda cut: abs(cut.k - k))[:NEAR], key=lambda cut: cut.k)
    return f"the nearest legal cuts are {', '.join(map(_shown, nearest))}"


def _shown(cut: CutPoint) -> str:
    return f"{cut.k} ({cut.name!r})"
