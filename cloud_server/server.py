"""The cloud server: one thread that owns the ROUTER and the table of who answers what.

Nothing slow runs in that thread. Tails have queues and threads of their own; blobs, the registry and the loading of
tails have lanes; outcomes come back through a mailbox. A message that is malformed, unknown or fails in an unforeseen
way costs that message, never the server.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import zmq

from cloud_server.allow_list import Holder
from cloud_server.blob_calls import BlobCalls, Call
from cloud_server.fleet import Fleet
from cloud_server.fleet_calls import DeviceRegistry, FleetCalls
from cloud_server.guard import Guard
from cloud_server.lanes import Lane
from cloud_server.ledger import Request
from cloud_server.metrics import Metrics
from cloud_server.router import Router
from cloud_server.switchboard import Handler, Switchboard
from cloud_server.tail_calls import TailCalls
from cloud_server.tails import TailHost
from edge_sdk.errors import (
    GoingAwayError,
    ProtocolError,
    UnauthorizedError,
    UnknownMethodError,
    UnsupportedVersionError,
)
from edge_sdk.wire import Message, MessageType, decode, error_message, request_id_of

_LOG = logging.getLogger(__name__)
_SWEEP_S = 0.25
# Messages taken in before finished work is sent out: both keep flowing under load.
_RECEIVED_AT_ONCE = 32
GRACE_S = 5.0
# Without a turn for that long the I/O thread hangs; idle, it makes several a second.
_ALIVE_WITHIN_S = 5.0
_JOIN_WITHIN_S = 1.0


class ServerRegistry(DeviceRegistry, Protocol):
    """What the server needs of the registry. All of it may block: while it serves, it is called from other threads."""

    def active_bundles(self) -> Sequence[str]: ...


class Server:
    """A server on ``router``; :meth:`run` serves in the calling thread until :meth:`stop`."""

    def __init__(
        self,
        router: Router,
        *,
        fleet: Fleet,
        tails: TailHost,
        blobs: BlobCalls,
        registry: ServerRegistry,
        grace_s: float = GRACE_S,
    ) -> None:
        """``grace_s``: how long what is under way may take to end once the server stops."""
        self.endpoint = router.endpoint
        self._router = router
        self._registry = registry
        self._tails = tails
        # Without one, which takes a router without CURVE, everybody may do everything.
        self._guard = router.guard
        self._switchboard = Switchboard(router)
        self._metrics = Metrics(
            tails=tails,
            kind_of=fleet.profile_of,
            dropped=self._switchboard.dropped,
            devices_online=fleet.online,
        )
        self._switchboard.on_end = self._metrics.ended
        self._fleet_calls = FleetCalls(self._switchboard, fleet, registry, router.guard)
        self._tail_calls = TailCalls(self._switchboard, tails, self._metrics.computed)
        self._reading = Lane("blob reads", threads=2, capacity=1024)
        self._writing = Lane("blob writes", capacity=1024)
        self._methods: dict[str, Handler] = {
            **self._fleet_calls.methods,
            **self._tail_calls.methods,
            **self._in_lane(self._reading, blobs.reading),
            **self._in_lane(self._writing, blobs.writing),
        }
        self._grace_s = grace_s
        self._stopping = False
        self._next_sweep = 0.0
        self._last_turn: float | None = None

    @property
    def dropped(self) -> Counter[str]:
        """What could not be answered, by reason."""
        return self._switchboard.dropped

    def stop(self) -> None:
        """Have :meth:`run` end: all peers are told at once, nothing new is taken, what is under way gets its answer, or
        a typed error when the grace period is over.

        May be called from any thread and from a signal handler.
        """
        self._stopping = True
        self._switchboard.mailbox.wake()

    def ailment(self) -> str | None:
        """Why it is not alive, if so. May be asked from any thread, as may the next two."""
        if self._last_turn is not None and self._switchboard.clock() - self._last_turn > _ALIVE_WITHIN_S:
            return f"the I/O thread has made no turn for more than {_ALIVE_WITHIN_S:g} s"
        return None

    def hindrance(self) -> str | None:
        """Why it does not serve all that it should, if so."""
        missing = self._tail_calls.missing()
        if self._stopping:
            return "the server is stopping"
        if missing is None:
            return "the server is starting"
        if missing:
            return f"tails of accepted allocations that are not loaded: {', '.join(sorted(missing))}"
        return None

    def exposition(self) -> bytes:
        """Its figures, in Prometheus' text form."""
        return self._metrics.exposition()

    def run(self) -> bool:
        """Serve until :meth:`stop`. Returns whether all threads ended; one that loads a tail may still be at it."""
        self._tail_calls.load_at_start(self._registry.active_bundles())
        poller = zmq.Poller()
        poller.register(self._router.socket, zmq.POLLIN)
        poller.register(self._switchboard.mailbox.descriptor, zmq.POLLIN)
        stop_by: float | None = None
        while stop_by is None or (self._switchboard.under_way and self._switchboard.clock() < stop_by):
            try:
                self._turn(bool(dict(poller.poll(self._sleep_ms())).get(self._router.socket)))
                if self._stopping and stop_by is None:
                    stop_by = self._switchboard.clock() + self._grace_s
                    self._switchboard.notify_all(_stopping())
                    self._fleet_calls.stop(_stopping())
            except Exception:
                _LOG.exception("unexpected failure in the I/O loop")
        return self._close()

    def _sleep_ms(self) -> int:
        deadline = self._switchboard.next_deadline()
        wake_at = self._next_sweep if deadline is None else min(self._next_sweep, deadline)
        # Rounded up, since a poll that returns too early would spin.
        return max(0, int((wake_at - self._switchboard.clock()) * 1000) + 1)

    def _turn(self, came: bool) -> None:
        for _ in range(_RECEIVED_AT_ONCE if came else 0):
            received = self._router.receive()
            if received is None:
                break
            self._receive(*received)
        for entry in self._switchboard.mailbox.drain():
            entry()
        self._switchboard.expire()
        now = self._last_turn = self._switchboard.clock()
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_S
            self._fleet_calls.sweep()

    def _receive(self, peer: bytes, frames: list[bytes], key: str | None) -> None:
        try:
            holder = None if self._guard is None else self._guard.identify(key)
        except UnauthorizedError as error:
            self._fleet_calls.leave(peer)
            self._refuse(peer, frames, error)
            return
        try:
            message = decode(frames)
        except ProtocolError as error:
            self._refuse(peer, frames, error, holder)
            return
        if message.type in (MessageType.INFER, MessageType.CALL):
            request = self._switchboard.begin(peer, message, key=key)
            if request is not None:
                self._answer(request, message, holder)
        elif message.type in (MessageType.REPLY, MessageType.ERROR):
            self._fleet_calls.forward(message, holder)
        else:
            self.dropped["unexpected results"] += 1

    def _answer(self, request: Request, message: Message, holder: Holder | None) -> None:
        try:
            if holder is not None:
                Guard.check(holder, message)
            if self._stopping:
                raise _stopping()
            self._switchboard.must_be_open(request)
            self._handler(message)(request, message)
        except Exception as error:
            self._switchboard.fail(request, error)

    def _handler(self, message: Message) -> Handler:
        if message.type is MessageType.INFER:
            return self._tail_calls.infer
        handler = self._methods.get(message.method or "")
        if handler is None:
            raise UnknownMethodError(
                f"this server has no method {(message.method or '')[:80]!r}, only {', '.join(sorted(self._methods))}"
            )
        return handler

    def _refuse(
        self, peer: bytes, frames: list[bytes], error: ProtocolError | UnauthorizedError, holder: Holder | None = None
    ) -> None:
        """A message that breaks the wire format: whoever waits for its answer, or for it as an answer, is told.

        One that nobody may send is no answer to anything. Of one of another version not even the id can be made out;
        so that its sender learns why nobody answers, it gets a notice, in version 1. Not for an ERROR, though: two
        that refuse each other's refusals would not end.
        """
        if isinstance(error, UnsupportedVersionError) and frames[0][5] != MessageType.ERROR:
            self._switchboard.notify(peer, error)
        request_id = request_id_of(frames)
        if request_id is None:
            self.dropped["malformed messages"] += 1
            return
        refusal = error_message(request_id, error)
        if frames[0][5] in (MessageType.INFER, MessageType.CALL):
            self._switchboard.send(peer, refusal)
        elif isinstance(error, ProtocolError):
            self._fleet_calls.forward(refusal, holder)

    def _in_lane(self, lane: Lane, calls: Mapping[str, Call]) -> dict[str, Handler]:
        def handle(call: Call, request: Request, message: Message) -> None:
            self._switchboard.work(
                lane, request, partial(call, message), lambda answer: self._switchboard.reply(request, *answer)
            )

        return {method: partial(handle, call) for method, call in calls.items()}

    def _close(self) -> bool:
        self._switchboard.fail_all(_stopping())
        lanes = (*self._fleet_calls.lanes, *self._tail_calls.lanes, self._reading, self._writing)
        for lane in lanes:
            lane.close()
        ended = all(lane.join(_JOIN_WITHIN_S) for lane in lanes)
        # A thread that still loads a tail holds the lock that closing the tails would wait for.
        ended = ended and self._tails.close(_JOIN_WITHIN_S)
        self._switchboard.mailbox.close()
        self._router.close()
        if self.dropped:
            _LOG.info("dropped: %s", ", ".join(f"{count} {what}" for what, count in sorted(self.dropped.items())))
        return ended


def _stopping() -> GoingAwayError:
    return GoingAwayError("the server is stopping; ask again when it is back")
