"""The ledger alone: each request ends once, budgets run out in order, and nothing is kept of what ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cloud_server.ledger import Ledger
from edge_sdk.wire import Message, MessageType


def message(request_id=1, budget_s=None):
    return Message(type=MessageType.INFER, request_id=request_id, budget_s=budget_s)


def test_a_request_ends_once():
    ledger = Ledger()
    request = ledger.begin(b"a", message(), 0.0)
    assert len(ledger) == 1
    assert ledger.end(request)
    assert not ledger.end(request)
    assert len(ledger) == 0
    assert request.is_over(0.0)


def test_an_id_is_free_again_once_its_request_ended_and_belongs_to_its_peer():
    ledger = Ledger()
    request = ledger.begin(b"a", message(), 0.0)
    assert ledger.begin(b"a", message(), 0.0) is None
    assert ledger.begin(b"b", message(), 0.0) is not None
    ledger.end(request)
    assert ledger.begin(b"a", message(), 0.0) is not None


def test_the_requests_of_a_peer_are_known_and_all_are_counted():
    ledger = Ledger()
    first, second = ledger.begin(b"a", message(1), 0.0), ledger.begin(b"a", message(2), 0.0)
    other = ledger.begin(b"b", message(1), 0.0)
    assert ledger.of(b"a") == [first, second]
    assert list(ledger) == [first, second, other]
    ledger.end(first)
    assert ledger.of(b"a") == [second]
    ledger.end(second)
    assert ledger.of(b"a") == []
    assert (len(ledger), ledger.begun) == (1, 3)
    assert ledger.begin(b"b", message(1), 0.0) is None
    assert ledger.begun == 3


def test_a_budget_is_counted_from_when_the_request_came():
    request = Ledger().begin(b"a", message(budget_s=2.0), 10.0)
    assert not request.is_over(11.9)
    assert request.is_over(12.0)
    assert request.remaining_s(11.5) == 0.5
    assert request.remaining_s(20.0) == 0.0
    unbounded = Ledger().begin(b"a", message(), 10.0)
    assert unbounded.remaining_s(1e9) is None
    assert not unbounded.is_over(1e9)


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=60))
def test_what_is_expired_is_what_is_open_and_over(budgets):
    ledger = Ledger()
    requests = [ledger.begin(b"a", message(i, budget_s), 0.0) for i, (budget_s, _) in enumerate(budgets)]
    for request, (_, ends) in zip(requests, budgets, strict=True):
        if ends:
            ledger.end(request)
    expected = {r.id for r, (budget_s, ends) in zip(requests, budgets, strict=True) if not ends and budget_s <= 50}
    assert {request.id for request in ledger.expired(50.0)} == expected
    assert ledger.expired(50.0) == []
    rest = [budget_s for budget_s, _ in budgets if budget_s > 50]
    assert ledger.next_deadline() == (min(rest) if rest else None)


def test_deadlines_of_what_ended_are_not_kept():
    ledger = Ledger()
    for request_id in range(10_000):
        ledger.end(ledger.begin(b"a", message(request_id, 1000.0), 0.0))
    assert len(ledger._deadlines) < 1000
