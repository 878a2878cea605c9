"""A connection to a peer that asks and answers: one ZeroMQ DEALER, owned by one I/O thread.

Any thread may ask; each request ends exactly once (:mod:`edge_sdk.exchange`). Calls from the peer go to ``on_call``
in a thread of their own, so that answers and heartbeats flow on while it works. ZeroMQ reconnects by itself. What was
sent over a connection that is lost ends at once, what was not sent yet waits for the next one until its deadline. What
is asked and answered is others' business.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, Self

import zmq

from edge_sdk.call_worker import CallWorker, OnCall
from edge_sdk.dealer import Context
from edge_sdk.endpoints import check_endpoint
from edge_sdk.errors import (
    GoingAwayError,
    PeerUnreachableError,
    ProtocolError,
    SplitfleetError,
    UnknownMethodError,
    UnsupportedVersionError,
    from_wire,
)
from edge_sdk.exchange import Exchange, Ledger
from edge_sdk.keys import CurveKeys
from edge_sdk.link import Change, Link
from edge_sdk.protocol import NOTICE_ID
from edge_sdk.wire import Frame, Message, MessageType, Tensor, decode, encode, error_message, request_id_of

MAX_PENDING = 1024
# What waits for a connection, or for its answer, is held in memory, and copied once more where ZeroMQ queues it.
MAX_PENDING_BYTES = 64 * 1024 * 1024
JOIN_S = 5.0
# How long the answer to a call waits for a connection that is lost.
KEEP_ANSWER_S = 60.0
# A request that waited for a connection travels with the budget that is left, not with the one it began with.
RESTAMP_AFTER_S = 0.01
# After ZeroMQ has given up: a key that was refused may be allowed meanwhile, a damaged connection be whole.
REOPEN_AFTER_S = 2.0

logger = logging.getLogger(__name__)


class Request(Protocol):
    """The parameters of a call; those of :mod:`edge_sdk.protocol` are."""

    @property
    def method(self) -> str: ...
    def to_body(self) -> dict[str, Any]: ...


class _Answer(NamedTuple):
    """An answer to a call of the peer, which finds its call by the id alone, also over a new connection."""

    frames: list[Frame]
    deadline: float


class Channel:
    """A connection to the peer at ``endpoint``. Thread-safe; a context manager."""

    def __init__(
        self,
        endpoint: str,
        *,
        on_call: OnCall | None = None,
        connect_timeout_s: float = 5.0,
        keys: CurveKeys | None = None,
        context: Context | None = None,
    ) -> None:
        """Connect, and wait until the peer has shaken hands.

        ``on_call`` takes a CALL of the peer and returns body and tensors of the REPLY; what it raises becomes the
        ERROR. ``keys`` turns CURVE on, which the server must have on too.

        Raises :class:`ConfigError` for a bad endpoint and, within ``connect_timeout_s``, :class:`UnauthorizedError`
        when the server does not allow our key, :class:`UntrustedServerError` when it does not prove to have the one
        that we know, :class:`PeerUnreachableError` when nobody answers.
        """
        check_endpoint(endpoint)
        self.endpoint = endpoint
        self._ledger = Ledger(MAX_PENDING, MAX_PENDING_BYTES)
        self._outbox: deque[Exchange | _Answer] = deque()
        self._stopping = False
        self._refused = False
        self._reopen_at: float | None = None
        self._settled = threading.Event()
        self._own_context = context is None
        self._context: Context = zmq.Context() if context is None else context
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not sooner: a thread that still writes to it must not hit another file of the same number.
        weakref.finalize(self, os.close, self._wake_fd)
        try:
            self._link = Link(self._context, endpoint, handshake_s=connect_timeout_s, keys=keys)
        except SplitfleetError:
            self._end_context()
            raise
        self._worker = CallWorker(on_call, self._answer) if on_call is not None else None
        self._thread = threading.Thread(target=self._serve, name="splitfleet-channel", daemon=True)
        self._thread.start()
        if not self._settled.wait(connect_timeout_s) or self._refused:
            outage = self._link.outage
            self.close()
            if type(outage) is PeerUnreachableError:
                outage = PeerUnreachableError(
                    f"no splitfleet peer answers at {endpoint} within {connect_timeout_s:g} s ({outage.message}); "
                    "is 'splitfleet serve' running there?"
                )
            # It may have connected in the very last moment.
            raise outage or PeerUnreachableError(f"no splitfleet peer answers at {endpoint} in time")

    @property
    def connections(self) -> int:
        """How many times a connection was made: a peer knows nothing of us from an earlier one."""
        return self._link.connections

    @property
    def connected(self) -> bool:
        return self._link.reason is None

    @property
    def under_way(self) -> int:
        """How many requests have no end yet."""
        return len(self._ledger)

    @property
    def ended(self) -> bool:
        """Whether it can never connect again: it was closed, or its I/O thread failed inside."""
        return not self._thread.is_alive()

    def call(self, request: Request, *, tensors: Sequence[Tensor] = (), timeout_s: float) -> Message:
        """Ask ``request`` and wait for the REPLY.

        Raises the peer's error, :class:`DeadlineExceededError` after ``timeout_s``, or :class:`PeerUnreachableError`.
        """
        return self.begin_call(request, tensors=tensors, timeout_s=timeout_s).result()

    def begin_call(self, request: Request, *, tensors: Sequence[Tensor] = (), timeout_s: float) -> Future[Message]:
        """The same without waiting: see :meth:`submit`."""
        message = Message(
            type=MessageType.CALL,
            request_id=0,
            method=request.method,
            body=request.to_body(),
            tensors=tuple(tensors),
        )
        return self.submit(message, timeout_s)

    def submit(self, message: Message, timeout_s: float) -> Future[Message]:
        """Send an INFER or a CALL; the future ends within ``timeout_s`` in all cases.

        The request id is assigned here. The tensors must not change before the future is done. Callbacks of the future
        run in the I/O thread and must not block.
        """
        exchange = self.prepare(message, timeout_s)
        self.send(exchange)
        return exchange.future

    def prepare(self, message: Message, timeout_s: float) -> Exchange:
        """The first half of :meth:`submit`: encode, so that the caller may time it apart from the transfer."""
        values = {name: getattr(message, name) for name in ("type", "method", "bundle", "body", "tensors")}
        return Exchange(Message(request_id=self._ledger.new_id(), **values), timeout_s)

    def send(self, exchange: Exchange) -> None:
        """The second half of :meth:`submit`."""
        self._ledger.open(exchange)
        self._outbox.append(exchange)
        self._wake()

    def close(self) -> None:
        """Disconnect. What is under way ends with :class:`PeerUnreachableError`; an ``on_call`` that runs is let go."""
        if self._stopping:
            return
        self._stopping = True
        self._wake()
        self._thread.join(JOIN_S)
        if self._worker is not None:
            self._worker.stop(JOIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _wake(self) -> None:
        # Measured, from here to the I/O thread and back through a future: 17 µs.
        os.eventfd_write(self._wake_fd, 1)

    def _answer(self, message: Message) -> None:
        self._outbox.append(_Answer(encode(message), time.monotonic() + KEEP_ANSWER_S))
        self._wake()

    # All below runs in the I/O thread, which alone touches the sockets.

    def _serve(self) -> None:
        reason = f"the connection to {self.endpoint} is closed"
        try:
            self._loop()
        except Exception:
            reason = f"the connection to {self.endpoint} failed inside; see the log"
            logger.exception("the I/O thread of %s failed", self.endpoint)
        finally:
            self._link.fail(reason)
            self._ledger.close(reason)
            self._link.close()
            self._end_context()

    def _loop(self) -> None:
        poller = self._poller()
        while not self._stopping:
            now = time.monotonic()
            # Before anything is sent: what is past its deadline must not go out.
            deadline = self._ledger.expire(now, self._link.reason)
            if self._reopen_at is not None:
                if not self._link.idle:
                    self._reopen_at = None
                elif now >= self._reopen_at:
                    self._reopen_at = None
                    self._link.reopen()
                    poller = self._poller()
                else:
                    deadline = self._reopen_at if deadline is None else min(deadline, self._reopen_at)
            blocked = not self._flush()
            poller.register(self._link.socket, zmq.POLLIN | zmq.POLLOUT if blocked else zmq.POLLIN)
            # Rounded up: the poll must not end just before the deadline, again and again.
            timeout_ms = None if deadline is None else int((deadline - now) * 1000) + 1
            ready = dict(poller.poll(timeout_ms))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if self._link.socket in ready:
                self._receive()
            if self._link.monitor in ready:
                self._watch()

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        poller.register(self._link.monitor, zmq.POLLIN)
        return poller

    def _flush(self) -> bool:
        """Send what waits; false when the socket takes no more for now."""
        if self._link.reason is not None:
            # What has ended must not pile up through an outage.
            for _ in range(len(self._outbox)):
                item = self._outbox.popleft()
                if self._is_wanted(item):
                    self._outbox.append(item)
            return True
        while self._outbox:
            item = self._outbox[0]
            if self._is_wanted(item):
                if isinstance(item, Exchange) and item.age_s > RESTAMP_AFTER_S:
                    item.restamp()
                try:
                    self._link.socket.send_multipart(item.frames, zmq.NOBLOCK)
                except zmq.Again:
                    return False
                if isinstance(item, Exchange):
                    item.connection = self._link.connections
            self._outbox.popleft()
        return True

    def _is_wanted(self, item: Exchange | _Answer) -> bool:
        """Whether somebody still waits for it."""
        return item in self._ledger if isinstance(item, Exchange) else item.deadline > time.monotonic()

    def _receive(self) -> None:
        while True:
            try:
                frames = self._link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode(frames)
            except ProtocolError as error:
                request_id = request_id_of(frames)
                logger.warning("%s sent a message that breaks the wire format: %s", self.endpoint, error)
                if request_id is not None:
                    self._ledger.fail(request_id, error)
                continue
            if message.type is MessageType.CALL:
                self._take_call(message)
            elif message.type is MessageType.INFER:
                self._answer(error_message(message.request_id, UnknownMethodError("this peer does not infer")))
            elif message.request_id == NOTICE_ID and message.type is MessageType.ERROR:
                self._heed(from_wire(message.body))
            elif not self._ledger.answer(message, sum(len(frame) for frame in frames)):
                logger.debug("dropped a late answer to request %d", message.request_id)

    def _heed(self, notice: SplitfleetError) -> None:
        """The peer says what concerns all requests: nothing new needs to travel there, until it is another peer."""
        logger.warning("%s says: %s", self.endpoint, notice.message)
        if isinstance(notice, (GoingAwayError, UnsupportedVersionError)):
            self._ledger.refuse(notice)
        if isinstance(notice, UnsupportedVersionError):
            self._ledger.lose_connection(self._link.connections, notice.message, UnsupportedVersionError)

    def _watch(self) -> None:
        while change := self._link.next_change():
            if change is Change.UP:
                self._settled.set()
            elif change is Change.DOWN:
                # What came before the end still counts.
                self._receive()
                self._ledger.refuse(None)
                logger.info("lost the connection to %s", self.endpoint)
                self._ledger.lose_connection(self._link.connections, self._link.reason or "")
            elif self._settled.is_set():
                logger.warning("%s", self._link.reason)
            else:
                self._refused = True
                self._settled.set()
        if self._link.idle and self._reopen_at is None:
            self._reopen_at = time.monotonic() + REOPEN_AFTER_S

    def _take_call(self, message: Message) -> None:
        try:
            if self._worker is None:
                raise UnknownMethodError(f"this peer takes no calls, got {(message.method or '')[:80]!r}")
            self._worker.take(message)
        except SplitfleetError as error:
            self._answer(error_message(message.request_id, error))

    def _end_context(self) -> None:
        if self._own_context:
            self._context.term()
