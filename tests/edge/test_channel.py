"""The channel over real sockets: ends of requests, lost peers, calls from the peer, concurrency."""

import contextlib
import gc
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from edge_sdk import dealer
from edge_sdk.call_worker import MAX_CALLS_WAITING
from edge_sdk.channel import MAX_PENDING, Channel
from edge_sdk.errors import (
    ConfigError,
    DeadlineExceededError,
    GoingAwayError,
    InvalidInputError,
    OverloadedError,
    PeerUnreachableError,
    ProtocolError,
    UnsupportedVersionError,
)
from edge_sdk.protocol import NOTICE_ID, Heartbeat, StatBlob
from edge_sdk.wire import Message, MessageType, Tensor, encode, error_message

ASK = StatBlob(sha256="0" * 64)


def call_message(request_id=0, method="do", **fields):
    return Message(type=MessageType.CALL, request_id=request_id, method=method, **fields)


def echo(message, peer):  # noqa: ARG001
    return Message(type=MessageType.REPLY, request_id=message.request_id, body=message.body, tensors=message.tensors)


def test_a_call_and_its_reply(start_peer):
    peer = start_peer(echo)
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    with Channel(peer.endpoint) as channel:
        answer = channel.call(ASK, tensors=[Tensor(name="x", data=data)], timeout_s=30)
    assert answer.body == {"sha256": "0" * 64}
    np.testing.assert_array_equal(answer.arrays()["x"], data)
    assert peer.received[0].method == "blob.stat"
    assert 0 < peer.received[0].budget_s <= 30


def test_the_peers_error_is_raised(start_peer):
    def refuse(message, peer):  # noqa: ARG001
        raise InvalidInputError("no", size=3)

    with Channel(start_peer(refuse).endpoint) as channel, pytest.raises(InvalidInputError) as caught:
        channel.call(ASK, timeout_s=30)
    assert caught.value.details == {"size": 3}


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:5555", "tcp://host", "http://h:1", "tcp://h:99999", "tcp://*:1"])
def test_a_bad_endpoint(endpoint):
    with pytest.raises(ConfigError, match="endpoint"):
        Channel(endpoint, connect_timeout_s=0.2)


def test_nobody_listens(free_endpoint):
    with pytest.raises(PeerUnreachableError, match="nothing listens"):
        Channel(free_endpoint, connect_timeout_s=0.2)


def test_a_stranger_listens():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(PeerUnreachableError, match="does not shake hands"):
            Channel(endpoint, connect_timeout_s=0.5)


def test_a_silent_peer_ends_in_the_deadline_of_each(start_peer):
    peer = start_peer(lambda *_: None)
    with Channel(peer.endpoint) as channel:
        slow = channel.submit(call_message(), 60.0)
        fast = channel.submit(call_message(), 0.2)
        assert isinstance(fast.exception(), DeadlineExceededError)
        assert not slow.done()


def test_a_late_answer_is_dropped(start_peer):
    late = []

    def answer_late(message, peer):
        if message.method == "late":
            late.append(message.request_id)
            return None
        # First the answer nobody waits for any more, twice, then the right one.
        stale = [echo(call_message(request_id), peer) for request_id in late * 2]
        return [*stale, echo(message, peer)]

    peer = start_peer(answer_late)
    with Channel(peer.endpoint) as channel:
        with pytest.raises(DeadlineExceededError):
            channel.submit(call_message(method="late"), 0.1).result()
        answer = channel.submit(call_message(method="next", body={"n": 2}), 30).result()
    assert answer.body == {"n": 2}


def test_answers_may_come_in_any_order(start_peer):
    held = []

    def hold(message, peer):
        held.append(message)
        return [echo(each, peer) for each in reversed(held)] if len(held) == 20 else None

    with Channel(start_peer(hold).endpoint) as channel:
        futures = [channel.submit(call_message(body={"n": n}), 30) for n in range(20)]
        assert [future.result().body["n"] for future in futures] == list(range(20))


def test_many_threads_get_their_own_answers(start_peer):
    peer = start_peer(echo)
    with Channel(peer.endpoint) as channel, ThreadPoolExecutor(8) as pool:

        def ask(number):
            array = np.full(number % 7 + 1, number, np.int32)
            answer = channel.submit(call_message(tensors=(Tensor(name="x", data=array),)), 60).result()
            return np.array_equal(answer.arrays()["x"], array)

        assert all(pool.map(ask, range(400)))
    assert len({message.request_id for message in peer.received}) == 400


