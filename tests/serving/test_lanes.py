"""Lanes and the mailbox: order, bounds, ends."""

from __future__ import annotations

import select
import threading

import pytest

from cloud_server.lanes import Lane
from cloud_server.mailbox import Mailbox
from edge_sdk.errors import OverloadedError

PATIENCE_S = 20


def test_work_of_one_thread_runs_in_order_and_outcomes_come_back():
    lane = Lane("test", capacity=100)
    outcomes = []
    for number in range(50):
        assert lane.submit(lambda number=number: 10 // (number % 5), outcomes.append)
    lane.close()
    assert lane.join(PATIENCE_S)
    assert [type(each) is ZeroDivisionError for each in outcomes] == [number % 5 == 0 for number in range(50)]
    assert [each for each in outcomes if isinstance(each, int)] == [10, 5, 3, 2] * 10


def test_a_full_lane_says_so_and_when_to_come_again():
    lane = Lane("test", threads=2, capacity=2)
    gate, running = threading.Event(), threading.Semaphore(0)

    def wait():
        running.release()
        assert gate.wait(PATIENCE_S)

    outcomes = []
    for _ in range(2):
        lane.submit(wait, outcomes.append)
    for _ in range(2):
        assert running.acquire(timeout=PATIENCE_S)
    for _ in range(2):
        lane.submit(wait, outcomes.append)
    with pytest.raises(OverloadedError, match="test: 2 requests are waiting") as raised:
        lane.submit(wait, outcomes.append)
    assert raised.value.details["retry_after_s"] > 0
    assert not lane.join(0.0)
    gate.set()
    lane.close()
    assert lane.join(PATIENCE_S)
    assert outcomes == [None] * 4


def test_a_closed_lane_takes_nothing_and_does_what_it_took():
    lane = Lane("test", capacity=10)
    done = []
    lane.submit(lambda: "first", done.append)
    lane.close()
    lane.close()
    assert not lane.submit(lambda: "late", done.append)
    assert lane.join(PATIENCE_S)
    assert done == ["first"]


def test_an_outcome_that_cannot_be_delivered_does_not_end_the_lane(caplog):
    lane = Lane("test", capacity=10)
    done = []
    lane.submit(lambda: 1, lambda _: done[7])
    lane.submit(lambda: 2, done.append)
    lane.close()
    assert lane.join(PATIENCE_S)
    assert done == [2]
    assert "could not be delivered" in caplog.text


def test_a_mailbox_wakes_whoever_polls_it_and_keeps_the_order():
    mailbox = Mailbox()
    ran = []
    threads = [
        threading.Thread(target=lambda n=n: [mailbox.post(lambda i=i: ran.append((n, i))) for i in range(100)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    while len(ran) < 400:
        assert select.select([mailbox.descriptor], [], [], PATIENCE_S)[0]
        for entry in mailbox.drain():
            entry()
    for thread in threads:
        thread.join()
    for n in range(4):
        assert [i for each, i in ran if each == n] == list(range(100))
    list(mailbox.drain())
    assert not select.select([mailbox.descriptor], [], [], 0)[0]
    mailbox.close()


def test_a_closed_mailbox_is_left_alone():
    mailbox = Mailbox()
    mailbox.close()
    mailbox.close()
    mailbox.post(lambda: None)
    mailbox.wake()
