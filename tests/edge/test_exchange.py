"""The ledger: each request ends exactly once, whatever comes and in whatever order. No sockets."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.errors import (
    DeadlineExceededError,
    OverloadedError,
    PeerUnreachableError,
    ProtocolError,
    TailFailedError,
    to_wire,
)
from edge_sdk.exchange import Exchange, Ledger
from edge_sdk.wire import Message, MessageType, Tensor, decode

FAR = 1e9


def ask(ledger, timeout_s=60.0, kind=MessageType.CALL):
    exchange = Exchange(Message(type=kind, request_id=ledger.new_id(), method="m"), timeout_s)
    ledger.open(exchange)
    return exchange


def answer(exchange, kind=MessageType.REPLY, **fields):
    return Message(type=kind, request_id=exchange.request_id, **fields)


def test_an_answer_ends_a_request_once():
    ledger = Ledger(10, 1000)
    exchange = ask(ledger)
    assert exchange in ledger
    assert ledger.answer(answer(exchange, body={"x": 1}), 77)
    assert exchange.future.result(0).body == {"x": 1}
    assert exchange.received_bytes == 77
    assert exchange not in ledger
    assert not ledger.answer(answer(exchange), 1)
    assert ledger.expire(FAR, None) is None


def test_ids_are_never_used_twice():
    ledger = Ledger(10, 1000)
    assert len({ledger.new_id() for _ in range(1000)}) == 1000


def test_an_error_becomes_its_class():
    ledger = Ledger(10, 1000)
    exchange = ask(ledger, kind=MessageType.INFER)
    ledger.answer(answer(exchange, MessageType.ERROR, body=to_wire(TailFailedError("oh"))), 1)
    assert isinstance(exchange.future.exception(0), TailFailedError)


@pytest.mark.parametrize(
    ("asked", "wrong"), [(MessageType.CALL, MessageType.RESULT), (MessageType.INFER, MessageType.REPLY)]
)
def test_an_answer_of_the_wrong_type_is_an_error(asked, wrong):
    ledger = Ledger(10, 1000)
    exchange = ask(ledger, kind=asked)
    ledger.answer(answer(exchange, wrong), 1)
    assert isinstance(exchange.future.exception(0), ProtocolError)


def test_deadlines_end_requests_in_their_order():
    ledger = Ledger(10, 1000)
    late, early = ask(ledger, 100.0), ask(ledger, 10.0)
    late.connection = early.connection = 1
    now = time.monotonic()
    assert ledger.expire(now, None) == early.deadline
    assert ledger.expire(now + 50, None) == late.deadline
    assert isinstance(early.future.exception(0), DeadlineExceededError)
    assert not late.future.done()
    assert not ledger.answer(answer(early), 1)
    assert ledger.expire(now + 200, None) is None
    assert isinstance(late.future.exception(0), DeadlineExceededError)


def test_what_never_left_ends_with_the_reason():
    ledger = Ledger(10, 1000)
    unsent, sent = ask(ledger), ask(ledger)
    sent.connection = 1
    ledger.expire(FAR, "the cable is cut")
    assert isinstance(unsent.future.exception(0), PeerUnreachableError)
    assert "cable" in str(unsent.future.exception(0))
    assert isinstance(sent.future.exception(0), DeadlineExceededError)


def test_a_lost_connection_ends_what_was_sent_over_it():
    ledger = Ledger(10, 1000)
    unsent, first, second = ask(ledger), ask(ledger), ask(ledger)
    first.connection, second.connection = 1, 2
    ledger.lose_connection(1, "lost")
    assert isinstance(first.future.exception(0), PeerUnreachableError)
    assert unsent in ledger
    assert second in ledger


def test_it_is_bounded():
    ledger = Ledger(2, 1000)
    first, _ = ask(ledger), ask(ledger)
    with pytest.raises(OverloadedError) as caught:
        ask(ledger)
    assert caught.value.details["retry_after_s"] > 0
    ledger.answer(answer(first), 1)
    ask(ledger)


def test_the_bytes_under_way_are_bounded_but_one_request_may_have_any():
    ledger = Ledger(10, 1000)

    def offer(size_bytes):
        tensors = (Tensor(name="t", data=np.zeros(size_bytes, np.uint8)),)
        exchange = Exchange(Message(type=MessageType.CALL, request_id=ledger.new_id(), tensors=tensors), 60.0)
        ledger.open(exchange)
        return exchange

    large = offer(5000)
    with pytest.raises(OverloadedError, match=r"5 kB are under way"):
        offer(1)
    ledger.answer(answer(large), 1)
    first, second = offer(600), offer(400)
    with pytest.raises(OverloadedError, match=r"1 kB are under way"):
        offer(1)
    ask(ledger)
    ledger.fail(first.request_id, TailFailedError("oh"))
    offer(600)
    assert len(ledger) == 3
    assert second in ledger


def test_closing_ends_all_and_lets_none_in():
    ledger = Ledger(10, 1000)
    exchanges = [ask(ledger) for _ in range(5)]
    ledger.close("over")
    assert all(isinstance(each.future.exception(0), PeerUnreachableError) for each in exchanges)
    # Each future has an error of its own: a shared one would collect the tracebacks of all.
    assert len({id(each.future.exception(0)) for each in exchanges}) == 5
    with pytest.raises(PeerUnreachableError, match="over"):
        ask(ledger)


def test_answered_requests_leave_nothing_behind():
    ledger = Ledger(10, 1000)
    slow = ask(ledger, 1.0)
    for _ in range(1000):
        ledger.answer(answer(ask(ledger, 1000.0)), 1)
        ledger.expire(0.0, None)
    assert len(ledger._deadlines) < 200
    assert slow in ledger


def test_a_future_cannot_be_cancelled():
    exchange = ask(Ledger(1, 1000))
    assert not exchange.future.cancel()


def test_a_request_that_waited_travels_with_what_is_left_of_its_budget():
    exchange = Exchange(
        Message(
            type=MessageType.INFER,
            request_id=5,
            bundle="a" * 64,
            tensors=(Tensor(name="feature_0", data=np.zeros((1, 3), np.int8), scale=0.5, zero_point=1),),
        ),
        10.0,
    )
    assert decode(exchange.frames).budget_s == 10.0
    exchange.deadline -= 4
    exchange.restamp()
    message = decode(exchange.frames)
    assert 5 < message.budget_s <= 6
    assert message.tensors[0].scale == 0.5
    assert exchange.sent_bytes == sum(len(frame) for frame in exchange.frames)


def test_what_cannot_be_said_is_told_at_once():
    tensor = Tensor(name="x", data=np.zeros(1, complex))
    with pytest.raises(ProtocolError, match="complex"):
        Exchange(Message(type=MessageType.CALL, request_id=1, tensors=(tensor,)), 1.0)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.floats(0.1, 100.0)),
        st.tuples(st.just("send"), st.integers(0, 20)),
        st.tuples(st.just("answer"), st.integers(0, 20)),
        st.tuples(st.just("fail"), st.integers(0, 20)),
        st.tuples(st.just("expire"), st.floats(0.0, 120.0)),
        st.tuples(st.just("lose"), st.integers(1, 3)),
    ),
    max_size=60,
)


@given(STEPS)
def test_every_request_ends_exactly_once(steps):
    """Whatever comes in whatever order, no future is ended twice (that would raise) and none is forgotten."""
    ledger = Ledger(15, 1000)
    asked = []
    ends = []
    for what, value in steps:
        if what == "ask":
            try:
                exchange = ask(ledger, value)
            except OverloadedError:
                assert sum(not each.future.done() for each in asked) == 15
                continue
            exchange.future.add_done_callback(ends.append)
            asked.append(exchange)
        elif what == "expire":
            now = time.monotonic() + value
            ledger.expire(now, "away")
            assert all(each.deadline > now for each in asked if not each.future.done())
        elif what == "lose":
            ledger.lose_connection(value, "lost")
        elif value < len(asked):
            exchange = asked[value]
            if what == "send":
                exchange.connection = value % 3 + 1
            elif what == "answer":
                was_open = exchange in ledger
                assert ledger.answer(answer(exchange), 1) == was_open
            else:
                ledger.fail(exchange.request_id, TailFailedError("x"))
        assert all((each in ledger) != each.future.done() for each in asked)
    ledger.close("over")
    assert len(ends) == len(asked)
    assert all(each.future.done() for each in asked)
