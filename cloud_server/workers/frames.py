"""What the server and its workers say to each other, over stream sockets.

A frame is a head of 24 bytes (kind, samples, bytes of the payload, seconds) and a payload. What is in the payload:

=============  ========  ===========================================================================================
kind           to        payload
=============  ========  ===========================================================================================
``BATCH``      worker    the features of ``samples`` samples, one tensor after another, in the manifest's order
``OUTPUTS``    server    likewise the outputs, as float32; ``seconds`` is how long they were computed
``FAILED``     server    of a batch: msgpack of an ERROR's body, and ``traceback``
``HELLO``      server    msgpack: nothing; the worker is up
``LOAD``       worker    msgpack: ``tail``, ``path``; the descriptor of the tail's line comes along
``LOADED``     server    msgpack: ``tail``, ``engine``, ``reason``, ``rss_bytes``, or ``error`` like ``FAILED``
``UNLOAD``     worker    msgpack: ``tail``; the server has closed the tail's line before
``UNLOADED``   server    msgpack: ``tail``, ``rss_bytes``
=============  ========  ===========================================================================================

The first three go over the line of one tail, one batch at a time; both ends know dtypes and shapes from the same
manifest. The others go over the control connection.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from typing import Any

import msgpack

from edge_sdk.errors import SplitfleetError, from_wire, to_wire

HEAD = Struct("<IIQd")
HEAD_BYTES = HEAD.size


class Kind(IntEnum):
    """What a frame says."""

    BATCH = 1
    OUTPUTS = 2
    FAILED = 3
    HELLO = 4
    LOAD = 5
    LOADED = 6
    UNLOAD = 7
    UNLOADED = 8


def pack(kind: Kind, body: Mapping[str, Any]) -> bytes:
    """A frame whose payload is ``body``."""
    payload = msgpack.packb(dict(body), use_bin_type=True)
    return HEAD.pack(kind, 0, len(payload), 0.0) + bytes(payload)


def unpack(payload: bytes | memoryview) -> dict[str, Any]:
    """The body that :func:`pack` was given."""
    body: dict[str, Any] = msgpack.unpackb(payload, raw=False)
    return body


def error_body(error: BaseException) -> dict[str, Any]:
    """An error as it crosses; one that nobody foresaw with its traceback."""
    body = to_wire(error)
    # Details are for people, whatever they are: what msgpack cannot say becomes text.
    body["details"] = {key: _sayable(value) for key, value in body["details"].items()}
    cause = error if not isinstance(error, SplitfleetError) else error.__cause__
    if cause is not None:
        body["traceback"] = "".join(traceback.format_exception(cause))
    return body


def error_of(body: Mapping[str, Any]) -> SplitfleetError:
    """The error that :func:`error_body` made a body of."""
    return from_wire(body)


def _sayable(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
