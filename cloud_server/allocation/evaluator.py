"""Evaluate one bundle on one device by real runs: accuracy over all samples, latency one request after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from cloud_server.allocation.fleet import Array, Fleet, RunResult
from cloud_server.allocation.metrics import Metric
from cloud_server.allocation.trial import Evaluation
from edge_sdk.bundle import Bundle
from edge_sdk.manifest import Manifest
from edge_sdk.protocol import InstallReport
from zoo_keras.samples import Samples

ACCURACY_WINDOW = 8
WARMUP_REQUESTS = 10
# A run is cut into pieces whose results stay well within one message; each piece is told as progress.
MAX_RESULT_BYTES = 32 * 1024 * 1024
MAX_SAMPLES_AT_ONCE = 250

Told = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Labelled:
    """A labelled set whose inputs are published: blobs by input name; the labels stay here."""

    inputs: Mapping[str, str]
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)


def publish(fleet: Fleet, samples: Samples) -> Labelled:
    """Put the inputs of ``samples`` into the model repository."""
    return Labelled(inputs=fleet.publish_inputs(samples.inputs), labels=samples.labels)


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The mean score over ``samples``."""

    accuracy: float
    samples: int


def measure_accuracy(
    fleet: Fleet, device_id: str, bundle: Bundle, data: Labelled, metric: Metric, told: Told
) -> Accuracy:
    """The accuracy of an installed bundle over all of ``data``; ``told(done, all)`` hears of the progress."""
    total = len(data)
    step = max(1, min(MAX_SAMPLES_AT_ONCE, MAX_RESULT_BYTES // _output_bytes(bundle.manifest)))
    score = 0.0
    for first in range(0, total, step):
        count = min(step, total - first)
        told(first, total)
        result = fleet.run(
            device_id, bundle.digest, data.inputs, first=first, count=count, window=ACCURACY_WINDOW, warmup=0
        )
        score += float(metric(result.outputs, data.labels[first : first + count]).sum())
    told(total, total)
    return Accuracy(accuracy=score / total, samples=total)


def measure_latency(fleet: Fleet, device_id: str, bundle: Bundle, data: Labelled, samples: int) -> RunResult:
    """``samples`` requests one after another, after some that do not count. Few samples of data are used repeatedly."""
    results: list[RunResult] = []
    left, warmup = samples, WARMUP_REQUESTS
    while left:
        count = min(left, len(data), max(1, MAX_RESULT_BYTES // _output_bytes(bundle.manifest)))
        results.append(fleet.run(device_id, bundle.digest, data.inputs, first=0, count=count, window=1, warmup=warmup))
        left, warmup = left - count, 0
    edge_s, transfer_s, cloud_s = (
        np.concatenate([getattr(result, name) for result in results]) for name in ("edge_s", "transfer_s", "cloud_s")
    )
    return RunResult(
        outputs=(), edge_s=edge_s, transfer_s=transfer_s, cloud_s=cloud_s, sent_bytes=results[0].sent_bytes
    )


def evaluation(install: InstallReport, accuracy: Accuracy, latency: RunResult) -> Evaluation:
    """All that was measured of one bundle on one device."""
    total_ms = 1000.0 * (latency.edge_s + latency.transfer_s + latency.cloud_s)
    p50_ms, p95_ms = np.percentile(total_ms, (50, 95))
    return Evaluation(
        samples=accuracy.samples,
        accuracy=accuracy.accuracy,
        latency_samples=len(total_ms),
        latency_mean_ms=float(total_ms.mean()),
        latency_p50_ms=float(p50_ms),
        latency_p95_ms=float(p95_ms),
        edge_ms=1000.0 * float(latency.edge_s.mean()),
        transfer_ms=1000.0 * float(latency.transfer_s.mean()),
        cloud_ms=1000.0 * float(latency.cloud_s.mean()),
        sent_bytes=latency.sent_bytes,
        head_bytes=install.head_bytes,
        measured_peak_bytes=install.peak_bytes,
    )


def _output_bytes(manifest: Manifest) -> int:
    # On the wire they are float32, whatever the model makes.
    return max(1, sum(4 * int(np.prod(spec.shape, dtype=np.int64)) for spec in manifest.outputs))
