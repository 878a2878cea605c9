"""What is counted of requests, tails and devices, in Prometheus' form.

Counts are taken in the I/O thread, and read by whoever scrapes. Labels come from a bounded set, whatever is asked: the
tails that are loaded, the methods that there are, and a limited number of device kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from cloud_server.batches import Computed
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


class _Series(NamedTuple):
    """The figures of one tail and one device kind."""

    queue: Histogram
    batch_wait: Histogram
    compute: Histogram
    batch: Histogram
    received: Counter
    sent: Counter


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
        self._requests = Counter(
            "splitfleet_requests",
            "Requests that ended, by outcome: OK or an error code.",
            ("method", *_PER_TAIL, "outcome"),
            registry=self._registry,
        )
        self._queue = self._seconds("queue", "waited for their turn, and for the way through the server's processes")
        self._batch_wait = self._seconds("batch_wait", "waited for others to join their batch")
        self._compute = self._seconds("compute", "were in the engine")
        self._batch = Histogram(
            "splitfleet_batch_samples",
            "Samples that ran together, as each request saw it.",
            _PER_TAIL,
            buckets=_SAMPLES,
            registry=self._registry,
        )
        self._received = self._bytes("received", "Bytes of features")
        self._sent = self._bytes("sent", "Bytes of results")
        # Looking up labels takes as long as counting.
        self._series: dict[tuple[str, str], _Series] = {}
        self._registry.register(self)

    def exposition(self) -> bytes:
        """All figures, as ``text/plain`` of version 0.0.4. May be called from any thread."""
        return generate_latest(self._registry)

    def ended(self, request: Request, message: Message) -> None:
        """A request has its end, which is ``message``."""
        outcome = str(message.body.get("code", _OTHER)) if message.type is MessageType.ERROR else OK
        method = request.method if request.method in METHODS else _OTHER
        self._requests.labels(method, *self._labels(request), outcome).inc()

    def computed(self, request: Request, features: int, queue_s: float, computed: Computed) -> None:
        """A tail has run a request of ``features`` bytes."""
        labels = self._labels(request)
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Series(
                queue=self._queue.labels(*labels),
                batch_wait=self._batch_wait.labels(*labels),
                compute=self._compute.labels(*labels),
                batch=self._batch.labels(*labels),
                received=self._received.labels(*labels),
                sent=self._sent.labels(*labels),
            )
        series.queue.observe(queue_s)
        series.batch_wait.observe(computed.batch_wait_s)
        series.compute.observe(computed.compute_s)
        series.batch.observe(computed.batch)
        series.received.inc(features)
        series.sent.inc(sum(tensor.data.nbytes for tensor in computed.outputs))

    def collect(self) -> Iterable[Metric]:
        """What is looked up when somebody asks."""
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

    def _seconds(self, name: str, what: str) -> Histogram:
        return Histogram(
            f"splitfleet_{name}_seconds",
            f"How long requests {what}.",
            _PER_TAIL,
            buckets=_SECONDS,
            registry=self._registry,
        )

    def _bytes(self, name: str, what: str) -> Counter:
        return Counter(f"splitfleet_{name}_bytes", f"{what} that crossed.", _PER_TAIL, registry=self._registry)
