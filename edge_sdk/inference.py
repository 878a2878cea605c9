"""One inference over both machines: the head here, the tail at the peer, and where the time went.

The device times its own work and the round trip, the server reports its dwell time, transfer is the rest: no two clocks
are compared. :class:`edge_sdk.client.SplitClient` is this for users, :mod:`edge_sdk.agent` uses it for evaluations.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_sdk.channel import Channel
from edge_sdk.errors import ConfigError, ProtocolError
from edge_sdk.exchange import Exchange
from edge_sdk.head import Head, HeadResult, Sample
from edge_sdk.wire import DTYPES, Message, MessageType


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Where the latency of one request went, in seconds; ``total_s`` is the sum.

    ``edge_s``: quantization, head and encoding on the device. ``cloud_s``: from the arrival of the features at the
    server to the departure of the result, by the server's clock. ``transfer_s``: the rest of the round trip.

    Parts of these: ``encode_s`` of ``edge_s``; of ``cloud_s`` its parts ``queue_s`` (its turn, and the way through the
    server's threads), ``batch_wait_s`` (for others to join its batch) and ``compute_s`` (in the engine). These three
    are ``None`` where the server does not tell, or where there is none.
    """

    edge_s: float
    transfer_s: float
    cloud_s: float
    encode_s: float = 0.0
    queue_s: float | None = None
    batch_wait_s: float | None = None
    compute_s: float | None = None

    @property
    def total_s(self) -> float:
        return self.edge_s + self.transfer_s + self.cloud_s


@dataclass(frozen=True, kw_only=True)
class InferReply:
    """The result of one sample.

    ``outputs``: the whole model's outputs in its order, by name, without a batch axis; ``bundle``: digest of the bundle
    that made them; ``sent_bytes`` and ``received_bytes``: what crossed, all frames together.
    """

    outputs: dict[str, npt.NDArray[Any]]
    timing: Timing
    bundle: str
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Started:
    head: HeadResult
    edge_s: float
    encode_s: float
    sent_at: float
    exchange: Exchange | None


class Inference:
    """A head and the channel to its tail. Thread-safe: one head runs at a time, requests may be under way beside it."""

    def __init__(
        self, head: Head, channel: Channel | None, *, timeout_s: float = 10.0, cpu_slowdown: float = 1.0
    ) -> None:
        """``channel`` may be ``None`` for a bundle without a tail. ``cpu_slowdown`` emulates a slower processor: after
        each head run the device pauses for the time that the head would have taken longer there.
        """
        self._head = head
        self._channel = channel
        self._timeout_s = timeout_s
        self._cpu_slowdown = cpu_slowdown
        self._lock = threading.Lock()
        manifest = head.bundle.manifest
        self._digest = head.bundle.digest
        self._order = tuple(spec.name for spec in manifest.outputs)
        self._tail = tuple(
            (f"output_{number}", spec, DTYPES[spec.dtype])
            for number, spec in enumerate(manifest.outputs)
            if spec.side == "tail"
        )
        if self._tail and channel is None:
            raise ConfigError("this bundle has a tail: name the server that runs it, such as tcp://127.0.0.1:5555")

    @property
    def runtime(self) -> str:
        """Name of the runtime that runs the head, ``"none"`` where there is no head."""
        return self._head.runtime

    def infer(self, sample: Sample) -> InferReply:
        """Infer one sample and wait for the result.

        Raises :class:`InvalidInputError`, the server's error, :class:`DeadlineExceededError` or
        :class:`PeerUnreachableError`.
        """
        return self._finish(self._start(sample))

    def infer_many(self, samples: Iterable[Sample], window: int) -> Iterator[InferReply]:
        """Results in the order of ``samples``, with up to ``window`` requests under way.

        With a window above 1 the transfer time of a reply includes its wait for the ones before it.
        """
        under_way: deque[_Started] = deque()
        for sample in samples:
            if len(under_way) == window:
                yield self._finish(under_way.popleft())
            under_way.append(self._start(sample))
        while under_way:
            yield self._finish(under_way.popleft())

    def _start(self, sample: Sample) -> _Started:
        began_at = time.perf_counter()
        with self._lock:
            cpu_s = time.thread_time()
            head = self._head.run(sample)
            if self._cpu_slowdown > 1:
                time.sleep((self._cpu_slowdown - 1) * (time.thread_time() - cpu_s))
        if self._channel is None or not self._tail:
            now = time.perf_counter()
            return _Started(head=head, edge_s=now - began_at, encode_s=0.0, sent_at=now, exchange=None)
        encoding_at = time.perf_counter()
        request = Message(type=MessageType.INFER, request_id=0, bundle=self._digest, tensors=head.features)
        exchange = self._channel.prepare(request, self._timeout_s)
        sent_at = time.perf_counter()
        self._channel.send(exchange)
        return _Started(
            head=head,
            edge_s=sent_at - began_at,
            encode_s=sent_at - encoding_at,
            sent_at=sent_at,
            exchange=exchange,
        )

    def _finish(self, started: _Started) -> InferReply:
        if started.exchange is None:
            return InferReply(
                outputs={name: started.head.outputs[name] for name in self._order},
                timing=Timing(edge_s=started.edge_s, transfer_s=0.0, cloud_s=0.0),
                bundle=self._digest,
                sent_bytes=0,
                received_bytes=0,
            )
        result = started.exchange.future.result()
        round_trip_s = time.perf_counter() - started.sent_at
        cloud_s = min(_dwell_time(result), round_trip_s)
        outputs = started.head.outputs | self._tail_outputs(result)
        return InferReply(
            outputs={name: outputs[name] for name in self._order},
            timing=Timing(
                edge_s=started.edge_s,
                transfer_s=round_trip_s - cloud_s,
                cloud_s=cloud_s,
                encode_s=started.encode_s,
                **_parts(result),
            ),
            bundle=self._digest,
            sent_bytes=started.exchange.sent_bytes,
            received_bytes=started.exchange.received_bytes,
        )

    def _tail_outputs(self, result: Message) -> dict[str, npt.NDArray[Any]]:
        # A missing digest is as wrong as another one: mixed halves must not go unseen.
        if result.bundle != self._digest:
            raise ProtocolError(f"the result was made by bundle {result.bundle}, {self._digest} was asked")
        arrays = result.arrays()
        outputs: dict[str, npt.NDArray[Any]] = {}
        for key, spec, dtype in self._tail:
            array = arrays.get(key)
            if array is None or array.shape != (1, *spec.shape):
                got = "nothing" if array is None else list(array.shape)
                raise ProtocolError(f"the result must hold {key} of shape {[1, *spec.shape]}, got {got}")
            outputs[spec.name] = np.array(array[0], dtype)
        return outputs


def _dwell_time(result: Message) -> float:
    cloud_s = result.body.get("cloud_s")
    if not isinstance(cloud_s, float) or not cloud_s >= 0:
        raise ProtocolError(f"a result must tell 'cloud_s' as a number of seconds, got {cloud_s!r}")
    return cloud_s


def _parts(result: Message) -> dict[str, float]:
    """What the server tells of its dwell time beyond the sum; a server may tell nothing."""
    parts = {name: result.body.get(name) for name in ("queue_s", "batch_wait_s", "compute_s")}
    return {name: part for name, part in parts.items() if isinstance(part, float) and part >= 0}
