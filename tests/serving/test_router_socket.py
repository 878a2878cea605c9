"""The ROUTER socket alone: it never blocks, and says what became of a message."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import pytest
import zmq

from cloud_server import router as module
from cloud_server.router import Delivery, Router
from edge_sdk.errors import ConfigError
from edge_sdk.protocol import FetchBlob, ListDevices
from edge_sdk.wire import Message, MessageType, Tensor

PATIENCE_MS = 20_000


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def router():
    router = Router("tcp://127.0.0.1:*")
    yield router
    router.socket.setsockopt(zmq.LINGER, 0)
    router.close()


def dealer(context, endpoint, **options):
    socket = context.socket(zmq.DEALER)
    for name, value in options.items():
        setattr(socket, name, value)
    socket.connect(endpoint)
    return socket


def receive(router):
    assert router.socket.poll(PATIENCE_MS)
    return router.receive()


def message(count=1):
    tensor = Tensor(name="x", data=np.zeros(count, np.uint8))
    return Message(type=MessageType.REPLY, request_id=1, tensors=(tensor,))


def test_a_peer_that_never_was_is_gone(router):
    assert router.receive() is None
    assert router.send(b"nobody", message()) is Delivery.GONE


def test_a_peer_that_left_is_gone(router, context):
    socket = dealer(context, router.endpoint)
    socket.send(b"here")
    peer, frames, _, stands = receive(router)
    assert stands
    assert frames == [b"here"]
    assert router.send(peer, message()) is Delivery.SENT
    assert socket.poll(PATIENCE_MS)
    socket.close(0)
    # The end of a connection is seen by a thread of ZeroMQ's own: sending is how to learn of it.
    while router.send(peer, message()) is not Delivery.GONE:
        router.socket.poll(1)


def test_a_peer_that_does_not_read_is_full_and_nobody_waits_for_it(router, context):
    socket = dealer(context, router.endpoint, rcvhwm=1)
    socket.send(b"here")
    peer = receive(router).peer
    sent = 0
    while router.send(peer, message(100_000)) is Delivery.SENT:
        sent += 1
        assert sent < 10_000
    assert router.send(peer, message()) is Delivery.FULL


def test_a_routing_id_cannot_be_taken_over(router, context):
    first = dealer(context, router.endpoint, routing_id=b"cam-1")
    first.send(b"first")
    assert receive(router) == (b"cam-1", [b"first"], None, True)
    second = dealer(context, router.endpoint, routing_id=b"cam-1", linger=0)
    second.send(b"second")
    other = dealer(context, router.endpoint)
    other.send(b"other")
    assert receive(router)[1] == [b"other"]
    assert router.send(b"cam-1", message()) is Delivery.SENT
    assert first.poll(PATIENCE_MS)
    assert not second.poll(0)


def test_a_message_that_is_too_large_ends_its_connection_only(start, monkeypatch):
    monkeypatch.setattr(module, "MAX_TENSOR_BYTES", 10_000)
    running = start()
    peer, other = running.peer(), running.peer()
    peer.send_frames([b"x" * 10_001])
    assert other.call(ListDevices()).body["devices"] == []
    # It reconnects by itself.
    assert peer.call(ListDevices()).body["devices"] == []


def test_answers_to_a_peer_that_does_not_read_cost_others_nothing(start, monkeypatch):
    monkeypatch.setattr(module, "QUEUED_MESSAGES", 4)
    running = start()
    data = bytes(1 << 20)
    name = hashlib.sha256(data).hexdigest()
    running.repository.put(name, size=len(data), offset=0, chunk=data)
    greedy = running.peer()
    greedy.socket.rcvhwm = 1
    other = running.peer()
    while not running.server.dropped["messages to peers that are full"]:
        for _ in range(20):
            greedy.begin(FetchBlob(sha256=name, offset=0, length=len(data)))
        assert other.call(ListDevices()).body["devices"] == []


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1", "tcp://127.0.0.1:65536", "inproc://x", "", "tcp://a b:1"])
def test_what_is_no_endpoint_is_told(endpoint):
    with pytest.raises(ConfigError, match="is no endpoint to bind to"):
        Router(endpoint)


def test_an_endpoint_may_be_a_path(tmp_path, context):
    router = Router(f"ipc://{tmp_path}/socket")
    assert router.endpoint == f"ipc://{tmp_path}/socket"
    socket = dealer(context, router.endpoint)
    socket.send(b"here")
    assert receive(router)[1] == [b"here"]
    router.close()


def test_closing_does_not_wait_for_a_peer_that_does_not_read(context, monkeypatch):
    monkeypatch.setattr(module, "LINGER_MS", 50)
    router = Router("tcp://127.0.0.1:*")
    socket = dealer(context, router.endpoint, rcvhwm=1)
    socket.send(b"here")
    peer = receive(router).peer
    while router.send(peer, message(100_000)) is Delivery.SENT:
        pass
    thread = threading.Thread(target=router.close)
    thread.start()
    thread.join(PATIENCE_MS / 1000)
    assert not thread.is_alive()
