"""The link proxy: bytes, order, rate and delay within generous bounds, and faults."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import pytest

from cloud_server.lab.connection import Target
from cloud_server.lab.proxy import LinkProxy
from device_profiles import Link
from edge_sdk.errors import ConfigError

Until = Callable[[Callable[[], object]], None]


def connect(proxy: LinkProxy) -> socket.socket:
    connection = socket.create_connection(Target.parse(proxy.endpoint).address, timeout=20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (piece := connection.recv(min(65536, size - len(data)))):
        data += piece
    return bytes(data)


def exchange(connection: socket.socket, data: bytes) -> bytes:
    """Send ``data`` to the echo and read it back at the same time."""
    sending = threading.Thread(target=connection.sendall, args=(data,))
    sending.start()
    received = receive(connection, len(data))
    sending.join()
    return received


def seconds(connection: socket.socket, data: bytes) -> float:
    began = time.perf_counter()
    assert exchange(connection, data) == data
    return time.perf_counter() - began


def link(mbit_s: float = 10_000, rtt_ms: float = 0) -> Link:
    return Link(uplink_mbit_s=mbit_s, downlink_mbit_s=mbit_s, rtt_ms=rtt_ms)


def test_bytes_and_their_order_survive(echo: str) -> None:
    data = os.urandom(3_000_000)
    with LinkProxy(echo) as proxy, connect(proxy) as connection:
        assert exchange(connection, data) == data
        assert proxy.passed_bytes("up") == proxy.passed_bytes("down") == len(data)


def test_the_end_of_a_stream_is_passed_on_after_its_last_byte(echo: str) -> None:
    data = os.urandom(20_000)
    with LinkProxy(echo, link(mbit_s=5, rtt_ms=20)) as proxy, connect(proxy) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert receive(connection, len(data)) == data
        assert connection.recv(1) == b""


@pytest.mark.parametrize(("mbit_s", "size"), [(1, 40_000), (20, 800_000)])
def test_rate(echo: str, mbit_s: float, size: int) -> None:
    # Down begins while up still runs, so that the whole takes little longer than one way.
    one_way_s = size * 8 / (mbit_s * 1e6)
    with LinkProxy(echo, link(mbit_s)) as proxy, connect(proxy) as connection:
        taken = seconds(connection, os.urandom(size))
    assert one_way_s <= taken < 2.5 * one_way_s


def test_up_and_down_have_rates_of_their_own(echo: str) -> None:
    size = 100_000
    slow_down = Link(uplink_mbit_s=1000, downlink_mbit_s=4, rtt_ms=0)
    slow_up = Link(uplink_mbit_s=4, downlink_mbit_s=1000, rtt_ms=0)
    for chosen in (slow_down, slow_up):
        with LinkProxy(echo, chosen) as proxy, connect(proxy) as connection:
            assert seconds(connection, os.urandom(size)) >= size * 8 / 4e6


def test_a_device_has_one_link_whatever_its_connections(echo: str) -> None:
    size = 50_000
    with LinkProxy(echo, link(mbit_s=8)) as proxy, connect(proxy) as first, connect(proxy) as second:
        began = time.perf_counter()
        other = threading.Thread(target=exchange, args=(first, os.urandom(size)))
        other.start()
        exchange(second, os.urandom(size))
        other.join()
        assert time.perf_counter() - began >= 2 * size * 8 / 8e6


def test_delay_is_paid_once_a_round_trip_and_does_not_take_throughput(echo: str) -> None:
    with LinkProxy(echo, link(rtt_ms=100)) as proxy, connect(proxy) as connection:
        trips = [seconds(connection, b"x" * 4000) for _ in range(3)]
        assert min(trips) >= 0.1
        # 2 MB in pieces of at most 64 kB: one after another they would take 31 delays of 50 ms each way.
        assert seconds(connection, os.urandom(2_000_000)) < 1.0


def test_a_fast_sender_is_slowed_down_by_a_reader_that_does_not_read(echo: str) -> None:
    with LinkProxy(echo) as proxy, connect(proxy) as connection:
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.sendall(b"x" * 200_000_000)
        # The kernel's buffers and the queue of the link, not all that a sender has.
        assert proxy.passed_bytes("up") < 100_000_000
        connection.shutdown(socket.SHUT_RDWR)


def test_cut_resets_and_refuses_until_restored(echo: str, until: Until) -> None:
    with LinkProxy(echo) as proxy:
        connection = connect(proxy)
        assert exchange(connection, b"before") == b"before"
        endpoint = proxy.endpoint
        proxy.cut()
        assert proxy.connections == 0
        with pytest.raises(ConnectionError):
            connection.recv(1)
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        proxy.restore()
        assert proxy.endpoint == endpoint
        with connect(proxy) as again:
            assert exchange(again, b"after") == b"after"
        connection.close()
        until(lambda: proxy.connections == 0)


def test_half_open_swallows_without_a_word(echo: str) -> None:
    with LinkProxy(echo) as proxy, connect(proxy) as connection, connect(proxy) as unharmed:
        assert exchange(connection, b"before") == b"before"
        assert exchange(unharmed, b"before") == b"before"
        proxy.half_open()
        connection.sendall(b"lost")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        with connect(proxy) as newcomer:
            newcomer.settimeout(0.2)
            newcomer.sendall(b"lost too")
            with pytest.raises(TimeoutError):
                newcomer.recv(1)
            assert proxy.passed_bytes("up") == 12
            proxy.restore()
            # What has a hole in its stream must not go on as if it had none.
            for harmed in (connection, newcomer):
                harmed.settimeout(20)
                with pytest.raises(ConnectionError):
                    harmed.recv(1)
        assert exchange(unharmed, b"after") == b"after"


@pytest.mark.parametrize("direction", ["up", "down"])
def test_one_byte_is_corrupted(echo: str, direction: str) -> None:
    data = os.urandom(200_000)
    with LinkProxy(echo) as proxy, connect(proxy) as connection:
        assert exchange(connection, data) == data
        proxy.corrupt("up" if direction == "up" else "down", after_bytes=150_000)
        received = exchange(connection, data)
        assert [index for index in range(len(data)) if data[index] != received[index]] == [150_000]
        assert exchange(connection, data) == data


def test_a_target_that_is_away_resets(until: Until) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with LinkProxy(f"tcp://127.0.0.1:{port}") as proxy, connect(proxy) as connection:
        with pytest.raises(ConnectionError):
            connection.recv(1)
        until(lambda: proxy.connections == 0)


def test_stop_leaves_no_thread_and_no_listener(echo: str) -> None:
    before = threading.active_count()
    proxy = LinkProxy(echo).start()
    connection = connect(proxy)
    assert exchange(connection, b"x") == b"x"
    endpoint = proxy.endpoint
    proxy.stop()
    proxy.stop()
    with pytest.raises(ConnectionError):
        connection.recv(1)
    connection.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(Target.parse(endpoint).address)
    assert not any(thread.name == "link-proxy" for thread in threading.enumerate())
    assert threading.active_count() <= before + 1  # the echo of our connection may be ending
    with pytest.raises(ConfigError, match="not started"):
        proxy.cut()


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:5555", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "ipc://x", "tcp://a:1:2"]
)
def test_bad_target(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is not an endpoint"):
        LinkProxy(endpoint)
