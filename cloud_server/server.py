"""The cloud server: one thread that owns the ROUTER and the table of who answers what.

Nothing slow runs in that thread. Tails run in worker processes; blobs, the registry and the loading of tails have
lanes, whose outcomes come back through a mailbox. A message that is malformed, unknown or fails in an unforeseen
way costs that message, never the server.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from cloud_server.allow_list import Holder
from cloud_server.blob_calls import MAX_CHUNK_BYTES, BlobCalls, Call
from cloud_server.fleet import Fleet
from cloud_server.fleet_calls import DeviceRegistry, FleetCalls
from cloud_server.guard import Guard
from cloud_server.lanes import Lane
from cloud_server.ledger import Request
from cloud_server.loop import Loop
from cloud_server.metrics import Metrics
from cloud_server.router import Arrival, Router
from cloud_server.switchboard import Handler, Switchboard
from cloud_server.tail_calls import TailCalls
from cloud_server.tails import TailHost
from edge_sdk.errors import (
    GoingAwayError,
    InvalidInputError,
    ProtocolError,
    UnauthorizedError,
    UnknownMethodError,
    UnsupportedVersionError,
)
from edge_sdk.protocol import NOTICE_ID
from edge_sdk.wire import Frame, Message, MessageType, decode, error_message, request_id_of

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
        loop: Loop,
        grace_s: float = GRACE_S,
    ) -> None:
        """``loop`` is the one of ``tails``. ``grace_s``: how long what is under way may take once the server stops."""
        self.endpoint = router.endpoint
        self._router = router
        self._registry = registry
        self._tails = tails
        # Without one, which takes a router without CURVE, everybody may do everything.
        self._guard = router.guard
        self._loop = loop
        self._switchboard = Switchboard(router, loop)
        self._metrics = Metrics(
            tails=tails,
            kind_of=fleet.profile_of,
            dropped=self._switchboard.dropped,
            devices_online=fleet.online,
            begun=lambda: self._switchboard.begun,
        )
        self._switchboard.on_end = self._metrics.ended
        self._fleet_calls = FleetCalls(self._switchboard, fleet, registry, router.guard)
        self._tail_calls = TailCalls(self._switchboard, tails, self._metrics.computed)
        self._reading = Lane("blob reads", threads=2, capacity=1024)
        self._writing = Lane("blob writes", capacity=256)
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

    @property
    def under_way(self) -> int:
        """How many requests have no end yet."""
        return self._switchboard.under_way

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return self._router.connections.count

    def stop(self) -> None:
        """Have :meth:`run` end: all peers are told at once, nothing new is taken, what is under way gets its answer, or
        a typed error when the grace period is over.

        May be called from any thread and from a signal handler.
        """
        self._stopping = True
        self._loop.mailbox.wake()

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
        reasons = (
            [f"tails of accepted allocations that are not loaded: {', '.join(sorted(missing))}"] if missing else []
        )
        reasons += [trouble for what, trouble in self._tails.troubles().items() if what not in missing]
        return "; ".join(reasons) or None

    def exposition(self) -> bytes:
        """Its figures, in Prometheus' text form."""
        return self._metrics.exposition()

    def run(self) -> bool:
        """Serve until :meth:`stop`. Returns whether all threads ended; one may still read or write files."""
        active = self._registry.active_bundles()
        self._tails.start()
        self._tail_calls.load_at_start(active)
        # Only to wake it: what there is to read is asked of the router itself.
        self._loop.watch(self._router.descriptor, lambda _: None)
        self._loop.watch(self._router.connections.descriptor, lambda _: self._router.connections.take_in())
        stop_by: float | None = None
        while stop_by is None or (self._switchboard.under_way and self._switchboard.clock() < stop_by):
            try:
                self._turn()
                if self._stopping and stop_by is None:
                    stop_by = self._switchboard.clock() + self._grace_s
                    self._switchboard.notify_all(_stopping())
                    self._fleet_calls.stop(_stopping())
            except Exception:
                _LOG.exception("unexpected failure in the I/O loop")
        return self._close()

    def _turn(self) -> None:
        if self._router.readable():
            for _ in range(_RECEIVED_AT_ONCE):
                received = self._router.receive()
                if received is None:
                    break
                self._receive(received)
        for peer in self._router.connections.lost():
            self._switchboard.lose(peer)
        self._loop.run_soon()
        # Sending may have taken in what has come: the descriptor tells of it only once.
        self._loop.wait(0.0 if self._router.readable() else self._wake_at())
        self._switchboard.expire()
        now = self._last_turn = self._switchboard.clock()
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_S
            self._fleet_calls.sweep()
            self._tails.sweep()

    def _wake_at(self) -> float:
        deadline = self._switchboard.next_deadline()
        return self._next_sweep if deadline is None else min(self._next_sweep, deadline)

    def _receive(self, arrival: Arrival) -> None:
        peer, frames, key, stands = arrival
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
            if not stands:
                self.dropped["requests of peers that are gone"] += 1
                return
            if message.request_id == NOTICE_ID:
                self._refuse(peer, frames, ProtocolError(f"no request may have the id {NOTICE_ID}, that of notices"))
                return
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
            if message.type is MessageType.CALL:
                _check_size(message)
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
        self, peer: bytes, frames: list[Frame], error: ProtocolError | UnauthorizedError, holder: Holder | None = None
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
        # Whoever waits for a tail to be loaded does not have to any more.
        self._tails.close(_JOIN_WITHIN_S)
        lanes = (*self._fleet_calls.lanes, *self._tail_calls.lanes, self._reading, self._writing)
        for lane in lanes:
            lane.close()
        ended = all(lane.join(_JOIN_WITHIN_S) for lane in lanes)
        self._loop.close()
        self._router.close()
        if self.dropped:
            _LOG.info("dropped: %s", ", ".join(f"{count} {what}" for what, count in sorted(self.dropped.items())))
        return ended


def _check_size(call: Message) -> None:
    """What a call brings along waits in queues that are bounded by their number."""
    size_bytes = sum(tensor.data.nbytes for tensor in call.tensors)
    if size_bytes > MAX_CHUNK_BYTES:
        raise InvalidInputError(
            f"a call carries tensors of at most {MAX_CHUNK_BYTES} bytes, {(call.method or '')[:80]} came with "
            f"{size_bytes}"
        )


def _stopping() -> GoingAwayError:
    return GoingAwayError("the server is stopping; ask again when it is back")
