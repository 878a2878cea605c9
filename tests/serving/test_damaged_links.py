"""Bytes that come over damaged: ZeroMQ gives such a connection up for good, a channel makes another one."""

from __future__ import annotations

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
