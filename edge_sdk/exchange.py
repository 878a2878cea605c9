"""The requests of a channel that are under way, each of which ends exactly once. No I/O in here.

An :class:`Exchange` is one request and its future; the :class:`Ledger` knows all that have not ended, and when each
must.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

from edge_sdk.errors import (
    DeadlineExceededError,
    OverloadedError,
    PeerUnreachableError,
    ProtocolError,
    SplitfleetError,
    from_wire,
)
from edge_sdk.sizes import format_size
from edge_sdk.wire import Frame, Message, MessageType, encode

_ANSWERS = {MessageType.INFER: MessageType.RESULT, MessageType.CALL: MessageType.REPLY}


class Exchange:
    """One request: its frames, its deadline on this machine's monotonic clock, and the future of its answer.

    ``connection`` is the number of the connection that took it (they count from 1), 0 while none did.
    ``received_bytes`` holds once the future is done.
    """

    __slots__ = (
        "_message",
        "connection",
        "deadline",
        "frames",
        "future",
        "received_bytes",
        "tensor_bytes",
        "timeout_s",
    )

    def __init__(self, message: Message, timeout_s: float) -> None:
        """Encode ``message``. Raises :class:`ProtocolError` for what the wire cannot say."""
        self._message = replace(message, budget_s=timeout_s)
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.frames: list[Frame] = encode(self._message)
        self.tensor_bytes = sum(tensor.data.nbytes for tensor in message.tensors)
        self.future: Future[Message] = Future()
        # A running future cannot be cancelled: the ledger alone ends it.
        self.future.set_running_or_notify_cancel()
        self.connection = 0
        self.received_bytes = 0

    @property
    def request_id(self) -> int:
        return self._message.request_id

    @property
    def expected(self) -> MessageType:
        """The type of message that answers it."""
        return _ANSWERS[self._message.type]

    @property
    def sent_bytes(self) -> int:
        """Size of all frames together."""
        return sum(len(frame) for frame in self.frames)

    @property
    def age_s(self) -> float:
        """Time since it was encoded first."""
        return time.monotonic() - self.deadline + self.timeout_s

    def restamp(self) -> None:
        """Encode anew after a wait, so that the budget it travels with is the one that is left."""
        self._message = replace(self._message, budget_s=max(self.deadline - time.monotonic(), 0.0))
        self.frames = encode(self._message)


class Ledger:
    """All exchanges that have not ended: at most ``limit``, with tensors of at most ``limit_bytes`` together, unless it
    is one alone. Thread-safe.
    """

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._pending_bytes = 0
        self._ids = itertools.count(1)
        self._pending: dict[int, Exchange] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._refusal: SplitfleetError | None = None

    def new_id(self) -> int:
        """A request id that this ledger has never given out."""
        return next(self._ids)

    def open(self, exchange: Exchange) -> None:
        """Take an exchange in. Raises :class:`OverloadedError` when full, :class:`PeerUnreachableError` when closed,
        and what :meth:`refuse` says.
        """
        with self._lock:
            if self._closed is not None:
                raise PeerUnreachableError(self._closed)
            if self._refusal is not None:
                raise type(self._refusal)(self._refusal.message)
            full = None
            if len(self._pending) >= self._limit:
                full = f"{self._limit} requests"
            elif self._pending and self._pending_bytes + exchange.tensor_bytes > self._limit_bytes:
                full = f"requests of {format_size(self._pending_bytes)}"
            if full is not None:
                raise OverloadedError(
                    f"{full} are under way on this channel already: wait for answers before asking on",
                    retry_after_s=0.1,
                )
            self._pending[exchange.request_id] = exchange
            self._pending_bytes += exchange.tensor_bytes
            heapq.heappush(self._deadlines, (exchange.deadline, exchange.request_id))

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, exchange: Exchange) -> bool:
        return exchange.request_id in self._pending

    def answer(self, message: Message, received_bytes: int) -> bool:
        """End the exchange that ``message`` answers; false when there is none (any more)."""
        exchange = self._take(message.request_id)
        if exchange is None:
            return False
        exchange.received_bytes = received_bytes
        if message.type is exchange.expected:
            exchange.future.set_result(message)
        elif message.type is MessageType.ERROR:
            exchange.future.set_exception(from_wire(message.body))
        else:
            exchange.future.set_exception(
                ProtocolError(f"expected a {exchange.expected.name} as answer, got a {message.type.name}")
            )
        return True

    def fail(self, request_id: int, error: SplitfleetError) -> None:
        """End one exchange with ``error``, unless it has ended."""
        exchange = self._take(request_id)
        if exchange is not None:
            exchange.future.set_exception(error)

    def refuse(self, error: SplitfleetError | None) -> None:
        """Take nothing in from now on, for this reason; with ``None`` again. What is under way goes on."""
        with self._lock:
            self._refusal = error

    def lose_connection(
        self, connection: int, reason: str, error: type[SplitfleetError] = PeerUnreachableError
    ) -> None:
        """End what was sent over connections up to ``connection``: the answers cannot come any more."""
        with self._lock:
            lost = [each.request_id for each in self._pending.values() if 0 < each.connection <= connection]
        for request_id in lost:
            self.fail(request_id, error(reason))

    def expire(self, now: float, unreachable: str | None) -> float | None:
        """End what is past its deadline and return the next deadline, ``None`` when nothing is under way.

        ``unreachable`` tells why the peer cannot be reached at present, if so: the end of what never left this machine.
        """
        while True:
            with self._lock:
                deadline, request_id = self._next_deadline()
            if deadline is None or deadline > now:
                return deadline
            exchange = self._take(request_id)
            if exchange is None:
                continue
            if exchange.connection == 0 and unreachable is not None:
                exchange.future.set_exception(PeerUnreachableError(unreachable))
            else:
                exchange.future.set_exception(DeadlineExceededError(f"no answer came within {exchange.timeout_s:g} s"))

    def _next_deadline(self) -> tuple[float | None, int]:
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in self._pending:
            heapq.heappop(deadlines)
        if len(deadlines) > 2 * len(self._pending) + 64:
            # Answered exchanges leave their deadline behind; a slow one at the top would keep them all.
            deadlines[:] = [(each.deadline, each.request_id) for each in self._pending.values()]
            heapq.heapify(deadlines)
        return deadlines[0] if deadlines else (None, 0)

    def close(self, reason: str) -> None:
        """End all with :class:`PeerUnreachableError`, now and from now on."""
        with self._lock:
            self._closed = reason
            rest = list(self._pending)
        for request_id in rest:
            self.fail(request_id, PeerUnreachableError(reason))

    def _take(self, request_id: int) -> Exchange | None:
        # Whoever takes an exchange out ends it: nobody else can.
        with self._lock:
            exchange = self._pending.pop(request_id, None)
            if exchange is not None:
                self._pending_bytes -= exchange.tensor_bytes
            return exchange
