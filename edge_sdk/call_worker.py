"""The thread of a channel that works on the peer's calls, one after another. No sockets in here."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from edge_sdk.errors import DeadlineExceededError, OverloadedError, RemoteInternalError, SplitfleetError
from edge_sdk.wire import Message, MessageType, Tensor, error_message

MAX_CALLS_WAITING = 16
RETRY_AFTER_S = 1.0

OnCall = Callable[[Message], tuple[dict[str, Any], Sequence[Tensor]]]

logger = logging.getLogger(__name__)


class CallWorker:
    """Feeds calls to ``on_call`` and hands a REPLY or an ERROR for each to ``answer``."""

    def __init__(self, on_call: OnCall, answer: Callable[[Message], None]) -> None:
        """``answer`` raises :class:`ProtocolError` for a reply that the wire cannot say."""
        self._on_call = on_call
        self._answer = answer
        self._calls: queue.Queue[tuple[Message, float] | None] = queue.Queue(MAX_CALLS_WAITING)
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="splitfleet-calls", daemon=True)
        self._thread.start()

    def take(self, call: Message) -> None:
        """Queue a call; its budget runs from now on. Raises :class:`OverloadedError` when too many wait."""
        budget_s = float("inf") if call.budget_s is None else call.budget_s
        try:
            self._calls.put_nowait((call, time.monotonic() + budget_s))
        except queue.Full:
            raise OverloadedError(f"{MAX_CALLS_WAITING} calls wait here already", retry_after_s=RETRY_AFTER_S) from None

    def stop(self, timeout_s: float) -> None:
        """Take no more calls, and wait for the one at work; after ``timeout_s`` it is let go."""
        self._stopping = True
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None and not self._stopping:
            call, deadline = item
            try:
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(f"the call {call.method!r} waited longer than its budget")
                body, tensors = self._on_call(call)
                self._answer(
                    Message(type=MessageType.REPLY, request_id=call.request_id, body=body, tensors=tuple(tensors))
                )
            except Exception as error:
                if not isinstance(error, SplitfleetError):
                    logger.exception("the call %r failed in an unforeseen way", call.method)
                self._fail(call, error)

    def _fail(self, call: Message, error: Exception) -> None:
        """Whatever becomes of this answer, the thread must go on to the next call."""
        try:
            self._answer(error_message(call.request_id, error))
        except Exception:
            logger.exception("the error that ended the call %r cannot be told", call.method)
            with contextlib.suppress(Exception):
                self._answer(error_message(call.request_id, RemoteInternalError("the call failed; see the log")))
