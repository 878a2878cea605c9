"""A connection to a peer that asks and answers: one ZeroMQ DEALER, owned by one I/O thread.

Any thread may ask; each request ends exactly once (:mod:`edge_sdk.exchange`). Calls from the peer go to ``on_call``
in a thread of their own, so that answers and heartbeats flow on while it works. ZeroMQ reconnects by itself. What was
sent over a connection that is lost ends at once, what was not sent yet waits for the next one until its deadline. What
is asked and answered is others' business.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from edge_sdk.errors import (
    ConfigError,
    DeadlineExceededError,
    OverloadedError,
    PeerUnreachableError,
    ProtocolError,
    SplitfleetError,
    UnknownMethodError,
    to_wire,
)
from edge_sdk.exchange import Exchange, Ledger
from edge_sdk.wire import MAX_TENSOR_BYTES, Frame, Message, MessageType, Tensor, decode, encode, request_id_of

MAX_PENDING = 1024
MAX_CALLS_WAITING = 16
RECONNECT_MS = 100
MAX_RECONNECT_MS = 2000
# A ping waits behind the features that are on their way: on a link of 1 Mbit/s a few of them take seconds.
HEARTBEAT_INTERVAL_MS = 2000
HEARTBEAT_TIMEOUT_MS = 10_000
HEARTBEAT_TTL_MS = 15_000
QUEUE_OF_SOCKET = 64
JOIN_S = 5.0
# How long the answer to a call waits for a connection that is lost.
KEEP_ANSWER_S = 60.0
# A request that waited for a connection travels with the budget that is left, not with the one it began with.
RESTAMP_AFTER_S = 0.01

_ENDPOINT = re.compile(r"tcp://[^/\s]+:\d{1,5}|ipc://.+")
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED

logger = logging.getLogger(__name__)

OnCall = Callable[[Message], tuple[dict[str, Any], Sequence[Tensor]]]


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
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """Connect, and wait until the peer has shaken hands.

        ``on_call`` takes a CALL of the peer and returns body and tensors of the REPLY; what it raises becomes the
        ERROR. Raises :class:`ConfigError` for a bad endpoint, :class:`PeerUnreachableError` when nobody answers within
        ``connect_timeout_s``.
        """
        if not _ENDPOINT.fullmatch(endpoint):
            raise ConfigError(f"{endpoint!r} is not an endpoint: expected one such as tcp://127.0.0.1:5555")
        self.endpoint = endpoint
        self._on_call = on_call
        self._ledger = Ledger(MAX_PENDING)
        self._outbox: deque[Exchange | _Answer] = deque()
        self._calls: queue.Queue[tuple[Message, float] | None] = queue.Queue(MAX_CALLS_WAITING)
        self._stopping = False
        self._connections = 0
        self._unreachable: str | None = f"nothing listens at {endpoint}"
        self._connected = threading.Event()
        self._own_context = context is None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context() if context is None else context
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not sooner: a thread that still writes to it must not hit another file of the same number.
        weakref.finalize(self, os.close, self._wake_fd)
        self._threads: list[threading.Thread] = []
        self._socket = _dealer(self._context, connect_timeout_s)
        # Made before the socket connects, so that no event is missed.
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._release()
            raise ConfigError(f"{endpoint!r} is not an endpoint that can be connected to: {error}") from None
        self._start(self._serve, "splitfleet-channel")
        if on_call is not None:
            self._start(self._work, "splitfleet-calls")
        if not self._connected.wait(connect_timeout_s):
            reason = self._unreachable
            self.close()
            raise PeerUnreachableError(
                f"no splitfleet peer answers at {endpoint} within {connect_timeout_s:g} s ({reason}); "
                "is 'splitfleet serve' running there?"
            )

    @property
    def connections(self) -> int:
        """How many times a connection was made: a peer knows nothing of us from an earlier one."""
        return self._connections

    @property
    def connected(self) -> bool:
        return self._unreachable is None

    def call(self, request: Request, *, tensors: Sequence[Tensor] = (), timeout_s: float) -> Message:
        """Ask ``request`` and wait for the REPLY.

        Raises the peer's error, :class:`DeadlineExceededError` after ``timeout_s``, or :class:`PeerUnreachableError`.
        """
        message = Message(
            type=MessageType.CALL,
            request_id=0,
            method=request.method,
            body=request.to_body(),
            tensors=tuple(tensors),
        )
        return self.submit(message, timeout_s).result()

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
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wake(self) -> None:
        # Measured: an eventfd wakes the poll in a third of the time of an inproc socket pair.
        os.eventfd_write(self._wake_fd, 1)

    # All below runs in the I/O thread, which alone touches the sockets.

    def _serve(self) -> None:
        reason = f"the connection to {self.endpoint} is closed"
        try:
            self._loop()
        except Exception:
            reason = f"the connection to {self.endpoint} failed inside; see the log"
            logger.exception("the I/O thread of %s failed", self.endpoint)
        finally:
            self._unreachable = reason
            self._ledger.close(reason)
            self._release()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while not self._stopping:
            blocked = not self._flush()
            poller.register(self._socket, zmq.POLLIN | zmq.POLLOUT if blocked else zmq.POLLIN)
            now = time.monotonic()
            deadline = self._ledger.expire(now, self._unreachable)
            # Rounded up: the poll must not end just before the deadline, again and again.
            timeout_ms = None if deadline is None else int((deadline - now) * 1000) + 1
            ready = dict(poller.poll(timeout_ms))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if self._socket in ready:
                self._receive()
            if self._monitor in ready:
                self._watch()

    def _flush(self) -> bool:
        """Send what waits; false when the socket takes no more for now."""
        if self._unreachable is not None:
            return True
        while self._outbox:
            item = self._outbox[0]
            if isinstance(item, Exchange) and item in self._ledger:
                if item.age_s > RESTAMP_AFTER_S:
                    item.restamp()
            elif not isinstance(item, _Answer) or item.deadline < time.monotonic():
                # It ended while it waited, or nobody waits for it any more.
                self._outbox.popleft()
                continue
            try:
                self._socket.send_multipart(item.frames, zmq.NOBLOCK)
            except zmq.Again:
                return False
            if isinstance(item, Exchange):
                item.connection = self._connections
            self._outbox.popleft()
        return True

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
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
                self._reply(to_error(message, UnknownMethodError("this peer does not infer")))
            elif not self._ledger.answer(message, sum(len(frame) for frame in frames)):
                logger.debug("dropped a late answer to request %d", message.request_id)

    def _watch(self) -> None:
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connections += 1
                self._unreachable = None
                self._connected.set()
            elif event == zmq.EVENT_CONNECTED:
                self._unreachable = f"something listens at {self.endpoint} but does not shake hands"
            elif event == zmq.EVENT_DISCONNECTED:
                # What came before the end still counts.
                self._receive()
                if self._unreachable is None:
                    logger.info("lost the connection to %s", self.endpoint)
                self._unreachable = f"the connection to {self.endpoint} was lost"
                self._ledger.lose_connection(self._connections, self._unreachable)

    def _take_call(self, message: Message) -> None:
        if self._on_call is None:
            error: SplitfleetError = UnknownMethodError(f"this peer takes no calls, got {message.method!r}")
        else:
            budget_s = float("inf") if message.budget_s is None else message.budget_s
            try:
                self._calls.put_nowait((message, time.monotonic() + budget_s))
                return
            except queue.Full:
                error = OverloadedError(f"{MAX_CALLS_WAITING} calls wait here already", retry_after_s=1.0)
        self._reply(to_error(message, error))

    def _reply(self, message: Message) -> None:
        self._outbox.append(_Answer(encode(message), time.monotonic() + KEEP_ANSWER_S))

    def _release(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        if self._own_context:
            self._context.term()

    # This one runs in the thread for calls.

    def _work(self) -> None:
        assert self._on_call is not None
        while (item := self._calls.get()) is not None and not self._stopping:
            message, deadline = item
            try:
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(f"the call {message.method!r} waited longer than its budget")
                body, tensors = self._on_call(message)
                reply = Message(
                    type=MessageType.REPLY, request_id=message.request_id, body=body, tensors=tuple(tensors)
                )
                self._reply(reply)
            except Exception as error:
                if not isinstance(error, SplitfleetError):
                    logger.exception("the call %r failed in an unforeseen way", message.method)
                self._reply(to_error(message, error))
            self._wake()


def to_error(request: Message, error: BaseException) -> Message:
    """The ERROR message that answers ``request``."""
    return Message(type=MessageType.ERROR, request_id=request.request_id, bundle=request.bundle, body=to_wire(error))


def _dealer(context: zmq.Context[zmq.Socket[bytes]], handshake_s: float) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    # Without it a DEALER queues while the peer is away and floods it with stale requests when it is back.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_OF_SOCKET)
    socket.setsockopt(zmq.RCVHWM, QUEUE_OF_SOCKET)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_TENSOR_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, max(int(handshake_s * 1000), 1))
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
    # A silent partition closes no connection.
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TTL_MS)
    return socket