def test_the_number_under_way_is_bounded(start_peer):
    peer = start_peer(lambda *_: None)
    with Channel(peer.endpoint) as channel:
        futures = [channel.submit(call_message(), 60) for _ in range(MAX_PENDING)]
        with pytest.raises(OverloadedError):
            channel.submit(call_message(), 60)
    assert all(isinstance(future.exception(), PeerUnreachableError) for future in futures)


def test_what_was_sent_to_a_peer_that_vanishes_ends_at_once(start_peer, wait_until):
    peer = start_peer(lambda *_: None)
    with Channel(peer.endpoint) as channel:
        future = channel.submit(call_message(), 3600)
        wait_until(lambda: peer.received, "the request")
        peer.stop()
        assert isinstance(future.exception(30), PeerUnreachableError)
        assert not channel.connected


@pytest.fixture
def silent_link():
    """A TCP relay that can fall silent: its connections stay open, but nothing passes any more."""
    silent = threading.Event()
    sockets, threads = [], []

    def relay(source, target):
        try:
            while data := source.recv(65536):
                if not silent.is_set():
                    target.sendall(data)
        except OSError:
            pass

    def start(work, *args):
        threads.append(threading.Thread(target=work, args=args))
        threads[-1].start()

    def accept(listener, port):
        try:
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                sockets.extend((near, far))
                start(relay, near, far)
                start(relay, far, near)
        except OSError:
            pass

    def link(endpoint):
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)
        start(accept, listener, int(endpoint.rpartition(":")[2]))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}", silent

    yield link
    for each in sockets:
        # Closing alone does not wake a thread that waits in it.
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
    for thread in threads:
        thread.join()


def test_a_silent_partition_is_noticed(start_peer, silent_link, monkeypatch):
    for name, milliseconds in (("INTERVAL", 50), ("TIMEOUT", 500), ("TTL", 1000)):
        monkeypatch.setattr(dealer, f"HEARTBEAT_{name}_MS", milliseconds)
    endpoint, silent = silent_link(start_peer(echo).endpoint)
    with Channel(endpoint) as channel:
        channel.call(ASK, timeout_s=30)
        silent.set()
        with pytest.raises(PeerUnreachableError, match="was lost"):
            channel.call(ASK, timeout_s=3600)


def test_a_peer_that_goes_away_is_asked_nothing_new_until_it_is_back(start_peer, make_reply, wait_until):
    asked = []

    def handler(message, peer):  # noqa: ARG001
        asked.append(message)
        return None if len(asked) == 1 else make_reply(message)

    peer = start_peer(handler)
    with Channel(peer.endpoint) as channel:
        under_way = channel.begin_call(ASK, timeout_s=20.0)
        wait_until(lambda: asked)
        peer.send(error_message(NOTICE_ID, GoingAwayError("back in a minute")))

        def is_refused():
            try:
                channel.call(ASK, timeout_s=20.0)
            except GoingAwayError as error:
                return error.message == "back in a minute"

        wait_until(is_refused)
        heard = len(asked)
        with pytest.raises(GoingAwayError):
            channel.call(ASK, timeout_s=20.0)
        assert len(asked) == heard
        peer.send(make_reply(asked[0], {"still": "answered"}))
        assert under_way.result(20.0).body == {"still": "answered"}
        peer.stop()
        wait_until(lambda: not channel.connected)
        start_peer(lambda message, _: make_reply(message), peer.endpoint)
        channel.call(ASK, timeout_s=20.0)


def test_a_peer_of_another_version_ends_all_at_once(start_peer, wait_until):
    peer = start_peer(lambda *_: None)
    with Channel(peer.endpoint) as channel:
        under_way = [channel.begin_call(ASK, timeout_s=20.0) for _ in range(3)]
        wait_until(lambda: len(peer.received) == 3)
        peer.send(error_message(NOTICE_ID, UnsupportedVersionError("version 1 is not spoken here")))
        for answer in under_way:
            with pytest.raises(UnsupportedVersionError, match="version 1 is not spoken here"):
                answer.result(20.0)
        with pytest.raises(UnsupportedVersionError):
            channel.call(ASK, timeout_s=20.0)


def test_what_was_not_sent_goes_to_the_next_peer_and_nothing_stale_does(start_peer, wait_until):
    first = start_peer(lambda *_: None)
    with Channel(first.endpoint) as channel:
        assert channel.connections == 1
        first.stop()
        wait_until(lambda: not channel.connected, "the loss")
        expired = channel.submit(call_message(method="stale"), 0.05)
        waiting = channel.submit(call_message(method="waits"), 60)
        assert isinstance(expired.exception(), PeerUnreachableError)
        second = start_peer(echo, first.endpoint)
        waiting.result()
        assert channel.connections == 2
    assert [message.method for message in second.received] == ["waits"]
    assert second.received[0].budget_s < 60


