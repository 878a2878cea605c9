"""INFER, ``tail.load`` and ``tail.unload``; the work is done by :mod:`cloud_server.tails`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cloud_server.batches import Computed
from cloud_server.lanes import Lane
from cloud_server.ledger import Request
from cloud_server.switchboard import Handler, Switchboard
from cloud_server.tails import TailHost
from cloud_server.workers.worker import Loaded
from edge_sdk.errors import InvalidInputError
from edge_sdk.protocol import LoadTail, UnloadTail
from edge_sdk.wire import Message, MessageType


class TailCalls:
    """What is asked of tails."""

    def __init__(
        self,
        switchboard: Switchboard,
        tails: TailHost,
        on_computed: Callable[[Request, int, float, Computed], None],
    ) -> None:
        """``on_computed`` hears of each result: request, bytes of its features, time in the queue, outcome."""
        self._switchboard = switchboard
        self._tails = tails
        # The tails of accepted allocations; ``None`` as long as nobody knows them.
        self._wanted: frozenset[str] | None = None
        self._on_computed = on_computed

    @property
    def methods(self) -> Mapping[str, Handler]:
        return {LoadTail.method: self._load, UnloadTail.method: self._unload}

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return (self._tails.lane,)

    def missing(self) -> frozenset[str] | None:
        """Accepted allocations whose tails are not served; ``None``: not known yet. May be asked from any thread."""
        wanted = self._wanted
        return None if wanted is None else wanted.difference(self._tails.ready)

    def load_at_start(self, digests: Sequence[str]) -> None:
        """Load the tails of accepted allocations in the background; one that fails is logged.

        Their devices may ask at once: such requests wait for their tail instead of being refused.
        """
        self._wanted = frozenset(digests)
        self._tails.bring(digests, on_edge_only=self._want_no_more)

    def infer(self, request: Request, message: Message) -> None:
        """Have a tail run the features of an INFER; the RESULT is sent when it has."""
        digest = message.bundle
        if digest is None:
            raise InvalidInputError("INFER needs the digest of a bundle in header key 'bundle'")
        self._tails.submit(
            digest,
            # One device may have several connections, but has one key.
            request.key or request.peer,
            message.tensors,
            begin=partial(self._switchboard.must_be_open, request),
            done=partial(self._ended, request, message),
        )

    def _ended(self, request: Request, message: Message, outcome: Computed | Exception) -> None:
        if isinstance(outcome, Exception):
            self._switchboard.fail(request, outcome)
        else:
            self._send_result(request, message, outcome)

    def _send_result(self, request: Request, message: Message, computed: Computed) -> None:
        dwell_s = self._switchboard.clock() - request.received_at
        # Its turn, and the way through the server's processes.
        queue_s = max(0.0, dwell_s - computed.batch_wait_s - computed.compute_s)
        body = {
            "cloud_s": dwell_s,
            "queue_s": queue_s,
            "batch_wait_s": computed.batch_wait_s,
            "compute_s": computed.compute_s,
        }
        self._on_computed(request, sum(tensor.data.nbytes for tensor in message.tensors), queue_s, computed)
        self._switchboard.end(
            request,
            Message(
                type=MessageType.RESULT,
                request_id=request.id,
                bundle=message.bundle,
                body=body,
                tensors=computed.outputs,
            ),
        )

    def _load(self, request: Request, message: Message) -> None:
        digest = LoadTail.from_body(message.body).bundle
        began = time.perf_counter()

        def loaded(tail: Loaded) -> None:
            load_s = time.perf_counter() - began
            self._switchboard.reply(request, {"load_s": load_s, "engine": tail.engine, "engine_reason": tail.reason})

        self._switchboard.work(self._tails.lane, request, partial(self._tails.load, digest), loaded)

    def _unload(self, request: Request, message: Message) -> None:
        digest = UnloadTail.from_body(message.body).bundle

        def unloaded(was_loaded: bool) -> None:
            self._want_no_more(digest)
            self._switchboard.reply(request, {"unloaded": was_loaded})

        self._switchboard.work(self._tails.lane, request, partial(self._tails.unload, digest), unloaded)

    def _want_no_more(self, digest: str) -> None:
        self._wanted = (self._wanted or frozenset()) - {digest}
