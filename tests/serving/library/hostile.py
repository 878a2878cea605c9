"""Messages that no well-behaved peer sends, as hypothesis strategies: each is a list of frames.

Most are right in most respects, so that each layer of the server sees its share; some are no messages at all.
"""

from __future__ import annotations

import struct

import msgpack
import numpy as np
from hypothesis import strategies as st

from edge_sdk.errors import OverloadedError, to_wire
from edge_sdk.protocol import (
    Body,
    CallDevice,
    FetchBlob,
    Heartbeat,
    ListDevices,
    LoadTail,
    PutBlob,
    Register,
    Resources,
    StatBlob,
    UnloadTail,
)
from edge_sdk.wire import MAGIC, MAX_HEADER_BYTES, Message, MessageType, Tensor, encode

Frames = list[bytes]
DIGEST = "0" * 64
RESOURCES = Resources(ram_bytes=1, ram_available_bytes=1, cores=1, architecture="x", runtimes={})
# A device that never answers must not hold its caller up for longer than a test.
CALLS: tuple[Body, ...] = (
    Register(device_id="a", resources=RESOURCES, model_ram_bytes=1),
    Heartbeat(device_id="a", progress=1),
    ListDevices(),
    CallDevice(device_id="a", device_method="device.run", params={}, stall_timeout_s=0.01),
    LoadTail(bundle=DIGEST),
    UnloadTail(bundle=DIGEST),
    StatBlob(sha256=DIGEST),
    FetchBlob(sha256=DIGEST, offset=0),
    PutBlob(sha256=DIGEST, size=10, offset=0),
)
# What msgpack itself would not make: nests, lengths that lie, text that is none, extensions, a byte that is never used.
RAW_VALUES = (
    *(level * depth + b"\xc0" for level in (b"\x91", b"\x81\xa1k") for depth in (20, 40, 500, 1000, 1020, 5000)),
    *(tag + length for tag in (b"\xdb", b"\xc6", b"\xdd", b"\xdf") for length in (b"\xff" * 4, b"\x7f\xff\xff\xff")),
    b"\xd9\x02\xff\xfe",
    b"\xd9\x03\xed\xa0\x80",
    b"\xd4\x00x",
    b"\xc7\x04\xff\x00\x00\x00\x00",
    b"\xd6\xff\x00\x00\x00\x00",
    b"\xc1",
    b"",
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([0, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
    | st.floats()
    | st.sampled_from([0.0, -0.0, 1e308, -1e308, 5e-324, float("inf"), float("nan")])
    | st.text(max_size=8)
    | st.sampled_from(["raw", "int8", "object", "O", "../..", "\x00", "a" * 300, "A" * 3000])
    | st.binary(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def frames_of(
    header: object,
    *,
    kind: int = MessageType.CALL,
    tensors: tuple[bytes, ...] = (),
    major: int = 1,
    flags: int = 0,
    count: int | None = None,
) -> Frames:
    """A message with that header, and a preamble that fits unless told otherwise."""
    count = len(tensors) if count is None else count
    return [MAGIC + bytes((major, kind, flags, count)), msgpack.packb(header), *tensors]


def golden(bundle: str = DIGEST) -> list[Frames]:
    """A right message of each kind, all but a request that a tail would run."""
    feature = Tensor(name="feature_0", data=np.ones((1, 2, 3), np.float32), scale=0.5, zero_point=1)
    calls = [
        Message(type=MessageType.CALL, request_id=n, method=call.method, body=call.to_body(), budget_s=5.0)
        for n, call in enumerate(CALLS, 1)
    ]
    others = [
        Message(type=MessageType.INFER, request_id=20, bundle=bundle, tensors=(feature,), budget_s=1.0),
        Message(type=MessageType.RESULT, request_id=21, bundle=bundle, body={"cloud_s": 0.1}, tensors=(feature,)),
        Message(type=MessageType.REPLY, request_id=22, body={"x": 1}),
        Message(type=MessageType.ERROR, request_id=23, body=to_wire(OverloadedError("full", retry_after_s=0.5))),
    ]
    return [[bytes(frame) for frame in encode(message)] for message in (*calls, *others)]


@st.composite
def odd_fields(draw: st.DrawFn) -> Frames:
    """A call some of whose fields are missing, or hold something else."""
    call = draw(st.sampled_from(CALLS))
    header = {"id": draw(st.integers(1, 6)), "method": call.method, "body": call.to_body(), "bundle": DIGEST}
    tensors = draw(st.lists(st.binary(max_size=12), max_size=2))
    header["tensors"] = [
        ["chunk" if n == 0 else "x", "uint8", [len(t)], None, None, "raw"] for n, t in enumerate(tensors)
    ]
    for _ in range(draw(st.integers(0, 2))):
        wrong = draw(st.sampled_from(["header", "body", "body", "spec", "gone"]))
        if wrong == "header":
            header[draw(st.sampled_from(["id", "method", "body", "bundle", "budget", "tensors", "news"]))] = draw(
                values
            )
        elif wrong == "body" and isinstance(header.get("body"), dict) and header["body"]:
            header["body"][draw(st.sampled_from(sorted(header["body"])))] = draw(values)
        elif wrong == "spec" and isinstance(header.get("tensors"), list) and tensors:
            spec = draw(st.sampled_from(header["tensors"])) if header["tensors"] else None
            if isinstance(spec, list) and spec:
                spec[draw(st.integers(0, len(spec) - 1))] = draw(values)
        elif wrong == "gone":
            header.pop(draw(st.sampled_from(sorted(header))), None)
    kind = draw(st.sampled_from([4, 4, 4, 4, 4, 1, 1, 2, 3, 5, 9]))
    count = len(tensors) if draw(st.integers(0, 9)) else draw(st.integers(0, 255))
    return [MAGIC + bytes((1, kind, 0, count)), msgpack.packb(header), *tensors]


@st.composite
def raw_headers(draw: st.DrawFn) -> Frames:
    """A header made by hand, with a value in it that no library packs, or a map that says another size."""
    keys = draw(st.lists(st.sampled_from(["id", "method", "body", "bundle", "budget", "tensors", "x"]), max_size=7))
    call = draw(st.sampled_from(CALLS))
    right = {"id": 7, "method": call.method, "body": call.to_body(), "budget": 50.0, "tensors": []}
    odd = draw(st.sampled_from(keys)) if keys else None
    packed = b"".join(
        msgpack.packb(key) + (draw(st.sampled_from(RAW_VALUES)) if key == odd else msgpack.packb(right.get(key)))
        for key in keys
    )
    size = len(keys) + draw(st.sampled_from([0, 0, 0, 1, -1, 5]))
    start = bytes((0x80 + size,)) if 0 <= size < 16 else b"\xdf" + struct.pack(">i", size)
    return [MAGIC + bytes((1, draw(st.sampled_from([1, 4, 4, 5])), 0, 0)), start + packed]


@st.composite
def odd_tensors(draw: st.DrawFn) -> Frames:
    """An INFER or a put whose tensors are not what their specs say."""
    count = draw(st.sampled_from([1, 1, 1, 2, 63, 64, 65, 255]))
    specs = [[f"feature_{number}", "int8", [1, 2, 3], 0.1, 3, "raw"] for number in range(count)]
    for _ in range(draw(st.integers(0, 3))):
        dimensions = st.lists(st.sampled_from([0, 1, 2, 6, 2**20, 2**31 - 1, 2**62]), max_size=10)
        specs[draw(st.integers(0, min(count, 3) - 1))][draw(st.integers(0, 5))] = draw(scalars | dimensions)
    tensors = tuple(
        draw(st.sampled_from([b"", b"x", b"123456", b"1" * 24, b"x" * 70_000])) for _ in range(min(count, 64))
    )
    header = {"id": draw(st.integers(1, 9)), "bundle": DIGEST, "tensors": specs}
    return frames_of(header, kind=draw(st.sampled_from([1, 1, 4])), tensors=tensors, count=min(count, 255))


@st.composite
def damaged(draw: st.DrawFn) -> Frames:
    """A message that was right, with a few bytes changed or cut off."""
    frames = list(draw(st.sampled_from(golden())))
    number = draw(st.integers(0, len(frames) - 1))
    data = bytearray(frames[number])
    for _ in range(draw(st.integers(1, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    frames[number] = bytes(data[: draw(st.integers(0, len(data)))])
    return frames


@st.composite
def shuffled(draw: st.DrawFn) -> Frames:
    """Frames of messages that were right: in another order, twice, left out, or of two messages mixed."""
    frames = draw(st.sampled_from(golden())) + draw(st.sampled_from([[], *golden()]))
    return draw(st.lists(st.sampled_from(frames), min_size=1, max_size=6) | st.permutations(frames))


no_messages = st.lists(st.binary(max_size=30), min_size=1, max_size=5) | st.sampled_from(
    [
        [b"x"] * 1000,
        [b""] * 70,
        [b"SPLF\x01\x04\x00\x00", b"\x00" * (MAX_HEADER_BYTES + 1)],
        [b"SPLF\x01\x04\x00\x00", b"\xa1" * MAX_HEADER_BYTES],
        [b"SPLF\x01\x01\x00\x01", msgpack.packb({"id": 1}), b"x" * 1_000_000],
        [b"SPLF\x02\x01\x00\x01", b"", b"x" * 1_000_000],
    ]
)
replays = st.sampled_from(golden())
anything = st.one_of(
    odd_fields(), odd_fields(), raw_headers(), odd_tensors(), damaged(), shuffled(), no_messages, replays
)
