"""Requests and their ends: what came in over the ROUTER, what goes back, and the way there through other threads.

Unless a method says otherwise, it belongs to the I/O thread. Each request that began ends exactly once: with an
answer or a typed error, by its budget at the latest, or without a word when its peer has left. What has no addressee is
counted in :attr:`Switchboard.dropped`.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from cloud_server.lanes import Lane
from cloud_server.ledger import Ledger, Request
from cloud_server.loop import Loop
from cloud_server.router import Delivery, Router
from edge_sdk.errors import (
    DeadlineExceededError,
    OverloadedError,
    ProtocolError,
    RemoteInternalError,
    SplitfleetError,
)
from edge_sdk.protocol import NOTICE_ID
from edge_sdk.wire import Message, MessageType, Tensor, error_message

_LOG = logging.getLogger(__name__)
# Who asked last is told when the server stops; more than that many need not be remembered.
_MAX_PEERS = 4096
# The outcome of a request whose peer has left; nobody is told.
GONE = "GONE"
# They come by the thousand just when there is no time to write them down.
_EXPECTED = frozenset({DeadlineExceededError.wire_code, OverloadedError.wire_code, GONE})

T = TypeVar("T")
Handler = Callable[[Request, Message], None]


class Switchboard:
    """The requests under way on ``router``."""

    def __init__(self, router: Router, loop: Loop) -> None:
        self._router = router
        self._ledger = Ledger()
        self.clock = loop.clock
        self._mailbox = loop.mailbox
        self.dropped: Counter[str] = Counter()
        self.on_end: Callable[[Request, Message], None] = lambda *_: None
        self._peers: OrderedDict[bytes, None] = OrderedDict()

    @property
    def under_way(self) -> int:
        """How many requests have no end yet."""
        return len(self._ledger)

    @property
    def begun(self) -> int:
        """How many requests there were in all. May be asked from any thread."""
        return self._ledger.begun

    def next_deadline(self) -> float | None:
        return self._ledger.next_deadline()

    def begin(self, peer: bytes, message: Message, *, key: str | None = None) -> Request | None:
        """The request that ``message`` opens; ``None``, and counted, when its id is under way already."""
        request = self._ledger.begin(peer, message, self.clock(), key=key)
        self._peers[peer] = None
        self._peers.move_to_end(peer)
        if len(self._peers) > _MAX_PEERS:
            self._peers.popitem(last=False)
        if request is None:
            self.dropped["requests with an id that is under way"] += 1
        return request

    def reply(self, request: Request, body: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """End a CALL with its result."""
        self.end(request, Message(type=MessageType.REPLY, request_id=request.id, body=body, tensors=tuple(tensors)))

    def fail(self, request: Request, error: Exception) -> None:
        """End a request with an error; one that nobody foresaw is logged."""
        if not isinstance(error, SplitfleetError):
            _LOG.error("%s failed unexpectedly", request.method, exc_info=error)
        self.end(request, error_message(request.id, error))

    def fail_all(self, error: SplitfleetError) -> None:
        """End all requests with ``error``."""
        for request in self._ledger:
            self.fail(request, error)

    def end(self, request: Request, message: Message) -> None:
        """Send the end of a request, unless it had one; ``message`` bears the request's id."""
        if not self._ledger.end(request):
            self.dropped["late outcomes"] += 1
            return
        self._note(request, message)
        try:
            self.send(request.peer, message)
        except ProtocolError as error:
            # The wire format cannot carry this answer; without a word the peer would wait for it.
            _LOG.error("the answer to %s cannot be sent: %s", request.method, error)
            self.send(request.peer, error_message(request.id, RemoteInternalError(f"no answer: {error.message}")))

    def send(self, peer: bytes, message: Message) -> Delivery:
        """Send a message without waiting; one that cannot be delivered is counted."""
        delivery = self._router.send(peer, message)
        if delivery is not Delivery.SENT:
            self.dropped[f"messages to peers that are {delivery.value}"] += 1
        return delivery

    def notify(self, peer: bytes, error: SplitfleetError) -> None:
        """Tell a peer what is no answer to any of its requests, but concerns them all."""
        # Not counted: it is none of those that anybody waits for.
        self._router.send(peer, error_message(NOTICE_ID, error))

    def lose(self, peer: bytes) -> None:
        """The connection of ``peer`` has ended: so have its requests, and what of them has not begun is not done."""
        self._peers.pop(peer, None)
        for request in self._ledger.of(peer):
            self._ledger.end(request)
            left = {"code": GONE, "message": "its peer has left"}
            self._note(request, Message(type=MessageType.ERROR, request_id=request.id, body=left))

    def notify_all(self, error: SplitfleetError) -> None:
        """Tell all peers that asked something."""
        for peer in self._peers:
            self.notify(peer, error)

    def expire(self) -> None:
        """End the requests whose budget ran out."""
        for request in self._ledger.expired(self.clock()):
            self.fail(request, too_late(request))

    def must_be_open(self, request: Request) -> None:
        """Raises :class:`DeadlineExceededError` for a request that nobody waits for. May be asked from any thread."""
        if request.is_over(self.clock()):
            raise too_late(request)

    def work(self, lane: Lane, request: Request, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Run ``work`` in ``lane`` unless the request is over by then, and ``then`` with its result in this thread.

        An exception of either becomes the request's end. Raises :class:`OverloadedError` when the lane is full.
        """

        def guarded() -> T:
            self.must_be_open(request)
            return work()

        lane.submit(guarded, partial(self.come_back, request, then))

    def come_back(self, request: Request, then: Callable[[T], None], outcome: T | Exception) -> None:
        """From any thread: go on in the I/O thread with ``then``, or fail where the outcome is an exception."""
        self._mailbox.post(partial(self._resume, request, then, outcome))

    def _note(self, request: Request, message: Message) -> None:
        self.on_end(request, message)
        _log_end(request, message, self.clock() - request.received_at)

    def _resume(self, request: Request, then: Callable[[T], None], outcome: T | Exception) -> None:
        try:
            if isinstance(outcome, Exception):
                self.fail(request, outcome)
            else:
                then(outcome)
        except Exception as error:
            self.fail(request, error)


def too_late(request: Request) -> DeadlineExceededError:
    """The end of a request that nobody waits for any more."""
    budget_s = (request.deadline or request.received_at) - request.received_at
    return DeadlineExceededError(f"{request.method}: its time budget of {budget_s * 1000:.0f} ms ran out")


def _log_end(request: Request, message: Message, dwell_s: float) -> None:
    outcome = str(message.body.get("code")) if message.type is MessageType.ERROR else "OK"
    level = logging.DEBUG if outcome == "OK" or outcome in _EXPECTED else logging.INFO
    if not _LOG.isEnabledFor(level):
        return
    peer = request.peer.hex()
    facts: dict[str, Any] = {
        "id": request.id,
        "peer": peer,
        "method": request.method[:80],
        "bundle": request.bundle,
        "outcome": outcome,
        "dwell_s": dwell_s,
    }
    if message.type is MessageType.RESULT:
        facts |= message.body
    reason = f": {message.body.get('message')}" if message.type is MessageType.ERROR else ""
    text = f"request {request.id} of {peer}, {request.method[:80]}: {outcome}{reason}"
    _LOG.log(level, "%s", text, extra={"request": facts})
