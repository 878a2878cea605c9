"""Peers whose connection ends: the server knows, and does nothing any more of what they asked."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from raw_zmtp import RawPeer, message

from cloud_server.router import Router
from edge_sdk.protocol import ListDevices
from edge_sdk.wire import Message, MessageType, encode

PATIENCE_S = 60.0
SPLITFLEET = (sys.executable, "-c", "from cloud_server.cli import main; main()")


def until(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not (value := holds()):
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.005)
    return value


@pytest.fixture
def router():
    router = Router("tcp://127.0.0.1:*")
    yield router
    router.close()


def losses(router):
    router.connections.take_in()
    return router.connections.lost()


def greeted(endpoint, identity=b""):
    peer = RawPeer(endpoint)
    peer.shake_hands(identity)
    return peer


def test_a_peer_that_leaves_is_lost_once_and_what_it_left_behind_does_not_stand(router):
    peer = greeted(router.endpoint)
    peer.send(message(b"first"))
    first = until(router.receive)
    assert (first.frames, first.stands) == ([b"first"], True)
    peer.send(message(b"second"))
    peer.close()
    assert until(lambda: losses(router)) == [first.peer]
    second = until(router.receive)
    assert second == (first.peer, [b"second"], None, False)
    assert losses(router) == []


def test_a_peer_that_left_before_its_first_message_was_read_does_not_stand(router):
    peer = greeted(router.endpoint)
    peer.send(message(b"only"))
    until(router.readable)
    peer.close()
    until(lambda: router.connections.take_in() or not router.connections.count)
    assert not until(router.receive).stands


def test_a_descriptor_that_is_given_out_again_is_not_mistaken_for_the_first_ones(router):
    arrivals = []

    def receive(said):
        while not arrivals or arrivals[-1].frames != [said]:
            arrivals.append(until(router.receive))
        return arrivals[-1]

    for number in range(20):
        with greeted(router.endpoint) as peer:
            peer.send(message(b"%d" % number))
            arrival = receive(b"%d" % number)
            # This is still in the socket when the next one comes, with the same descriptor.
            peer.send(message(b"late"))
        assert until(lambda: losses(router)) == [arrival.peer]
    receive(b"late")
    assert len(arrivals) == 40
    assert all(each.stands == (each.frames != [b"late"]) for each in arrivals)


def test_a_peer_that_chose_its_routing_id_may_come_back_with_it(router):
    def arrives():
        with greeted(router.endpoint, b"cam-1") as peer:
            peer.send(message(b"here"))
            # As long as ZeroMQ has not forgotten the id it takes nobody else for it.
            return router.receive() if router.socket.poll(100) else None

    for _ in range(3):
        assert until(arrives).stands
        assert until(lambda: losses(router)) == [b"cam-1"]


def test_over_a_path_as_well(tmp_path):
    router = Router(f"ipc://{tmp_path / 'here'}")
    with zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(router.endpoint)
        dealer.send(b"x")
        arrival = until(router.receive)
        assert arrival.stands
        dealer.close(0)
        assert until(lambda: losses(router)) == [arrival.peer]
    router.close()


def test_connections_that_say_nothing_are_nobodys_loss(router):
    host, port = router.endpoint.removeprefix("tcp://").split(":")
    for _ in range(10):
        socket.create_connection((host, int(port))).close()
    with greeted(router.endpoint) as peer:
        peer.send(message(b"x"))
        assert until(router.receive).stands
        until(lambda: router.connections.take_in() or router.connections.count == 1)
    assert len(until(lambda: losses(router))) == 1


def outcomes(running, name):
    """How many requests had that outcome."""
    lines = running.server.exposition().decode().splitlines()
    found = [line for line in lines if line.startswith("splitfleet_requests_total{") and f'outcome="{name}"' in line]
    return sum(float(re.search(r"\} (\S+)$", line)[1]) for line in found)


def test_what_a_dead_client_had_waiting_is_not_executed(running, make_bundle, feature):
    bundle = make_bundle()
    engine = running.ready(bundle)
    client, other = running.peer(), running.peer()
    engine.gate.clear()
    # This one is in the engine, so its time is spent; the others wait behind it.
    client.begin_infer(bundle.digest, feature(1))
    assert engine.entered.acquire(timeout=PATIENCE_S)
    for value in range(2, 12):
        client.begin_infer(bundle.digest, feature(value))
    client.call(ListDevices())
    asked = other.begin_infer(bundle.digest, feature(50))
    client.close()
    until(lambda: outcomes(running, "GONE") == 11)
    engine.gate.set()
    assert other.end_of(asked).arrays()["output_0"][0, 0] == 50
    assert engine.samples == [1, 50]
    assert running.under_way() == 0
    # The one that was in the engine is the only outcome that came too late.
    assert running.server.dropped["late outcomes"] == 11


def test_what_a_dead_client_left_in_the_socket_is_not_begun(running, make_bundle, feature):
    """While the server's thread is held up, a client asks and dies."""
    bundle = make_bundle()
    engine = running.ready(bundle)
    connections = running.server._router.connections

    def count():
        # The thread that they belong to is held up.
        connections.take_in()
        return connections.count

    with running.held_up(), greeted(running.endpoint) as peer:
        until(lambda: count() == 1)
        frames = encode(
            Message(type=MessageType.INFER, request_id=1, bundle=bundle.digest, tensors=(feature(7),), budget_s=60.0)
        )
        peer.send(message(*map(bytes, frames)))
        peer.close()
        until(lambda: count() == 0)
    until(lambda: running.server.dropped["requests of peers that are gone"])
    assert engine.samples == []


