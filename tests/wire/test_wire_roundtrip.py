"""Whatever version 1 can say comes back as it was said, and nothing else comes back at all."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_sdk import wire
from edge_sdk.errors import ProtocolError, UnsupportedVersionError
from edge_sdk.wire import Message, MessageType, Tensor

ARRAYS = st.sampled_from(sorted(wire.DTYPES)).flatmap(
    lambda name: hnp.arrays(
        np.dtype(name), hnp.array_shapes(min_dims=0, max_dims=wire.MAX_RANK, min_side=0, max_side=3)
    )
)
SCALES = st.none() | st.floats(min_value=1e-30, max_value=1e30)
TENSORS = st.builds(
    Tensor,
    name=st.text(min_size=1, max_size=20),
    data=ARRAYS,
    scale=SCALES,
    zero_point=st.none() | st.integers(-(2**31), 2**31),
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=9)
)
BODIES = st.dictionaries(
    st.text(max_size=9),
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_size=5,
)
MESSAGES = st.builds(
    Message,
    type=st.sampled_from(MessageType),
    request_id=st.integers(0, 2**64 - 1),
    method=st.none() | st.text(max_size=20),
    bundle=st.none() | st.text("0123456789abcdef", min_size=64, max_size=64),
    budget_s=st.none() | st.floats(0, 1e6),
    body=BODIES,
    tensors=st.lists(TENSORS, max_size=4, unique_by=lambda tensor: tensor.name).map(tuple),
)


def frames_of(message: Message) -> list[bytes]:
    return [bytes(frame) for frame in wire.encode(message)]


@given(MESSAGES)
def test_a_message_survives_the_wire(message: Message) -> None:
    decoded = wire.decode(frames_of(message))
    assert (decoded.type, decoded.request_id, decoded.method) == (message.type, message.request_id, message.method)
    assert (decoded.bundle, decoded.body) == (message.bundle, message.body)
    assert decoded.budget_s == (None if message.budget_s is None else pytest.approx(message.budget_s))
    for got, sent in zip(decoded.tensors, message.tensors, strict=True):
        assert (got.name, got.scale, got.zero_point) == (sent.name, sent.scale, sent.zero_point)
        assert (got.data.dtype, got.data.shape) == (sent.data.dtype, sent.data.shape)
        assert got.data.tobytes() == sent.data.tobytes()


@given(MESSAGES, st.data())
def test_damaged_frames_decode_or_raise_a_typed_error(message: Message, data: st.DataObject) -> None:
    frames = frames_of(message)
    which = data.draw(st.integers(0, len(frames) - 1))
    damage = data.draw(st.sampled_from(["truncate", "extend", "flip", "drop", "repeat", "garbage"]))
    frame = bytearray(frames[which])
    if damage == "truncate":
        frame = frame[: data.draw(st.integers(0, max(len(frame) - 1, 0)))]
    elif damage == "extend":
        frame += data.draw(st.binary(min_size=1, max_size=9))
    elif damage == "flip" and frame:
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    elif damage == "garbage":
        frame = bytearray(data.draw(st.binary(max_size=64)))
    frames[which] = bytes(frame)
    if damage == "drop":
        del frames[which]
    elif damage == "repeat":
        frames.insert(which, frames[which])
    with contextlib.suppress(ProtocolError):
        assert isinstance(wire.decode(frames), Message)
    wire.request_id_of(frames)


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_strangers_are_refused(frames: list[bytes]) -> None:
    if not (frames and frames[0].startswith(wire.MAGIC)):
        with pytest.raises(ProtocolError):
            wire.decode(frames)


def test_a_strided_and_a_big_endian_array_arrive_with_their_values() -> None:
    strided = np.arange(24, dtype=np.int32).reshape(4, 6)[::2, ::3]
    big = np.arange(3, dtype=">i4")
    message = Message(
        type=MessageType.INFER,
        request_id=1,
        tensors=(Tensor(name="strided", data=strided), Tensor(name="big", data=big)),
    )
    arrays = wire.decode(frames_of(message)).arrays()
    np.testing.assert_array_equal(arrays["strided"], strided)
    np.testing.assert_array_equal(arrays["big"], big)


def test_decoded_tensors_cannot_be_written_to() -> None:
    message = Message(type=MessageType.INFER, request_id=1, tensors=(Tensor(name="x", data=np.zeros(3)),))
    with pytest.raises(ValueError, match="read-only"):
        wire.decode([bytearray(frame) for frame in frames_of(message)]).tensors[0].data[0] = 1


BASE = Message(
    type=MessageType.INFER,
    request_id=5,
    tensors=(Tensor(name="x", data=np.zeros((2, 3), np.int8), scale=0.5, zero_point=0),),
)


def damaged(**changes: Any) -> list[bytes]:
    """BASE with header keys replaced; ``spec`` replaces fields of the tensor spec by position."""
    frames = frames_of(BASE)
    header = msgpack.unpackb(frames[1])
    for position, value in changes.pop("spec", {}).items():
        header["tensors"][0][position] = value
    header.update(changes)
    frames[1] = msgpack.packb(header)
    return frames


def preamble(value: bytes) -> list[bytes]:
    return [value, *frames_of(BASE)[1:]]


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([], "at least 2 frames"),
        ([b"SPLF\x01\x01\x00\x00"], "at least 2 frames"),
        (preamble(b"HTTP/1.1"), "not a splitfleet preamble"),
        (preamble(b"SPLF\x01\x01\x00"), "not a splitfleet preamble"),
        (preamble(b"SPLF\x01\x01\x00\x01\x00"), "not a splitfleet preamble"),
        (preamble(b"SPLF\x01\x63\x00\x01"), "message type 99 is not known"),
        (preamble(b"SPLF\x01\x01\x80\x01"), "flags must be 0"),
        (preamble(b"SPLF\x01\x01\x00\x02"), "promises 2 tensor frames, 1 came"),
        (preamble(b"SPLF\x01\x01\x00\xff"), "at most 64 tensors"),
        ([*frames_of(BASE)[:1], b"\xc1", b"123456"], "not msgpack"),
        ([*frames_of(BASE)[:1], b"\x91\x01", b"123456"], "not a map"),
        ([*frames_of(BASE)[:1], b"\x80", b"123456"], "'id' is missing"),
        ([*frames_of(BASE)[:1], b"\xc1" * (wire.MAX_HEADER_BYTES + 1), b""], "at most 16384"),
        (damaged(id="7"), "'id' has type str"),
        (damaged(id=True), "'id' has type bool"),
        (damaged(id=-1), "unsigned 64-bit"),
        (damaged(bundle="ABC"), "64 lower-case hex digits"),
        (damaged(budget=float("nan")), "finite number"),
        (damaged(method=3), "'method' has type int"),
        (damaged(body=[1]), "'body' has type list"),
        (damaged(tensors=[]), "1 tensor frames came with 0 tensor specs"),
        (damaged(tensors=[["x"]]), "a tensor spec must be"),
        (damaged(spec={0: ""}), "a tensor name"),
        (damaged(spec={1: "object"}), "dtype 'object'"),
        (damaged(spec={1: "O"}), "dtype 'O'"),
        (damaged(spec={1: ["int8"]}), "is not one of"),
        (damaged(spec={2: [2, 4]}), "needs 8 bytes, 6 came"),
        (damaged(spec={2: [-2, -3]}), "non-negative integers"),
        (damaged(spec={2: [1] * 9}), "at most 8"),
        (damaged(spec={2: [2**31, 2**31, 2**31]}), "non-negative integers"),
        (damaged(spec={2: [2**30] * 8}), "bytes, 6 came"),
        (damaged(spec={2: [2.0, 3]}), "non-negative integers"),
        (damaged(spec={3: -1.0}), "positive finite float"),
        (damaged(spec={3: float("inf")}), "positive finite float"),
        (damaged(spec={4: 0.5}), "zero point must be an integer"),
        (damaged(spec={5: "pickle"}), "codec 'pickle' is not known"),
    ],
)
def test_each_fault_is_named(frames: list[bytes], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        wire.decode(frames)


def test_another_major_version_is_refused_as_such() -> None:
    with pytest.raises(UnsupportedVersionError, match="version 2 is not spoken here"):
        wire.decode(preamble(b"SPLF\x02\x01\x00\x01"))


def test_unknown_header_keys_are_ignored() -> None:
    assert wire.decode(damaged(trace="abc", later={"a": [1]})).request_id == 5


def test_nesting_bombs_are_refused() -> None:
    bomb = b"\x82\xa2id\x01\xa4body" + b"\x91" * 8000 + b"\x01"
    with pytest.raises(ProtocolError, match="not msgpack"):
        wire.decode([b"SPLF\x01\x01\x00\x00", bomb])


def nested(depth: int, *, maps: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"k": value} if maps else [value]
    return value


@pytest.mark.parametrize("maps", [True, False])
def test_a_body_may_be_nested_but_not_without_a_bound(maps: bool) -> None:
    # The body itself is the first level.
    fits = Message(type=MessageType.CALL, request_id=1, body={"x": nested(wire.MAX_BODY_DEPTH - 1, maps=maps)})
    assert wire.decode(frames_of(fits)) == fits
    too_deep = {"x": nested(wire.MAX_BODY_DEPTH, maps=maps)}
    with pytest.raises(ProtocolError, match="nested deeper than 32"):
        wire.encode(Message(type=MessageType.CALL, request_id=1, body=too_deep))
    with pytest.raises(ProtocolError, match="nested deeper than 32"):
        wire.decode(damaged(body=too_deep))


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("depth", [33, 500, 900, 1000, 1020, 5000])
@pytest.mark.parametrize("place", ["id", "method", "bundle", "budget", "body", "tensors", "x", 0, 1, 2, 3, 4, 5])
def test_whatever_is_nested_however_deep_is_a_message_or_a_protocol_error(
    place: str | int, depth: int, maps: bool
) -> None:
    # Packed by hand: msgpack itself packs to a depth of 511 and unpacks to one of 1024.
    bomb = (b"\x81\xa1k" if maps else b"\x91") * depth + b"\xc0"
    header = {"id": b"\x01"} | ({place: bomb} if isinstance(place, str) else {})
    spec = [msgpack.packb(value) for value in ("a", "int8", [1], None, None, "raw")]
    if isinstance(place, int):
        spec[place] = bomb
        header["tensors"] = b"\x91\x96" + b"".join(spec)
    packed = bytes((0x80 + len(header),)) + b"".join(msgpack.packb(key) + value for key, value in header.items())
    frames = [b"SPLF\x01\x04\x00" + bytes((isinstance(place, int),)), packed, *([b"x"] * isinstance(place, int))]
    if place == "x" and depth < 1023:
        assert wire.decode(frames).request_id == 1
    else:
        with pytest.raises(ProtocolError):
            wire.decode(frames)


@pytest.mark.parametrize("shape", [[0, 2**62, 8], [2**63, 0], [2**20, 2**20, 0, 2**20], [0, 2**64 - 1]])
def test_an_empty_tensor_of_endless_sides_is_refused(shape: list[int]) -> None:
    packed = msgpack.packb({"id": 1, "tensors": [["a", "int8", shape, None, None, "raw"]]})
    with pytest.raises(ProtocolError, match=r"exceeds|non-negative"):
        wire.decode([b"SPLF\x01\x01\x00\x01", packed, b""])


def test_two_tensors_of_one_name_are_refused() -> None:
    twice = Message(type=MessageType.INFER, request_id=1, tensors=(Tensor(name="x", data=np.zeros(1)),) * 2)
    with pytest.raises(ProtocolError, match="same name"):
        wire.decode(frames_of(twice))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Message(type=MessageType.INFER, request_id=1, body={"x": "y" * 20000}), "the header has"),
        (Message(type=MessageType.INFER, request_id=1, body={"x": object()}), "cannot be packed"),
        (
            Message(type=MessageType.INFER, request_id=1, tensors=(Tensor(name="x", data=np.array([None])),)),
            "dtype object",
        ),
        (
            Message(type=MessageType.INFER, request_id=1, tensors=(Tensor(name="x", data=np.zeros((1,) * 9)),)),
            "rank 9",
        ),
        (
            Message(
                type=MessageType.INFER,
                request_id=1,
                tensors=tuple(Tensor(name=str(number), data=np.zeros(1)) for number in range(65)),
            ),
            "at most 64 tensors",
        ),
    ],
)
def test_what_version_1_cannot_say_is_refused_before_it_is_sent(message: Message, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        wire.encode(message)


def test_request_id_of_a_refused_message_is_found_where_it_can_be() -> None:
    assert wire.request_id_of(damaged(spec={1: "object"})) == 5
    assert wire.request_id_of([b"SPLF\x01\x01\x00\x00", b"\xc1"]) is None
    assert wire.request_id_of([b"nonsense"]) is None


def test_a_pickle_on_the_wire_is_never_opened() -> None:
    """Each place where bytes come in gets a pickle that would leave a trace; none of them runs."""
    program = f"""
import sys
import edge_sdk.wire as wire
class Trap(Exception): pass
def trap(*args, **kwargs): raise Trap
import pickle, _pickle
pickle.loads = pickle.load = _pickle.loads = _pickle.load = pickle.Unpickler = trap
bomb = {pickle.dumps(copy.copy)!r}
for frames in ([bomb, bomb], [b"SPLF\\x01\\x01\\x00\\x00", bomb], [b"SPLF\\x01\\x01\\x00\\x01", bomb, bomb]):
    try:
        wire.decode(frames)
        sys.exit("decoded a pickle")
    except wire.ProtocolError:
        pass
print("refused")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "refused\n"), result.stderr


def test_object_arrays_cannot_be_described() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([1], dtype=object), allow_pickle=True)
    for spelling in ("object", "O", "|O", "V8", "U4", "complex64", "datetime64[s]"):
        with pytest.raises(ProtocolError, match="dtype"):
            wire.decode(damaged(spec={1: spelling}))
