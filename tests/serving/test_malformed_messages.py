"""Whatever bytes come in, the server answers the next peer; who can be made out is told what was wrong."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_sdk.errors import InvalidInputError, ProtocolError, SplitfleetError, UnsupportedVersionError
from edge_sdk.protocol import (
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
from edge_sdk.wire import MAGIC, MAX_HEADER_BYTES, Message, MessageType, decode, encode


def frames_of(header, *, kind=MessageType.CALL, tensors=(), major=1, flags=0, count=None):
    count = len(tensors) if count is None else count
    return [MAGIC + bytes((major, kind, flags, count)), msgpack.packb(header), *tensors]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (frames_of({"id": 9}, count=1), "promises 1 tensor frames, 0 came"),
        (frames_of({"id": 9}, tensors=(b"x",)), "1 tensor frames came with 0 tensor specs"),
        (frames_of({"id": 9, "tensors": [["a", "int8", [2], None, None, "raw"]]}, tensors=(b"x",)), "needs 2 bytes"),
        (frames_of({"id": 9, "tensors": [["a", "object", [1], None, None, "raw"]]}, tensors=(b"x",)), "dtype 'object'"),
        (frames_of({"id": 9, "tensors": [["a", "int8", [1], None, None, "zip"]]}, tensors=(b"x",)), "codec 'zip'"),
        (frames_of({"id": 9, "tensors": [["a", "int8", [1] * 9, None, None, "raw"]]}, tensors=(b"x",)), "at most 8"),
        (frames_of({"id": 9, "bundle": "../x"}), "64 lower-case hex digits"),
        (frames_of({"id": 9, "budget": float("nan")}), "finite number"),
        (frames_of({"id": 9, "body": [1]}), "'body' has type list"),
        (frames_of({"id": 9}, kind=MessageType.INFER, count=3), "promises 3"),
    ],
)
def test_a_malformed_request_with_an_id_is_answered(running, frames, reason):
    peer = running.peer()
    peer.send_frames(frames)
    with pytest.raises(ProtocolError, match=reason):
        peer.end_of(9)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b""],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b"SPLF\x01\x04\x00\x00"],
        [b"SPLF\x01\x04\x00\x00", b"\xc1"],
        [b"SPLF\x01\x04\x00\x00", b"\x81" * 5000],
        [b"SPLF\x01\x04\x00\x00", b"\x91" * 5000 + b"\xc0"],
        [b"SPLF\x01\x04\x00\x00", msgpack.packb({"id": -1})],
        [b"SPLF\x01\x04\x00\x00", msgpack.packb({"id": 2**64 - 1})[:-1]],
        [b"SPLF\x01\x04\x00\x00", msgpack.packb({"id": True})],
        [b"SPLF\x01\x04\x00\x00", msgpack.packb({"id": 1, "x": b"x" * MAX_HEADER_BYTES})],
        [b"SPLF\x01\x63\x00\x00", msgpack.packb({"id": 1})],
        [b"SPLF\x01\x04\x01\x00", msgpack.packb({"id": 1})],
        [b"SPLF\x02\x04\x00\x00", msgpack.packb({"id": 1})],
        [b"x"] * 1000,
    ],
)
def test_what_has_no_addressee_is_dropped_and_counted(running, frames):
    peer = running.peer()
    peer.send_frames(frames)
    assert peer.call(ListDevices()).body["devices"] == []
    assert running.server.dropped == {"malformed messages": 1}


@pytest.mark.parametrize("kind", [1, 2, 4, 5, 99])
def test_another_major_version_is_refused_in_version_1(running, kind):
    peer = running.peer()
    peer.send_frames([MAGIC + bytes((2, kind, 0, 0)), b"whatever that is in version 2"])
    assert peer.call(ListDevices()).body["devices"] == []
    (notice,) = peer.notices
    assert isinstance(notice, UnsupportedVersionError)
    assert "version 2 is not spoken here, version 1 is" in notice.message
    assert running.server.dropped == {"malformed messages": 1}


def test_an_error_of_another_major_version_is_not_answered(running):
    peer = running.peer()
    peer.send_frames([MAGIC + bytes((2, MessageType.ERROR, 0, 0)), b"you speak another version"])
    assert peer.call(ListDevices()).body["devices"] == []
    assert peer.notices == []


@pytest.mark.parametrize("kind", [MessageType.REPLY, MessageType.ERROR, MessageType.RESULT])
def test_answers_that_nobody_waits_for_are_dropped_and_counted(running, kind):
    peer = running.peer()
    peer.send(Message(type=kind, request_id=3))
    # Malformed ones too: an error to an answer would be taken for an answer.
    peer.send_frames(frames_of({"id": 1}, kind=kind, count=1))
    assert peer.call(ListDevices()).body["devices"] == []
    assert running.server.dropped.total() == 2


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
RESOURCES = Resources(ram_bytes=1, ram_available_bytes=1, cores=1, architecture="x", runtimes={})
DIGEST = "0" * 64
CALLS = [
    Register(device_id="a", resources=RESOURCES, model_ram_bytes=1),
    Heartbeat(device_id="a", progress=1),
    ListDevices(),
    CallDevice(device_id="a", device_method="device.run", params={}, stall_timeout_s=1.0),
    LoadTail(bundle=DIGEST),
    UnloadTail(bundle=DIGEST),
    StatBlob(sha256=DIGEST),
    FetchBlob(sha256=DIGEST, offset=0),
    PutBlob(sha256=DIGEST, size=10, offset=0),
]


@st.composite
def messages(draw):
    """Frames that are right in most respects and wrong in some: so that each layer sees its share."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.lists(st.binary(max_size=30), min_size=1, max_size=5))
    call = draw(st.sampled_from(CALLS))
    header = {"id": draw(st.integers(0, 5)), "method": call.method, "body": call.to_body(), "bundle": DIGEST}
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


