"""What is counted of requests, tails and devices, in Prometheus' form.

Counts are taken in the I/O thread, and read by whoever scrapes. Labels come from a bounded set, whatever is asked: the
tails that are loaded, the methods that there are, and a limited number of device kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from cloud_server.batches import Computed
from cloud_server.distribution import Distribution
from cloud_server.ledger import Request
from cloud_server.tails import TailHost
from edge_sdk.protocol import (
    CallDevice,
    FetchBlob,
    Heartbeat,
    ListDevices,
    LoadTail,
    PutBlob,
    Register,
    StatBlob,
    UnloadTail,
)
from edge_sdk.wire import Message, MessageType

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OK = "OK"
METHODS = frozenset(
    {MessageType.INFER.name}
    | {call.method for call in (Register, Heartbeat, ListDevices, CallDevice, LoadTail, UnloadTail)}
    | {call.method for call in (StatBlob, FetchBlob, PutBlob)}
)
_OTHER = "other"
_MAX_KINDS = 64
_TAIL_CHARS = 12
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PER_TAIL = ("tail", "device_kind")


def _seconds() -> Distribution:
    return Distribution(_SECONDS)


@dataclass(kw_only=True, slots=True)
class _Series:
    """The figures of one tail and one device kind."""

    queue: Distribution = field(default_factory=_seconds)
    batch_wait: Distribution = field(default_factory=_seconds)
    compute: Distribution = field(default_factory=_seconds)
    batch: Distribution = field(default_factory=partial(Distribution, _SAMPLES))
    received: int = 0
    sent: int = 0


class Metrics:
    """The figures of one server. ``kind_of`` gives the profile of the device behind a routing id, ``""`` for none."""

    def __init__(
        self,
        *,
        tails: TailHost,
        kind_of: Callable[[bytes], str],
        dropped: Mapping[str, int],
        devices_online: Callable[[], int],
        begun: Callable[[], int],
    ) -> None:
        self._tails = tails
        self._kind_of = kind_of
        self._kinds: set[str] = set()
        self._dropped = dropped
        self._devices_online = devices_online
        self._begun = begun
        self._registry = CollectorRegistry(auto_describe=True)
        # By method, tail, device kind and outcome.
        self._requests: Counter[tuple[str, str, str, str]] = Counter()
        self._series: dict[tuple[str, str], _Series] = {}
        self._registry.register(self)

    def exposition(self) -> bytes:
        """All figures, as ``text/plain`` of version 0.0.4. May be called from any thread."""
        return generate_latest(self._registry)

    def ended(self, request: Request, message: Message) -> None:
        """A request has its end, which is ``message``."""
        outcome = str(message.body.get("code", _OTHER)) if message.type is MessageType.ERROR else OK
        method = request.method if request.method in METHODS else _OTHER
        self._requests[method, *self._labels(request), outcome] += 1

    def computed(self, request: Request, features: int, queue_s: float, computed: Computed) -> None:
        """A tail has run a request of ``features`` bytes."""
        labels = self._labels(request)
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Series()
        series.queue.add(queue_s)
        series.batch_wait.add(computed.batch_wait_s)
        series.compute.add(computed.compute_s)
        series.batch.add(computed.batch)
        series.received += features
        series.sent += sum(tensor.data.nbytes for tensor in computed.outputs)

    def collect(self) -> Iterable[Metric]:
        """All figures, when somebody asks."""
        requests = CounterMetricFamily(
            "splitfleet_requests",
            "Requests that ended, by outcome: OK or an error code.",
            labels=("method", *_PER_TAIL, "outcome"),
        )
        for labels, count in self._requests.copy().items():
            requests.add_metric(labels, count)
        yield requests
        yield from self._of_tails()
        depths = self._tails.depths()
        yield GaugeMetricFamily("splitfleet_tails_loaded", "Tails that are served.", value=len(self._tails.ready))
        depth = GaugeMetricFamily("splitfleet_queue_depth", "Requests that wait for a tail.", labels=("tail",))
        for digest, waiting in depths.items():
            depth.add_metric((digest[:_TAIL_CHARS],), waiting)
        yield depth
        yield GaugeMetricFamily(
            "splitfleet_devices_online", "Registered devices that are heard of.", value=self._devices_online()
        )
        engines = InfoMetricFamily("splitfleet_tail_engine", "What runs a tail.", labels=("tail",))
        for digest, engine in self._tails.engines().items():
            engines.add_metric((digest[:_TAIL_CHARS],), {"engine": engine})
        yield engines
        yield from self._of_workers()
        yield CounterMetricFamily(
            "splitfleet_requests_begun", "Requests that came in; some may not have ended.", value=self._begun()
        )
        dropped = CounterMetricFamily("splitfleet_dropped", "What could not be answered.", labels=("reason",))
        for reason, count in dict(self._dropped).items():
            dropped.add_metric((reason,), count)
        yield dropped

    def _of_tails(self) -> Iterable[Metric]:
        def histogram(name: str, what: str) -> HistogramMetricFamily:
            return HistogramMetricFamily(f"splitfleet_{name}", what, labels=_PER_TAIL)

        queue = histogram("queue_seconds", "How long requests waited for their turn, and were on their way.")
        batch_wait = histogram("batch_wait_seconds", "How long requests waited for others to join their batch.")
        compute = histogram("compute_seconds", "How long requests were in the engine.")
        batch = histogram("batch_samples", "Samples that ran together, as each request saw it.")
        received = CounterMetricFamily("splitfleet_received_bytes", "Bytes of features that crossed.", labels=_PER_TAIL)
        sent = CounterMetricFamily("splitfleet_sent_bytes", "Bytes of results that crossed.", labels=_PER_TAIL)
        for labels, series in self._series.copy().items():
            _add(queue, labels, series.queue)
            _add(batch_wait, labels, series.batch_wait)
            _add(compute, labels, series.compute)
            _add(batch, labels, series.batch)
            received.add_metric(labels, series.received)
            sent.add_metric(labels, series.sent)
        yield from (queue, batch_wait, compute, batch, received, sent)

    def _of_workers(self) -> Iterable[Metric]:
        workers = self._tails.workers()
        yield GaugeMetricFamily(
            "splitfleet_workers_alive", "Worker processes that run tails.", value=sum(worker.up for worker in workers)
        )
        restarts = CounterMetricFamily("splitfleet_worker_restarts", "Times that it died.", labels=("worker",))
        memory = GaugeMetricFamily("splitfleet_worker_rss_bytes", "Memory that it has.", labels=("worker",))
        tails = GaugeMetricFamily("splitfleet_worker_tails", "Tails that are loaded in it.", labels=("worker",))
        for worker in workers:
            label = (str(worker.number),)
            restarts.add_metric(label, worker.restarts)
            memory.add_metric(label, worker.rss_bytes)
            tails.add_metric(label, worker.tails)
        yield from (restarts, memory, tails)

    def _labels(self, request: Request) -> tuple[str, str]:
        kind = self._kind_of(request.peer)
        if kind not in self._kinds:
            if len(self._kinds) >= _MAX_KINDS:
                kind = _OTHER
            self._kinds.add(kind)
        digest = request.bundle
        if digest is None:
            return "", kind
        return digest[:_TAIL_CHARS] if self._tails.is_known(digest) else _OTHER, kind


def _add(family: HistogramMetricFamily, labels: tuple[str, str], distribution: Distribution) -> None:
    buckets, total = distribution.read()
    family.add_metric(labels, [("+Inf" if bound == inf else str(float(bound)), n) for bound, n in buckets], total)