class Held:
    """What a server's process holds: descriptors, threads, memory of its own; and what it has under way."""

    def __init__(self, server):
        self.process = server.server
        self._http = server.ready["http"]

    def figures(self):
        with urlopen(f"http://{self._http}/metrics", timeout=PATIENCE_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found = Counter()
        for family in families:
            for sample in family.samples:
                found[sample.name] += sample.value
        return found

    def is_ready(self):
        try:
            with urlopen(f"http://{self._http}/readyz", timeout=PATIENCE_S) as answer:
                return answer.status == 200
        except HTTPError:
            return False

    def under_way(self):
        figures = self.figures()
        return figures["splitfleet_requests_begun_total"] - figures["splitfleet_requests_total"]

    def counts(self):
        return self.process.num_fds(), self.process.num_threads()

    def memory_bytes(self):
        return self.process.memory_full_info().uss


def kill_peers(server, count, *keys):
    script = Path(__file__).parent / "library" / "killed_peers.py"
    command = [sys.executable, str(script), server.ready["endpoint"], str(count), *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def check_nothing_is_left(server, warm_up, count, *keys):
    held = Held(server)
    # Its workers take descriptors as they come.
    until(held.is_ready)
    kill_peers(server, warm_up, *keys)
    until(lambda: held.under_way() == 0)
    # Devices that are gone are so for good after some seconds; what they leave is what the first one left.
    counts = []
    until(lambda: counts.append(held.counts()) or counts[-3:] == [counts[-1]] * 3)
    before, memory_before = counts[-1], held.memory_bytes()
    kill_peers(server, count, *keys)
    until(lambda: held.under_way() == 0)
    until(lambda: all(now <= then for now, then in zip(held.counts(), before, strict=True)))
    if count >= 500:
        assert held.memory_bytes() < 1.05 * memory_before
    figures = held.figures()
    assert figures["splitfleet_requests_begun_total"] > count
    code, _, err = server.end()
    assert code == 0
    assert "Traceback" not in err
    assert "started again" not in err


QUIET = ("--bind", "tcp://127.0.0.1:*", "--http", "127.0.0.1:0", "--log-level", "warning")


def test_killed_peers_leave_nothing_behind(served):
    check_nothing_is_left(served(*QUIET), 14, 21)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_500_killed_peers_leave_nothing_behind(served):
    check_nothing_is_left(served(*QUIET), 105, 500)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_500_killed_peers_with_keys_leave_nothing_behind(served, tmp_path):
    home = tmp_path / "home"
    for arguments in (
        ("server", "new", "--home", str(home)),
        ("device", "new", "cam-1"),
        ("device", "allow", "cam-1.pub", "--home", str(home)),
    ):
        subprocess.run([*SPLITFLEET, "keys", *arguments], cwd=tmp_path, check=True, capture_output=True)
    server = served(*QUIET, "--key", str(home / "keys" / "server.key"))
    keys = (str(tmp_path / "cam-1.key"), str(home / "keys" / "server.pub"))
    check_nothing_is_left(server, 105, 500, *keys)
