"""Bytes of version 1 as they were first sent. A change here breaks every device in the field."""

from __future__ import annotations

import numpy as np
import pytest

from edge_sdk import wire
from edge_sdk.errors import OverloadedError, to_wire
from edge_sdk.protocol import FetchBlob, Heartbeat
from edge_sdk.wire import Message, MessageType, Tensor

DIGEST = "0123456789abcdef" * 4

GOLDEN: dict[str, tuple[Message, list[str]]] = {
    "infer": (
        Message(
            type=MessageType.INFER,
            request_id=7,
            bundle=DIGEST,
            budget_s=1.5,
            tensors=(
                Tensor(name="feature_0", data=np.array([[1, -2, 3]], np.int8), scale=0.5, zero_point=-3),
                Tensor(name="feature_1", data=np.array([[1.0, -2.0]], np.float32)),
            ),
        ),
        [
            "53504c4601010002",
            "84a2696407a662756e646c65d940" + DIGEST.encode().hex() + "a6627564676574cb4097700000000000"
            "a774656e736f72739296a9666561747572655f30a4696e743892"
            "0103cb3fe0000000000000fda372617796a9666561747572655f31a7666c6f617433329201"
            "02c0c0a3726177",
            "01fe03",
            "0000803f000000c0",
        ],
    ),
    "result": (
        Message(
            type=MessageType.RESULT,
            request_id=2**64 - 1,
            bundle=DIGEST,
            body={"cloud_s": 0.25},
            tensors=(Tensor(name="output_0", data=np.array([[0.5]], np.float32)),),
        ),
        [
            "53504c4601020001",
            "84a26964cfffffffffffffffffa662756e646c65d940" + DIGEST.encode().hex() + "a4626f647981a7636c6f75645f73"
            "cb3fd0000000000000a774656e736f72739196a86f75747075745f30a7666c6f6174333292"
            "0101c0c0a3726177",
            "0000003f",
        ],
    ),
    "error": (
        Message(
            type=MessageType.ERROR, request_id=1, body=to_wire(OverloadedError("the queue is full", retry_after_s=0.5))
        ),
        [
            "53504c4601030000",
            "82a2696401a4626f647983a4636f6465aa4f5645524c4f41444544a76d657373616765b1746865207175657565"
            "2069732066756c6ca764657461696c7381ad72657472795f61667465725f73cb3fe0000000000000",
        ],
    ),
    "call": (
        Message(
            type=MessageType.CALL,
            request_id=2,
            method=FetchBlob.method,
            body=FetchBlob(sha256="ab", offset=1, length=2).to_body(),
        ),
        [
            "53504c4601040000",
            "83a2696402a66d6574686f64aa626c6f622e6665746368a4626f647983a6736861323536a26162a66f666673657401a66c656e67746802",
        ],
    ),
    "heartbeat": (
        Message(
            type=MessageType.CALL,
            request_id=3,
            method=Heartbeat.method,
            body=Heartbeat(device_id="d", progress=9).to_body(),
        ),
        [
            "53504c4601040000",
            "83a2696403a66d6574686f64b06465766963652e686561727462656174a4626f647982a96465766963655f6964a164a870726f677265737309",
        ],
    ),
    "reply": (
        Message(type=MessageType.REPLY, request_id=4, tensors=(Tensor(name="chunk", data=np.array([255], np.uint8)),)),
        ["53504c4601050001", "82a2696404a774656e736f72739196a56368756e6ba575696e74389101c0c0a3726177", "ff"],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_encodes_to_the_golden_bytes(name: str) -> None:
    message, golden = GOLDEN[name]
    assert [bytes(frame).hex() for frame in wire.encode(message)] == golden


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_decode_to_the_message(name: str) -> None:
    message, golden = GOLDEN[name]
    decoded = wire.decode([bytes.fromhex(frame) for frame in golden])
    assert (decoded.type, decoded.request_id, decoded.method) == (message.type, message.request_id, message.method)
    assert (decoded.bundle, decoded.budget_s, decoded.body) == (message.bundle, message.budget_s, message.body)
    assert len(decoded.tensors) == len(message.tensors)
    for got, sent in zip(decoded.tensors, message.tensors, strict=True):
        assert (got.name, got.scale, got.zero_point) == (sent.name, sent.scale, sent.zero_point)
        assert got.data.dtype == sent.data.dtype
        np.testing.assert_array_equal(got.data, sent.data)


def test_every_message_type_has_golden_bytes() -> None:
    assert {message.type for message, _ in GOLDEN.values()} == set(MessageType)
