"""An ERROR can always be encoded, whatever the error says."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.errors import InvalidInputError, OverloadedError
from edge_sdk.wire import MAX_ERROR_CHARS, decode, encode, error_message


@pytest.mark.parametrize(
    "text",
    ["\x01" * 5000, repr("\x01" * 5000), "\N{GRINNING FACE}" * 50_000, "a file named \udcff", ""],
    ids=["control characters", "escaped", "four bytes each", "lone surrogate", "empty"],
)
def test_a_text_of_any_length_and_kind(text: str) -> None:
    for error in (InvalidInputError(text), ValueError(text)):
        got = decode(encode(error_message(2**64 - 1, error)))
        assert got.request_id == 2**64 - 1
        assert len(got.body["message"]) <= MAX_ERROR_CHARS


@pytest.mark.parametrize(
    "details",
    [
        {"x": "y" * 20_000},
        {"x": list(range(10_000))},
        {"x": Path("/here")},
        {"x": {1: 2}},
        {"x": 2**70},
        {"x": "\udcff"},
        {"x": reduce(lambda inner, _: [inner], range(100), 1)},
    ],
    ids=["long", "many", "object", "keys that are no text", "too large a number", "lone surrogate", "nested"],
)
def test_details_that_do_not_fit_are_left_out(details: dict[str, Any]) -> None:
    got = decode(encode(error_message(1, InvalidInputError("\N{GRINNING FACE}" * 5000, **details))))
    assert got.body["code"] == "INVALID_INPUT"
    assert got.body["details"] == {}


def test_what_fits_is_told_as_it_is() -> None:
    got = decode(encode(error_message(1, OverloadedError("full", retry_after_s=0.5, note="z" * 3000))))
    assert got.body == {
        "code": "OVERLOADED",
        "message": "full",
        "details": {"retry_after_s": 0.5, "note": "z" * 3000},
    }