def test_the_server_answers_after_whatever_came(running, caplog):
    peer, other = running.peer(), running.peer()

    @settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(messages())
    def fuzz(frames):
        peer.send_frames(frames)
        asked = other.begin(ListDevices())
        assert other.end_of(asked).type is MessageType.REPLY
        while peer.has_message():
            # Whatever is said to it is well-formed, and never that the server did not know what to do.
            answer = decode(peer.socket.recv_multipart())
            assert answer.body.get("code") != "INTERNAL"

    fuzz()
    assert "Traceback" not in caplog.text


whole = st.sampled_from(CALLS).map(
    lambda call: [
        bytes(frame)
        for frame in encode(
            Message(type=MessageType.CALL, request_id=1, method=call.method, body=call.to_body(), bundle=DIGEST)
        )
    ]
)


@st.composite
def damaged(draw):
    """A message that was right, with a few bytes changed, cut off or repeated."""
    frames = list(draw(whole))
    number = draw(st.integers(0, len(frames) - 1))
    data = bytearray(frames[number])
    for _ in range(draw(st.integers(1, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    frames[number] = bytes(data[: draw(st.integers(0, len(data)))])
    return frames + draw(st.lists(st.sampled_from(frames), max_size=2))


def test_damaged_messages_cost_nothing_but_themselves(running):
    peer = running.peer()

    @settings(max_examples=300, deadline=None)
    @given(damaged())
    def damage(frames):
        peer.send_frames(frames)

    damage()
    other = running.peer()
    assert other.call(ListDevices()).type is MessageType.REPLY


def test_a_stranger_on_the_port_costs_nothing(running):
    import socket

    host, port = running.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert running.peer().call(ListDevices()).body["devices"] == []


def test_every_answer_to_a_wrong_body_is_an_error_with_its_class(running):
    peer = running.peer()
    for request_id, call in enumerate(CALLS, start=100):
        peer.send(Message(type=MessageType.CALL, request_id=request_id, method=call.method, body={"x": 1}))
        if isinstance(call, ListDevices):
            peer.end_of(request_id)
            continue
        with pytest.raises(InvalidInputError, match="is missing") as raised:
            peer.end_of(request_id)
        assert isinstance(raised.value, SplitfleetError)


def test_decode_is_what_the_server_uses_and_cannot_unpickle():
    import edge_sdk.wire as wire

    assert "pickle" not in vars(wire)
    with pytest.raises(ProtocolError):
        decode(
            [
                MAGIC + bytes((1, 1, 0, 1)),
                msgpack.packb({"id": 1, "tensors": [["a", "O", [1], None, None, "raw"]]}),
                b"cos\nsystem\n",
            ]
        )