def test_an_outage_piles_nothing_up(start_peer, wait_until):
    peer = start_peer(lambda *_: None)
    with Channel(peer.endpoint) as channel:
        peer.stop()
        wait_until(lambda: not channel.connected, "the loss")
        channel.submit(call_message(), 3600)
        for _ in range(3):
            ended = [channel.submit(call_message(), 0.05) for _ in range(20)]
            assert all(isinstance(future.exception(), PeerUnreachableError) for future in ended)
        wait_until(lambda: len(channel._outbox) <= 1, "an outbox with what still waits alone")


def test_close_ends_what_is_under_way(start_peer):
    channel = Channel(start_peer(lambda *_: None).endpoint)
    future = channel.submit(call_message(), 60)
    channel.close()
    channel.close()
    assert isinstance(future.exception(), PeerUnreachableError)
    with pytest.raises(PeerUnreachableError, match="closed"):
        channel.call(ASK, timeout_s=1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frames: [*frames[:2], b"1234"],
        lambda frames: [frames[0], b"\xc1"],
        lambda _: [b"GET / HTTP/1.1\r\n"],
        lambda frames: [frames[0][:4] + b"\x02" + frames[0][5:], *frames[1:]],
    ],
)
def test_a_broken_message_does_no_harm(start_peer, spoil):
    def break_first(message, peer):
        if message.method == "first":
            peer.send_frames(spoil([bytes(frame) for frame in encode(echo(message, peer))]))
            return None
        return echo(message, peer)

    with Channel(start_peer(break_first).endpoint) as channel:
        broken = channel.submit(call_message(method="first"), 0.5)
        # Told at once where the id can be made out, else by the deadline.
        assert isinstance(broken.exception(), (ProtocolError, DeadlineExceededError))
        assert channel.submit(call_message(method="second"), 30).result()


def test_the_peer_calls(start_peer, wait_until):
    answers = []

    def keep(message, peer):
        if message.type is MessageType.CALL:
            return echo(message, peer)
        answers.append(message)
        return None

    def on_call(message):
        if message.method == "fail":
            raise InvalidInputError("not so", n=1)
        if message.method == "crash":
            raise RuntimeError("unforeseen")
        if message.method == "unspeakable":
            return {"x": object()}, ()
        return {"got": message.body["n"]}, [Tensor(name="twice", data=message.arrays()["x"] * 2)]

    peer = start_peer(keep)
    with Channel(peer.endpoint, on_call=on_call) as channel:
        channel.call(ASK, timeout_s=30)
        x = Tensor(name="x", data=np.arange(3, dtype=np.int32))
        peer.send(call_message(2**63, body={"n": 5}, tensors=(x,)))
        for number, method in enumerate(("fail", "crash", "unspeakable"), start=10):
            peer.send(call_message(number, method))
        wait_until(lambda: len(answers) == 4, "four answers")
    by_id = {message.request_id: message for message in answers}
    assert by_id[2**63].type is MessageType.REPLY
    assert by_id[2**63].body == {"got": 5}
    assert list(by_id[2**63].arrays()["twice"]) == [0, 2, 4]
    assert by_id[10].body == {"code": "INVALID_INPUT", "message": "not so", "details": {"n": 1}}
    assert by_id[11].body["code"] == "INTERNAL"
    assert by_id[12].body["code"] == "MALFORMED"


def test_no_answer_ends_the_thread_that_works_on_calls(start_peer, wait_until, monkeypatch):
    answers = {}

    def keep(message, peer):
        if message.type is MessageType.CALL:
            return echo(message, peer)
        answers[message.request_id] = message
        return None

    def on_call(message):
        if message.method == "long":
            raise InvalidInputError(repr("\x01" * 5000), much="x" * 20_000)
        if message.method == "untellable":
            raise ZeroDivisionError
        return {"fine": True}, ()

    def tell(request_id, error):
        if isinstance(error, ZeroDivisionError):
            raise MemoryError
        return error_message(request_id, error)

    monkeypatch.setattr("edge_sdk.call_worker.error_message", tell)
    peer = start_peer(keep)
    with Channel(peer.endpoint, on_call=on_call) as channel:
        channel.call(ASK, timeout_s=30)
        for number, method in enumerate(("long", "untellable", "fine")):
            peer.send(call_message(number, method))
        wait_until(lambda: len(answers) == 3, "three answers")
    assert answers[0].body["code"] == "INVALID_INPUT"
    assert answers[1].body["code"] == "INTERNAL"
    assert answers[2].body == {"fine": True}


