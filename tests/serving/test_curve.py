"""CURVE at a real server: who gets in, who may do what, and what becomes of a key that is revoked."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys

import numpy as np
import pytest
import zmq

from cloud_server.allow_list import AllowList, Holder, Role
from cloud_server.curve import ServerCurve
from cloud_server.guard import Guard
from cloud_server.router import Router
from edge_sdk.channel import Channel
from edge_sdk.errors import DeviceUnreachableError, PeerUnreachableError, UnauthorizedError, UntrustedServerError
from edge_sdk.keys import CurveKeys, make_key_pair
from edge_sdk.protocol import (
    CallDevice,
    FetchBlob,
    Heartbeat,
    Install,
    ListDevices,
    LoadTail,
    PutBlob,
    StatBlob,
    UnloadTail,
)
from edge_sdk.wire import Message, MessageType, Tensor, decode, encode

PATIENCE_S = 30
NOTHING = "0" * 64


class Site:
    """A server with CURVE on, its allow list, and channels with keys of any kind."""

    def __init__(self, start, folder):
        self.home = folder
        self.allow_list = AllowList(folder / "keys" / "allowed")
        self.public, secret = make_key_pair()
        self.curve = ServerCurve(secret=secret, guard=Guard(self.allow_list))
        self.running = start(curve=self.curve)
        self.stack = contextlib.ExitStack()

    def keys(self, name, role=Role.DEVICE, *, allow=True):
        public, secret = make_key_pair()
        if allow:
            self.allow_list.allow(Holder(name=name, role=role, public=public))
        return CurveKeys(public=public, secret=secret, server=self.public, name=name)

    def connect(self, keys, **options):
        return self.stack.enter_context(Channel(self.running.endpoint, keys=keys, **options))

    def revoke_from_another_process(self, name):
        program = "from cloud_server.cli import main; main()"
        command = [sys.executable, "-c", program, "keys", "device", "revoke", name, "--home", str(self.home)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture
def site(start, tmp_path):
    site = Site(start, tmp_path / "home")
    yield site
    site.stack.close()


def infer(channel, bundle, tensor):
    asked = Message(type=MessageType.INFER, request_id=0, bundle=bundle.digest, tensors=(tensor,))
    return channel.submit(asked, PATIENCE_S).result()


def test_a_device_infers_with_an_allowed_key(site, make_bundle, feature):
    bundle = make_bundle()
    engine = site.running.ready(bundle)
    device = site.connect(site.keys("cam-1"))
    np.testing.assert_array_equal(infer(device, bundle, feature(4)).arrays()["output_0"], np.full((1, 6), 4.0))
    assert engine.samples == [4.0]


def test_a_key_that_is_not_allowed_gets_no_connection(site):
    keys = site.keys("cam-1", allow=False)
    with pytest.raises(UnauthorizedError, match="does not allow our key") as caught:
        site.connect(keys)
    assert keys.public in caught.value.message
    assert keys.secret not in caught.value.message
    site.allow_list.allow(Holder(name="cam-1", role=Role.DEVICE, public=keys.public))
    assert site.connect(keys).call(StatBlob(sha256=NOTHING), timeout_s=PATIENCE_S).body == {"size": None}


def test_another_server_than_expected_is_not_trusted(site):
    keys = site.keys("cam-1")
    wrong = CurveKeys(public=keys.public, secret=keys.secret, server=make_key_pair()[0])
    with pytest.raises(UntrustedServerError, match="another one than --server-key says"):
        site.connect(wrong, connect_timeout_s=0.5)


def test_a_server_that_is_not_there_is_unreachable_with_keys_too(site, start):
    other = start()
    other.stop()
    other.join()
    with pytest.raises(PeerUnreachableError, match="nothing listens") as caught:
        Channel(other.endpoint, keys=site.keys("cam-1"), connect_timeout_s=0.5)
    assert type(caught.value) is PeerUnreachableError


def test_a_client_without_keys_is_told_to_name_them(site):
    with pytest.raises(UnauthorizedError, match="asks for keys"):
        site.connect(None)


def test_a_server_without_curve_is_not_trusted_by_a_client_with_keys(site, start):
    with pytest.raises(UntrustedServerError, match="CURVE off"):
        Channel(start().endpoint, keys=site.keys("cam-1"))


def test_a_revoked_key_gets_unauthorized_and_nothing_is_executed(site, make_bundle, feature, registration):
    bundle = make_bundle()
    engine = site.running.ready(bundle)
    keys = site.keys("cam-1")
    device, operator = site.connect(keys), site.connect(site.keys("boss", Role.OPERATOR))
    device.call(registration("cam-1"), timeout_s=PATIENCE_S)
    infer(device, bundle, feature())
    runs = engine.runs
    site.revoke_from_another_process("cam-1")
    with pytest.raises(UnauthorizedError, match="not any more"):
        infer(device, bundle, feature())
    for call in (registration("cam-1"), Heartbeat(device_id="cam-1", progress=1), StatBlob(sha256=NOTHING)):
        with pytest.raises(UnauthorizedError):
            device.call(call, timeout_s=PATIENCE_S)
    assert engine.runs == runs
    assert device.connections == 1
    inner = CallDevice(device_id="cam-1", device_method="device.run", params={}, stall_timeout_s=PATIENCE_S)
    with pytest.raises(DeviceUnreachableError, match="not allowed any more"):
        operator.call(inner, timeout_s=PATIENCE_S)
    with pytest.raises(UnauthorizedError, match="does not allow our key"):
        site.connect(keys)
    # Allowed again, the old connection is as good as before.
    site.allow_list.allow(Holder(name="cam-1", role=Role.DEVICE, public=keys.public))
    infer(device, bundle, feature())
    assert engine.runs == runs + 1


def test_calls_under_way_on_a_device_end_when_its_key_is_revoked(site, registration):
    asked = []

    def on_call(message):
        asked.append(message)
        site.allow_list.revoke(Role.DEVICE, "cam-1")
        return {}, ()

    device = site.connect(site.keys("cam-1"), on_call=on_call)
    device.call(registration("cam-1"), timeout_s=PATIENCE_S)
    operator = site.connect(site.keys("boss", Role.OPERATOR))
    inner = CallDevice(device_id="cam-1", device_method="device.run", params={}, stall_timeout_s=PATIENCE_S)
    # Its answer is that of a key that is not allowed any more: nobody gets it.
    with pytest.raises(DeviceUnreachableError):
        operator.call(inner, timeout_s=PATIENCE_S)
    assert len(asked) == 1


def test_a_device_cannot_register_or_beat_as_another(site, registration):
    first, second = site.connect(site.keys("cam-1")), site.connect(site.keys("cam-2"))
    first.call(registration("cam-1"), timeout_s=PATIENCE_S)
    with pytest.raises(UnauthorizedError, match="that of the device 'cam-2', not of 'cam-1'"):
        second.call(registration("cam-1"), timeout_s=PATIENCE_S)
    with pytest.raises(UnauthorizedError, match="'cam-2'"):
        second.call(Heartbeat(device_id="cam-1", progress=1), timeout_s=PATIENCE_S)
    assert [each.device_id for each in site.running.registry.recorded] == ["cam-1"]
    assert first.call(Heartbeat(device_id="cam-1", progress=1), timeout_s=PATIENCE_S).body == {"known": True}


def dealer(site, keys, context, routing_id=None):
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.curve_serverkey = keys.server.encode()
    if routing_id is not None:
        socket.routing_id = routing_id
    socket.connect(site.running.endpoint)
    return socket


def test_a_device_cannot_answer_for_another(site, registration):
    context = zmq.Context()
    socket = dealer(site, site.keys("cam-2"), context)
    relayed = []

    def on_call(message):
        relayed.append(message.request_id)
        forged = Message(type=MessageType.REPLY, request_id=message.request_id, body={"forged": True})
        socket.send_multipart(encode(forged))
        # Answered, so what was sent before has been taken in.
        socket.send_multipart(encode(Message(type=MessageType.CALL, request_id=1, method="no.such")))
        assert socket.poll(PATIENCE_S * 1000)
        assert decode(socket.recv_multipart()).body["code"] == "UNAUTHORIZED"
        return {"forged": False}, ()

    device = site.connect(site.keys("cam-1"), on_call=on_call)
    device.call(registration("cam-1"), timeout_s=PATIENCE_S)
    operator = site.connect(site.keys("boss", Role.OPERATOR))
    inner = CallDevice(device_id="cam-1", device_method="device.run", params={}, stall_timeout_s=PATIENCE_S)
    assert operator.call(inner, timeout_s=PATIENCE_S).body == {"forged": False}
    assert site.running.server.dropped["late answers"] == 1
    socket.close()
    context.term()


def test_a_routing_id_gives_no_rights(site, registration):
    """A peer that calls itself as a device did, after that one left, is still only who its key says."""
    context = zmq.Context()
    first = dealer(site, site.keys("cam-1"), context, b"cam-1")
    first.send_multipart(encode(_call(registration("cam-1"))))
    assert first.poll(PATIENCE_S * 1000)
    first.close()
    keys = site.keys("cam-2")
    # As long as the server has not seen that the first one left, it does not let another in under its id.
    for _ in range(PATIENCE_S):
        other = dealer(site, keys, context, b"cam-1")
        other.send_multipart(encode(_call(Heartbeat(device_id="cam-1", progress=1))))
        answered = other.poll(1000)
        answer = decode(other.recv_multipart()) if answered else None
        other.close()
        if answer is not None:
            break
    assert answer is not None
    assert answer.body["code"] == "UNAUTHORIZED"
    context.term()


def _call(request):
    return Message(type=MessageType.CALL, request_id=1, method=request.method, body=request.to_body())


@pytest.mark.parametrize(
    "call",
    [
        ListDevices(),
        LoadTail(bundle=NOTHING),
        UnloadTail(bundle=NOTHING),
        PutBlob(sha256=NOTHING, size=1, offset=0),
        CallDevice(device_id="cam-1", device_method="device.run", params={}, stall_timeout_s=1.0),
        Install(bundle=NOTHING),
    ],
    ids=lambda call: call.method,
)
def test_a_device_may_not_do_what_operators_do(site, call):
    tensors = (Tensor(name="chunk", data=np.zeros(1, np.uint8)),)
    with pytest.raises(UnauthorizedError, match="takes an operator's key"):
        site.connect(site.keys("cam-1")).call(call, tensors=tensors, timeout_s=PATIENCE_S)
    assert [path for path in site.running.folder.rglob("*") if path.name.startswith(NOTHING)] == []


def test_an_operator_may_do_all_but_be_a_device(site, make_bundle, registration):
    operator = site.connect(site.keys("boss", Role.OPERATOR))
    data = b"x"
    name = hashlib.sha256(data).hexdigest()
    chunk = (Tensor(name="chunk", data=np.frombuffer(data, np.uint8)),)
    assert operator.call(PutBlob(sha256=name, size=1, offset=0), tensors=chunk, timeout_s=PATIENCE_S).body
    assert operator.call(StatBlob(sha256=name), timeout_s=PATIENCE_S).body == {"size": 1}
    assert operator.call(FetchBlob(sha256=name, offset=0), timeout_s=PATIENCE_S).arrays()["chunk"].tobytes() == data
    assert operator.call(ListDevices(), timeout_s=PATIENCE_S).body["devices"] == []
    bundle = make_bundle()
    site.running.repository.add_bundle(bundle)
    assert operator.call(LoadTail(bundle=bundle.digest), timeout_s=PATIENCE_S).body["engine"] == "fake"
    with pytest.raises(UnauthorizedError, match="takes a device's key"):
        operator.call(registration("boss"), timeout_s=PATIENCE_S)


def test_a_malformed_message_is_answered_by_who_may_be_known(site):
    context = zmq.Context()
    socket = dealer(site, site.keys("cam-1"), context)
    frames = encode(_call(StatBlob(sha256=NOTHING)))
    broken = [*frames, b"a tensor that the preamble does not count"]
    for code in ("MALFORMED", "UNAUTHORIZED"):
        socket.send_multipart(broken)
        assert socket.poll(PATIENCE_S * 1000)
        assert decode(socket.recv_multipart()).body["code"] == code
        if code == "MALFORMED":
            site.allow_list.revoke(Role.DEVICE, "cam-1")
    socket.close()
    context.term()


def test_a_channel_comes_back_once_its_key_is_allowed_again(site, monkeypatch):
    """Over a restart of the server, which refuses the handshake meanwhile: ZeroMQ itself would never try again."""
    monkeypatch.setattr("edge_sdk.channel.REOPEN_AFTER_S", 0.05)
    keys = site.keys("cam-1")
    channel = site.connect(keys)
    site.allow_list.revoke(Role.DEVICE, "cam-1")
    site.running.stop()
    site.running.join()
    again = Router(site.running.endpoint, curve=site.curve)
    with pytest.raises(PeerUnreachableError, match="does not allow our key"):
        _until_refused(channel)
    site.allow_list.allow(Holder(name="cam-1", role=Role.DEVICE, public=keys.public))
    asked = channel.begin_call(StatBlob(sha256=NOTHING), timeout_s=PATIENCE_S)
    assert again.socket.poll(PATIENCE_S * 1000)
    peer, frames, key, _ = again.receive()
    assert key == keys.public
    again.send(peer, Message(type=MessageType.REPLY, request_id=decode(frames).request_id, body={"size": 7}))
    assert asked.result().body == {"size": 7}
    again.close()


def _until_refused(channel):
    while True:
        try:
            channel.call(StatBlob(sha256=NOTHING), timeout_s=0.2)
        except PeerUnreachableError as error:
            if "does not allow" in error.message:
                raise
