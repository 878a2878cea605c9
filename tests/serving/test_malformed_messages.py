"""Whatever bytes come in, the server answers the next peer; who can be made out is told what was wrong."""

from __future__ import annotations

import random
import time

import hostile
import msgpack
import numpy as np
import pytest
from hostile import CALLS, frames_of
from hypothesis import HealthCheck, given, settings
from raw_zmtp import COMMAND, GREETING, MORE, RawPeer, frame, message, ready

from edge_sdk.errors import WIRE_CLASSES, InvalidInputError, ProtocolError, SplitfleetError, UnsupportedVersionError
from edge_sdk.protocol import NOTICE_ID, ListDevices
from edge_sdk.wire import MAGIC, MAX_HEADER_BYTES, Message, MessageType, decode


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


class Crowd:
    """One peer that sends whatever, one that asks for something right beside it, and the accounts of both."""

    def __init__(self, running, digest, feature):
        self.sent = 0
        self.answered = 0
        self._running = running
        self._hostile, self._good = running.peer(), running.peer()
        self._digest, self._feature = digest, feature

    def send(self, frames):
        """Send it, and be served beside it."""
        self._hostile.send_frames(frames)
        self.sent += 1
        asked = self.sent % 100
        result = self._good.infer(self._digest, self._feature(asked))
        assert np.all(result.tensors[0].data == asked)
        self._read()

    def _read(self, wait_ms=0):
        while self._hostile.socket.poll(wait_ms):
            # Whatever is said to it is well-formed, and never that the server did not know what to do.
            answer = decode(self._hostile.socket.recv_multipart())
            if answer.type is MessageType.CALL:
                # It has registered as a device, and it is called: nobody answers.
                continue
            if answer.request_id == NOTICE_ID and answer.body["code"] in ("UNSUPPORTED_VERSION", "GOING_AWAY"):
                continue
            self.answered += 1
            assert answer.type is not MessageType.ERROR or answer.body["code"] in WIRE_CLASSES
            assert answer.body.get("code") != "INTERNAL"

    def check(self):
        """Each message had an answer, or was dropped for a reason that is counted."""
        self._running.stop()
        # What is under way then is told that the server goes away.
        self._running.join()
        self._read(wait_ms=500)
        dropped = self._running.server.dropped
        assert set(dropped) <= {
            "malformed messages",
            "requests with an id that is under way",
            "late answers",
            "late outcomes",
            "unexpected results",
        }
        assert self.sent == self.answered + dropped.total() - dropped["late outcomes"]


@pytest.fixture
def crowd(running, make_bundle, feature):
    bundle = make_bundle()
    running.ready(bundle)
    return Crowd(running, bundle.digest, feature)


@pytest.mark.parametrize(
    "strategy",
    [
        hostile.odd_fields(),
        hostile.raw_headers(),
        hostile.odd_tensors(),
        hostile.damaged(),
        hostile.shuffled(),
        hostile.no_messages,
        hostile.replays,
    ],
    ids=["odd fields", "raw headers", "odd tensors", "damaged", "shuffled", "no messages", "replays"],
)
def test_whatever_comes_is_answered_or_dropped_for_a_reason_and_others_are_served(crowd, strategy, caplog):
    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def fuzz(frames):
        crowd.send(frames)

    fuzz()
    crowd.check()
    assert "Traceback" not in caplog.text


def test_a_request_cannot_have_the_id_of_notices(running):
    peer = running.peer()
    peer.send_frames(frames_of({"id": NOTICE_ID, "method": "fleet.devices"}))
    # No answer could be told from a notice, so it is one.
    assert peer.call(ListDevices()).body["devices"] == []
    (notice,) = peer.notices
    assert isinstance(notice, ProtocolError)
    assert "that of notices" in notice.message


def garbage():
    """What is said on the port, by what it is."""
    noise = random.Random(1).randbytes(100_000)
    return {
        "nothing": b"",
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "tls": bytes.fromhex("16030100c8010000c40303") + noise[:200],
        "noise": noise,
        "zeros": bytes(100_000),
        "half a signature": GREETING[:5],
        "half a greeting": GREETING[:40],
        "a greeting and no more": GREETING,
        "another mechanism": GREETING[:12] + b"PLAIN".ljust(20, b"\0") + GREETING[32:],
        "an old version": b"\xff" + bytes(8) + b"\x7f\x01\x05",
        "a version of the future": GREETING[:10] + b"\x09" + GREETING[11:] + ready(),
        "half a handshake": GREETING + ready()[:10],
        "another kind of socket": GREETING + ready(kind="PUB"),
        "no kind of socket": GREETING + frame(b"\x05READY", flags=COMMAND),
        "properties that lie about their length": GREETING
        + frame(b"\x05READY\x0bSocket-Type\xff\xff\xff\xffDEALER", flags=COMMAND),
        "a routing id of 300 bytes": GREETING + ready(b"x" * 300) + message(b"x"),
        "an unknown command": GREETING + ready() + frame(b"\x04PANG", flags=COMMAND),
        "commands without end": GREETING + ready() + frame(b"\x04PING\x00\x00", flags=COMMAND) * 20_000,
        "an empty command": GREETING + ready() + frame(b"", flags=COMMAND),
        "a frame of 2 ** 63 bytes": GREETING + ready() + b"\x02" + b"\x7f" + b"\xff" * 7,
        "a frame of 1 GB that does not come": GREETING + ready() + b"\x02" + (10**9).to_bytes(8, "big") + b"x",
        "half a frame": GREETING + ready() + b"\x01\x64abc",
        "half a message": GREETING + ready() + frame(b"SPLF\x01\x04\x00\x00", flags=MORE),
        "reserved flags": GREETING + ready() + b"\xf8\x01x",
        "empty frames": GREETING + ready() + message(*([b""] * 50_000)),
    }


@pytest.mark.parametrize("what", garbage())
def test_garbage_on_the_port_costs_nothing_but_its_connection(running, what):
    with RawPeer(running.endpoint) as stranger:
        stranger.send(garbage()[what])
        peer = running.peer()
        assert peer.call(ListDevices()).body["devices"] == []
    assert peer.call(ListDevices()).body["devices"] == []
    # The stranger's connection is gone with it.
    deadline = time.monotonic() + 20
    while running.in_loop(lambda: running.server.connections) != 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def own_memory_bytes(process):
    """What is no file's; of the server alone."""
    return process.memory_full_info().uss


@pytest.mark.exhaustive
def test_12000_messages_of_all_kinds_neither_end_nor_grow_a_server(served, connect):
    """Against the real thing, which is asked something right after each."""
    # A line for each request that fails would fill the pipe that nobody reads until the end.
    server = served("--bind", "tcp://127.0.0.1:*", "--log-level", "warning")
    process = server.server
    bad, good = connect(server.ready["endpoint"]), connect(server.ready["endpoint"])
    sizes = []
    sent = 0

    @settings(max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(hostile.anything)
    def fuzz(frames):
        nonlocal sent
        bad.send_frames(frames)
        sent += 1
        good.call(ListDevices())
        while bad.has_message():
            assert decode(bad.socket.recv_multipart()).body.get("code") != "INTERNAL"

    while sent < 12_000:
        fuzz()
        sizes.append(own_memory_bytes(process))
    assert server.server.pid == process.pid
    # What it keeps at most is a device, and a few counts by name.
    assert max(sizes[2:]) < 1.05 * sizes[1], sizes
    code, _, err = server.end()
    assert code == 0
    assert "Traceback" not in err
    assert "started again" not in err


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