def test_a_call_to_who_takes_none_with_a_method_that_is_long(start_peer, wait_until):
    answers = []

    def keep(message, peer):
        if message.type is MessageType.CALL:
            return echo(message, peer)
        answers.append(message)
        return None

    peer = start_peer(keep)
    with Channel(peer.endpoint) as channel:
        channel.call(ASK, timeout_s=30)
        peer.send(call_message(1, "\x01" * 5000))
        wait_until(lambda: answers, "the answer")
        channel.call(ASK, timeout_s=30)
        assert not channel.ended
    assert channel.ended
    assert answers[0].body["code"] == "UNKNOWN_METHOD"


def test_answers_flow_while_a_call_works_and_it_may_ask_itself(start_peer, wait_until):
    release = threading.Event()
    answers = []

    def keep(message, peer):
        if message.type is MessageType.CALL:
            return echo(message, peer)
        answers.append(message)
        return None

    def on_call(message):  # noqa: ARG001
        assert release.wait(30)
        return channel.call(Heartbeat(device_id="d", progress=1), timeout_s=30).body, ()

    peer = start_peer(keep)
    with Channel(peer.endpoint, on_call=on_call) as channel:
        channel.call(ASK, timeout_s=30)
        peer.send(call_message(1))
        for _ in range(10):
            channel.call(ASK, timeout_s=30)
        assert not answers
        release.set()
        wait_until(lambda: answers, "the answer")
    assert answers[0].body == {"device_id": "d", "progress": 1}


def test_calls_are_bounded_and_expire(start_peer, wait_until):
    release = threading.Event()
    answers, done = {}, []

    def keep(message, peer):
        if message.type is MessageType.CALL:
            return echo(message, peer)
        answers[message.request_id] = message
        return None

    def on_call(message):
        done.append(message.request_id)
        assert release.wait(30)
        return {}, ()

    peer = start_peer(keep)
    with Channel(peer.endpoint, on_call=on_call) as channel:
        channel.call(ASK, timeout_s=30)
        peer.send(call_message(0))
        wait_until(lambda: done == [0], "the first call at work")
        for number in range(1, MAX_CALLS_WAITING + 1):
            peer.send(call_message(number, budget_s=0.0 if number == 1 else None))
        peer.send(call_message(99))
        wait_until(lambda: 99 in answers, "the refusal")
        assert answers[99].body["code"] == "OVERLOADED"
        release.set()
        wait_until(lambda: len(answers) == MAX_CALLS_WAITING + 2, "all answers")
    assert answers[1].body["code"] == "DEADLINE_EXCEEDED"
    assert 1 not in done


def test_a_channel_without_calls_refuses_them(start_peer, wait_until):
    answers = []

    def keep(message, peer):
        if message.type is MessageType.ERROR:
            answers.append(message)
            return None
        return echo(message, peer)

    peer = start_peer(keep)
    with Channel(peer.endpoint) as channel:
        channel.call(ASK, timeout_s=30)
        peer.send(call_message(5))
        peer.send(Message(type=MessageType.INFER, request_id=6))
        wait_until(lambda: len(answers) == 2, "two refusals")
    assert {message.body["code"] for message in answers} == {"UNKNOWN_METHOD"}


def test_an_answer_outlives_a_reconnect(start_peer, wait_until):
    release = threading.Event()
    started = threading.Event()

    def on_call(message):  # noqa: ARG001
        started.set()
        assert release.wait(30)
        return {"done": True}, ()

    first = start_peer(echo)
    with Channel(first.endpoint, on_call=on_call) as channel:
        channel.call(ASK, timeout_s=30)
        first.send(call_message(7))
        assert started.wait(30)
        first.stop()
        wait_until(lambda: not channel.connected, "the loss")
        release.set()
        second = start_peer(lambda *_: None, first.endpoint)
        wait_until(lambda: second.received, "the answer")
    assert second.received[0].request_id == 7
    assert second.received[0].body == {"done": True}


def test_nothing_is_left_behind(start_peer, free_endpoint):
    peer = start_peer(echo)

    def cycle():
        with Channel(peer.endpoint, on_call=lambda _: ({}, ())) as channel:
            channel.call(ASK, timeout_s=30)
        with pytest.raises(PeerUnreachableError):
            Channel(free_endpoint, connect_timeout_s=0.01)
        gc.collect()

    cycle()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208
    for _ in range(10):
        cycle()
    # The peer's side of a connection closes a moment later.
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2  # noqa: PTH208
    assert threading.active_count() <= threads
