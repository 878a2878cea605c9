"""Frames between the server and a worker: whole, in order, and without waiting, however the kernel cuts them."""

from __future__ import annotations

import os
import socket
import threading

import numpy as np
import pytest

from cloud_server.loop import Loop
from cloud_server.tail_signature import TailSignature
from cloud_server.workers.frames import HEAD, Kind, error_body, error_of, pack, unpack
from cloud_server.workers.stream import Stream, stream_pair
from edge_sdk.errors import OverloadedError, RemoteInternalError
from edge_sdk.wire import Tensor

PATIENCE_S = 20


class End:
    """A stream in an event loop, and a plain socket at its other end."""

    def __init__(self):
        self.loop = Loop()
        ours, self.other = stream_pair()
        self.other.settimeout(PATIENCE_S)
        self.frames = []
        self.lost = 0
        self.stream = Stream(self.loop, ours, on_frame=self._came, on_lost=self._lose)

    def _came(self, kind, samples, payload, seconds):
        self.frames.append((kind, samples, bytes(payload), seconds))

    def _lose(self):
        self.lost += 1

    def until(self, done):
        while not done():
            self.loop.wait(self.loop.clock() + 0.05)


@pytest.fixture
def end():
    it = End()
    yield it
    it.stream.close()
    it.other.close()
    it.loop.close()


def test_frames_come_whole_however_they_are_cut(end):
    draw = np.random.default_rng(0)
    sent = [(Kind.OUTPUTS, n, draw.bytes(size), n / 4) for n, size in enumerate((0, 1, 70_000, 5, 300_000, 0, 64))]
    data = b"".join(HEAD.pack(kind, n, len(payload), s) + payload for kind, n, payload, s in sent)

    def send():
        at = 0
        while at < len(data):
            size = int(draw.choice((1, 7, 23, 24, 25, 4096, 100_000)))
            end.other.sendall(data[at : at + size])
            at += size

    thread = threading.Thread(target=send)
    thread.start()
    end.until(lambda: len(end.frames) == len(sent))
    thread.join()
    assert end.frames == sent


def test_many_and_large_buffers_leave_in_order_without_waiting(end):
    draw = np.random.default_rng(1)
    # More buffers than one call takes, more bytes than the kernel keeps.
    buffers = [draw.integers(0, 255, (3, 1000), np.uint8) for _ in range(3000)]
    end.stream.send(*buffers)
    end.stream.send(b"the end")
    expected = b"".join(each.tobytes() for each in buffers) + b"the end"
    came = bytearray()

    def receive():
        while len(came) < len(expected):
            came.extend(end.other.recv(1 << 16))

    thread = threading.Thread(target=receive)
    thread.start()
    end.until(lambda: not thread.is_alive() or len(came) == len(expected))
    thread.join()
    assert bytes(came) == expected


def test_a_descriptor_goes_along_with_its_message(end):
    reading, writing = os.pipe()
    end.stream.send(b"one")
    end.stream.send(b"two", descriptor=writing)
    end.stream.send(b"three")
    os.close(writing)
    end.until(lambda: not end.stream._leaving)
    assert end.other.recv(3) == b"one"
    data, descriptors, _, _ = socket.recv_fds(end.other, 3, 1)
    assert data == b"two"
    os.write(descriptors[0], b"hello")
    os.close(descriptors[0])
    assert os.read(reading, 100) == b"hello"
    # Nobody else has it any more.
    assert os.read(reading, 100) == b""
    os.close(reading)
    assert end.other.recv(5) == b"three"


@pytest.mark.parametrize("amid", ["silence", "a frame", "a head"])
def test_the_end_of_the_other_side_is_told_once(end, amid):
    if amid != "silence":
        end.other.sendall(HEAD.pack(Kind.OUTPUTS, 1, 100, 0.0)[: 10 if amid == "a head" else 24])
        end.loop.wait(0.0)
    end.other.close()
    end.until(lambda: end.lost)
    end.loop.wait(0.0)
    end.stream.send(b"to nobody")
    assert end.lost == 1
    assert end.frames == []


def test_sending_to_one_that_is_gone_is_told_not_raised(end):
    end.other.close()
    end.stream.send(b"x" * 100)
    end.until(lambda: end.lost)
    assert end.lost == 1


def test_errors_cross_as_what_they_are():
    payload = pack(Kind.FAILED, error_body(OverloadedError("full", retry_after_s=0.5, odd=object())))
    kind, _, size, _ = HEAD.unpack_from(payload)
    body = unpack(payload[HEAD.size :])
    assert (kind, size) == (Kind.FAILED, len(payload) - HEAD.size)
    error = error_of(body)
    assert isinstance(error, OverloadedError)
    assert error.message == "full"
    assert error.details["retry_after_s"] == 0.5
    assert "traceback" not in body
    try:
        raise KeyError("so")
    except KeyError as unforeseen:
        body = error_body(unforeseen)
    assert isinstance(error_of(body), RemoteInternalError)
    assert "in test_errors_cross_as_what_they_are" in body["traceback"]


def test_features_and_outputs_cross_as_bare_bytes(make_bundle):
    bundle = make_bundle(features=2, shape=(3,), dtype="int16", output_shape=(2,))
    signature = TailSignature(bundle.manifest, bundle.digest)
    draw = np.random.default_rng(2)
    requests, samples = [], 0
    for size in (1, 3, 2):
        pair = [
            Tensor(name=name, data=draw.integers(-999, 999, (size, 3)).astype(np.int16))
            for name in ("feature_0", "feature_1")
        ]
        # Each request has them in an order of its own.
        requests.append(pair[:: -1 if size == 3 else 1])
        samples += size
    data = b"".join(array.tobytes() for array in signature.buffers(requests))
    assert len(data) == samples * signature.feature_bytes
    features = signature.features(samples, memoryview(data))
    for name, array in features.items():
        each = [next(tensor.data for tensor in request if tensor.name == name) for request in requests]
        assert np.array_equal(array, np.concatenate(each))
        assert not array.flags.writeable
    outputs = draw.normal(size=(samples, 2)).astype(np.float32)
    (buffer,) = signature.outputs(samples, {"output_0": outputs.astype(np.float64)})
    results = signature.results(requests, memoryview(buffer.tobytes()))
    assert np.array_equal(np.concatenate([result[0].data for result in results]), outputs)
    assert [len(result[0].data) for result in results] == [1, 3, 2]
