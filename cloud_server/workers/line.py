"""A line: the server's end of the way to one loaded tail, over which one batch at a time goes."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence

from cloud_server.loop import Loop
from cloud_server.tail_signature import Features, Result, TailSignature
from cloud_server.workers.frames import HEAD, HEAD_BYTES, Kind, error_of, unpack
from cloud_server.workers.stream import Stream
from edge_sdk.errors import RemoteInternalError

_LOG = logging.getLogger(__name__)

# The results of each request and how long they were computed, or why there are none.
Ran = Callable[[list[Result] | Exception, float], None]


class Line:
    """The line over ``end`` to a tail of ``signature``; ``on_lost`` is called when the worker closes its end."""

    def __init__(
        self, loop: Loop, end: socket.socket, signature: TailSignature, *, on_lost: Callable[[], None]
    ) -> None:
        self._signature = signature
        self._stream = Stream(loop, end, on_frame=self._came, on_lost=on_lost)
        self._batch: tuple[Sequence[Features], int, Ran] | None = None

    def run(self, requests: Sequence[Features], samples: int, ran: Ran) -> None:
        """Run requests whose features were checked, ``samples`` in all, as one batch; ``ran`` hears of it, unless the
        line is lost or closed before.
        """
        self._batch = requests, samples, ran
        size = samples * self._signature.feature_bytes
        head = HEAD.pack(Kind.BATCH, samples, size, 0.0)
        self._stream.send(head, *self._signature.buffers(requests), size=HEAD_BYTES + size)

    def close(self) -> None:
        """Tell the worker that no more comes, and forget what it is at."""
        self._batch = None
        self._stream.close()

    def _came(self, kind: int, samples: int, payload: memoryview, seconds: float) -> None:
        if self._batch is None:
            return
        requests, expected, ran = self._batch
        self._batch = None
        outcome: list[Result] | Exception
        if kind == Kind.OUTPUTS and samples == expected and payload.nbytes == samples * self._signature.output_bytes:
            outcome = self._signature.results(requests, payload)
        elif kind == Kind.FAILED:
            body = unpack(payload)
            if "traceback" in body:
                _LOG.warning("the tail of bundle %s failed:\n%s", self._signature.digest, body["traceback"])
            outcome = error_of(body)
        else:
            outcome = RemoteInternalError(f"a worker answered a batch of {expected} with {kind}, {samples}")
        ran(outcome, seconds)
