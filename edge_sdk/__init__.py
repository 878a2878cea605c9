"""The device side of splitfleet: run a head here, its tail on a server.

>>> from edge_sdk import SplitClient
>>> with SplitClient("tcp://127.0.0.1:5555", bundle="bundles/abc") as client:  # doctest: +SKIP
...     reply = client.infer(image)

Names are imported when they are first used, so ``import edge_sdk`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_sdk.bundle import Bundle
    from edge_sdk.client import InferReply, SplitClient, Timing
    from edge_sdk.errors import SplitfleetError
    from edge_sdk.keys import CurveKeys

__all__ = ["Bundle", "CurveKeys", "InferReply", "SplitClient", "SplitfleetError", "Timing"]

_MODULES = {
    "Bundle": "edge_sdk.bundle",
    "CurveKeys": "edge_sdk.keys",
    "InferReply": "edge_sdk.client",
    "SplitClient": "edge_sdk.client",
    "SplitfleetError": "edge_sdk.errors",
    "Timing": "edge_sdk.client",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
