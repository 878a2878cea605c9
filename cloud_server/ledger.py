"""The ledger of requests: each one that began has exactly one end, and none outlives its time budget.

Pure bookkeeping: the time is a parameter, nothing is sent from here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from edge_sdk.wire import Message

_COMPACT_ABOVE = 256


@dataclass(eq=False, kw_only=True, slots=True)
class Request:
    """One INFER or CALL under way. ``peer`` is the routing id to answer to, ``key`` the public key that asks, where
    CURVE is on, ``bundle`` the digest of an INFER; times are in s of the server's clock.
    """

    peer: bytes
    id: int
    method: str
    received_at: float
    deadline: float | None
    ended: bool = False
    key: str | None = None
    bundle: str | None = None

    def is_over(self, now: float) -> bool:
        """Whether work for it would be in vain. May be asked from any thread."""
        return self.ended or (self.deadline is not None and now >= self.deadline)

    def remaining_s(self, now: float) -> float | None:
        """What is left of its time budget; ``None``: it has none."""
        return None if self.deadline is None else max(0.0, self.deadline - now)


class Ledger:
    """All requests that have no end yet, and how many were ever begun."""

    def __init__(self) -> None:
        self.begun = 0
        self._open: dict[bytes, dict[int, Request]] = {}
        self._size = 0
        self._deadlines: list[tuple[float, int, Request]] = []
        self._order = count()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return iter([request for requests in self._open.values() for request in requests.values()])

    def of(self, peer: bytes) -> list[Request]:
        """The requests of one peer."""
        return list(self._open.get(peer, {}).values())

    def begin(self, peer: bytes, message: Message, now: float, *, key: str | None = None) -> Request | None:
        """The request that ``message`` opens; ``None`` when that peer has one under way with the same id."""
        requests = self._open.setdefault(peer, {})
        if message.request_id in requests:
            return None
        deadline = None if message.budget_s is None else now + message.budget_s
        request = Request(
            peer=peer,
            id=message.request_id,
            method=message.method or message.type.name,
            received_at=now,
            deadline=deadline,
            key=key,
            bundle=message.bundle,
        )
        requests[request.id] = request
        self._size += 1
        self.begun += 1
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, next(self._order), request))
        return request

    def end(self, request: Request) -> bool:
        """Whether this is the request's end; ``False``: it had one before, so nothing more may be said."""
        if request.ended:
            return False
        request.ended = True
        requests = self._open[request.peer]
        del requests[request.id]
        if not requests:
            del self._open[request.peer]
        self._size -= 1
        if len(self._deadlines) > 2 * self._size + _COMPACT_ABOVE:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].ended]
            heapq.heapify(self._deadlines)
        return True

    def expired(self, now: float) -> list[Request]:
        """The requests whose budget ran out, still to be ended by the caller."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.ended:
                found.append(request)
        return found

    def next_deadline(self) -> float | None:
        """When :meth:`expired` may have something next."""
        return self._deadlines[0][0] if self._deadlines else None
