"""One tree of errors; each code of the wire belongs to exactly one class."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from edge_sdk import errors
from edge_sdk.errors import SplitfleetError, from_wire, to_wire


def all_classes(cls: type[SplitfleetError] = SplitfleetError) -> list[type[SplitfleetError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in all_classes(child))]


OWN = [cls for cls in all_classes() if cls.__module__ == errors.__name__]


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    drawn = re.findall(r"(\w+Error)(?: +([A-Z_]{5,}))?", errors.__doc__ or "")
    names = {name: code or None for name, code in drawn if hasattr(errors, name)}
    assert set(names) == {cls.__name__ for cls in OWN}
    for cls in OWN:
        assert names[cls.__name__] == vars(cls).get("wire_code"), cls


def test_each_code_maps_to_one_class() -> None:
    codes = Counter(vars(cls)["wire_code"] for cls in OWN if vars(cls).get("wire_code"))
    assert set(codes.values()) == {1}
    assert {code: cls.__name__ for code, cls in errors.WIRE_CLASSES.items()} == {
        vars(cls)["wire_code"]: cls.__name__ for cls in OWN if vars(cls).get("wire_code")
    }


@pytest.mark.parametrize("code", errors.WIRE_CLASSES)
def test_an_error_survives_the_wire(code: str) -> None:
    sent = errors.WIRE_CLASSES[code]("what was wrong", retry_after_s=0.5)
    got = from_wire(to_wire(sent))
    assert (type(got), got.message, got.details) == (type(sent), sent.message, sent.details)


def test_a_local_error_and_a_foreign_exception_become_internal() -> None:
    assert to_wire(errors.ConfigError("a file"))["code"] == "INTERNAL"
    body = to_wire(ZeroDivisionError("oops"))
    assert body["code"] == "INTERNAL"
    assert "ZeroDivisionError" in body["message"]


@pytest.mark.parametrize("body", [{}, {"code": "NEW", "message": 5}, {"code": None, "details": 7}, {"details": {1: 2}}])
def test_an_unknown_or_odd_body_is_still_an_error(body: dict[str, object]) -> None:
    assert isinstance(from_wire(body), errors.RemoteInternalError)
