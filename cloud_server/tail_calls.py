"""INFER, ``tail.load`` and ``tail.unload``, in the I/O thread; the work is done by :mod:`cloud_server.tails`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial

from cloud_server.batches import Computed
from cloud_server.lanes import Lane, log_failure
from cloud_server.ledger import Request
from cloud_server.switchboard import Handler, Switchboard
from cloud_server.tails import TailHost
from edge_sdk.errors import InvalidInputError, OverloadedError
from edge_sdk.protocol import LoadTail, UnloadTail
from edge_sdk.wire import Message, MessageType

_LOG = logging.getLogger(__name__)
LOADING_RETRY_S = 1.0


class TailCalls:
    """What is asked of tails."""

    def __init__(self, switchboard: Switchboard, tails: TailHost) -> None:
        self._switchboard = switchboard
        self._tails = tails
        # One thread: loading takes all cores anyway.
        self._loading = Lane("loading of tails", capacity=64)
        self._coming: dict[str, list[tuple[Request, Message]]] = {}

    @property
    def methods(self) -> Mapping[str, Handler]:
        return {LoadTail.method: self._load, UnloadTail.method: self._unload}

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return (self._loading,)

    def load_at_start(self, digests: Sequence[str]) -> None:
        """Load the tails of accepted allocations in the background; one that fails is logged.

        Their devices may ask at once: such requests wait for their tail instead of being refused.
        """
        self._coming = {digest: [] for digest in digests}

        def load_all() -> None:
            for digest in digests:
                try:
                    if self._tails.has_tail(digest):
                        self._tails.load(digest)
                        _LOG.info("the tail of bundle %s is ready", digest)
                except Exception as error:
                    _LOG.error("the tail of bundle %s of an accepted allocation is not served: %s", digest, error)
                self._switchboard.mailbox.post(partial(self._came, digest))

        self._loading.submit(load_all, log_failure("loading the tails of accepted allocations"))

    def _came(self, digest: str) -> None:
        for request, message in self._coming.pop(digest):
            try:
                self.infer(request, message)
            except Exception as error:
                self._switchboard.fail(request, error)

    def infer(self, request: Request, message: Message) -> None:
        """Have a tail run the features of an INFER; the RESULT is sent when it has."""
        digest = message.bundle
        if digest is None:
            raise InvalidInputError("INFER needs the digest of a bundle in header key 'bundle'")
        waiting = self._coming.get(digest)
        if waiting is not None:
            if len(waiting) >= self._tails.limits.queued:
                raise OverloadedError(
                    f"{len(waiting)} requests wait for the tail of bundle {digest[:12]} to be loaded",
                    retry_after_s=LOADING_RETRY_S,
                )
            waiting.append((request, message))
            return
        self._tails.submit(
            digest,
            request.peer,
            message.tensors,
            begin=partial(self._switchboard.must_be_open, request),
            done=partial(self._switchboard.come_back, request, partial(self._send_result, request, digest)),
        )

    def _send_result(self, request: Request, digest: str, computed: Computed) -> None:
        dwell_s = self._switchboard.clock() - request.received_at
        body = {
            "cloud_s": dwell_s,
            # Its turn, and the way through the threads of the server.
            "queue_s": max(0.0, dwell_s - computed.batch_wait_s - computed.compute_s),
            "batch_wait_s": computed.batch_wait_s,
            "compute_s": computed.compute_s,
        }
        self._switchboard.end(
            request,
            Message(type=MessageType.RESULT, request_id=request.id, bundle=digest, body=body, tensors=computed.outputs),
        )

    def _load(self, request: Request, message: Message) -> None:
        digest = LoadTail.from_body(message.body).bundle
        began = time.perf_counter()

        def loaded(engine: str) -> None:
            self._switchboard.reply(request, {"load_s": time.perf_counter() - began, "engine": engine})

        self._switchboard.work(self._loading, request, partial(self._tails.load, digest), loaded)

    def _unload(self, request: Request, message: Message) -> None:
        digest = UnloadTail.from_body(message.body).bundle

        def unloaded(was_loaded: bool) -> None:
            self._switchboard.reply(request, {"unloaded": was_loaded})

        self._switchboard.work(self._loading, request, partial(self._tails.unload, digest), unloaded)
