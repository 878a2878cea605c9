"""Bytes that come over damaged: ZeroMQ gives such a connection up for good, a channel makes another one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cloud_server.allow_list import AllowList, Holder, Role
from cloud_server.curve import ServerCurve
from cloud_server.guard import Guard
from cloud_server.lab.proxy import LinkProxy
from edge_sdk import channel as channel_module
from edge_sdk import dealer
from edge_sdk.channel import Channel
from edge_sdk.errors import PeerUnreachableError
from edge_sdk.keys import CurveKeys, make_key_pair
from edge_sdk.protocol import ListDevices

PATIENCE_S = 30


@pytest.fixture
def reached(start, tmp_path):
    """A server in the clear or with CURVE on, and the keys for it."""

    def make(curve):
        if not curve:
            return start(), None
        public, secret = make_key_pair()
        own, own_secret = make_key_pair()
        allow_list = AllowList(tmp_path / "allowed")
        allow_list.allow(Holder(name="boss", role=Role.OPERATOR, public=own))
        running = start(curve=ServerCurve(secret=secret, guard=Guard(allow_list)))
        return running, CurveKeys(public=own, secret=own_secret, server=public)

    return make


def call_on(channel):
    while True:
        channel.call(ListDevices(), timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("curve", "direction", "after_bytes"),
    [(False, "down", 0), (False, "up", 0), (True, "down", 2), (True, "down", 30), (True, "up", 30)],
)
def test_a_channel_comes_back_over_a_connection_of_its_own(reached, monkeypatch, curve, direction, after_bytes):
    monkeypatch.setattr(channel_module, "REOPEN_AFTER_S", 0.1)
    running, keys = reached(curve)
    with LinkProxy(running.endpoint) as proxy, Channel(proxy.endpoint, keys=keys) as channel:
        channel.call(ListDevices(), timeout_s=PATIENCE_S)
        proxy.corrupt(direction, after_bytes=after_bytes)
        # What was under way when the damage showed ends with the connection, long before its deadline.
        with pytest.raises(PeerUnreachableError, match="was lost"):
            call_on(channel)
        assert channel.call(ListDevices(), timeout_s=PATIENCE_S).body["devices"] == []
        assert channel.connections == 2
        assert channel.under_way == 0


def test_a_length_that_is_damaged_is_noticed_by_heartbeats(reached, monkeypatch):
    for name, milliseconds in (("INTERVAL", 50), ("TIMEOUT", 500), ("TTL", 1000)):
        monkeypatch.setattr(dealer, f"HEARTBEAT_{name}_MS", milliseconds)
    running, _ = reached(False)
    with LinkProxy(running.endpoint) as proxy, Channel(proxy.endpoint) as channel:
        channel.call(ListDevices(), timeout_s=PATIENCE_S)
        proxy.corrupt("down", after_bytes=1)
        # The rest of the stream looks like one long frame.
        with pytest.raises(PeerUnreachableError, match="was lost"):
            call_on(channel)
        assert channel.call(ListDevices(), timeout_s=PATIENCE_S).body["devices"] == []


ABORT = """
import threading
from cloud_server.curve import ServerCurve
from cloud_server.lab.proxy import LinkProxy
from cloud_server.router import Router
from edge_sdk import channel, dealer
from edge_sdk.errors import PeerUnreachableError
from edge_sdk.keys import CurveKeys, make_key_pair
from edge_sdk.protocol import ListDevices
from edge_sdk.wire import Message, MessageType, decode

class Everybody:
    def admits(self, key):
        return True

def serve():
    while not stopping.is_set():
        if router.socket.poll(20):
            arrival = router.receive()
            router.send(arrival.peer, Message(type=MessageType.REPLY, request_id=decode(arrival.frames).request_id))

dealer.HEARTBEAT_INTERVAL_MS = 50
channel.REOPEN_AFTER_S = 1.0
server, secret = make_key_pair()
public, own_secret = make_key_pair()
router = Router("tcp://127.0.0.1:*", curve=ServerCurve(secret=secret, guard=Everybody()))
stopping = threading.Event()
thread = threading.Thread(target=serve)
thread.start()
keys = CurveKeys(public=public, secret=own_secret, server=server)
with LinkProxy(router.endpoint) as proxy, channel.Channel(proxy.endpoint, keys=keys) as asking:
    proxy.corrupt("down", after_bytes=30)
    try:
        while True:
            asking.call(ListDevices(), timeout_s=20)
    except PeerUnreachableError:
        pass
    # The server's end hangs up while ours is still there, and a ping is due.
    proxy.cut()
    proxy.restore()
    asking.call(ListDevices(), timeout_s=20)
    print("connections", asking.connections)
stopping.set()
thread.join()
router.close()
"""


def test_damage_and_a_hang_up_after_it_do_not_abort_the_process():
    """As libzmq does, where nobody has disconnected meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", ABORT], capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "connections 2\n"), done.stderr
