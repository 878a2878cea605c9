"""The demo: a server, an emulated fleet, an allocation and ten inferences, on this machine and with real processes.

Server and lab run as the commands that a user would type; the allocation runs here. What it prints is the command's
business (:mod:`cloud_server.cli.demo`).
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloud_server.allocation import AllocationSettings, Thresholds, run_allocation
from cloud_server.home import Home
from cloud_server.lab.process import Child, stop_all
from edge_sdk.errors import LabError

if TYPE_CHECKING:
    from cloud_server.allocation.observer import Observer
    from cloud_server.allocation.result import AllocationResult

TASK = "fashion-mnist"
FLEET_FILE = Path(__file__).with_name("demo_fleet.yaml")
SPLITFLEET = (sys.executable, "-c", "from cloud_server.cli import main; main()")
START_TIMEOUT_S = 90.0
# The lab and the server need some of it to stop their own.
GRACE_S = 20.0
POLL_S = 0.05
INFERENCES = 10
LATENCY_SAMPLES = 50
# The weakest model of the zoo misses the accuracy by more than a point. The latency is missed where a wide feature
# goes over the thin uplink of one device: its 10,192 bytes alone take 41 ms there, however fast the machine is.
THRESHOLDS = Thresholds(min_accuracy=0.89, max_latency_ms=40.0)
# With this seed a device is redrawn for accuracy and another for latency.
DEFAULT_SEED = 601
WHY_SO_LITTLE = (
    "With all of its RAM free any of these boards would hold these small models whole, so the fleet file gives each "
    "the memory that its other work leaves for a model."
)
CALL_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Inference:
    """One image of the test set, inferred through a device's allocation; times as in :class:`edge_sdk` replies."""

    label: str
    prediction: str
    edge_ms: float
    transfer_ms: float
    cloud_ms: float

    @property
    def total_ms(self) -> float:
        return self.edge_ms + self.transfer_ms + self.cloud_ms


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """``device_id`` is the device that inferred, ``None`` when the allocation did not succeed."""

    allocation: AllocationResult
    device_id: str | None
    inferences: tuple[Inference, ...]
    duration_s: float

    def to_document(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {
            "allocation": self.allocation.to_document(),
            "inferred_on": self.device_id,
            "inferences": [asdict(inference) | {"total_ms": inference.total_ms} for inference in self.inferences],
            "duration_s": self.duration_s,
        }


@contextlib.contextmanager
def running(arguments: list[str], *, ready_file: Path, log_path: Path) -> Iterator[dict[str, Any]]:
    """A ``splitfleet`` command that runs until the block ends; yields what its ready file says.

    Raises :class:`LabError` with the end of its log when it ends before it is ready, or is not ready in time.
    """
    ready_file.unlink(missing_ok=True)
    child = Child(
        [*SPLITFLEET, *arguments, "--ready-file", str(ready_file)],
        log_path=log_path,
        parent_death_signal=signal.SIGTERM,
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready_file.exists():
            status = child.exit_status()
            if status is not None or time.monotonic() > deadline:
                what = status or f"was not ready within {START_TIMEOUT_S:g} s"
                raise LabError(f"splitfleet {arguments[0]} {what}; the end of {log_path}:\n{child.last_lines()}")
            time.sleep(POLL_S)
        yield json.loads(ready_file.read_text())
    finally:
        if stop_all([child], grace_s=GRACE_S):
            raise LabError(
                f"splitfleet {arguments[0]} did not stop within {GRACE_S:g} s and was killed; see {log_path}"
            )


def infer(endpoint: str, device_id: str, bundle: str) -> tuple[Inference, ...]:
    """Let a device infer the first images of the test set, one after another, through an installed bundle."""
    import zoo_keras
    from cloud_server.allocation.remote_fleet import RemoteFleet

    task = zoo_keras.task(TASK)
    samples = task.samples("test")
    inputs = {name: array[:INFERENCES] for name, array in samples.inputs.items()}
    with RemoteFleet(endpoint, stall_timeout_s=CALL_TIMEOUT_S) as fleet:
        blobs = fleet.publish_inputs(inputs)
        # The demo has just measured this bundle, so the device holds it ready; the first requests still warm the link.
        result = fleet.run(device_id, bundle, blobs, first=0, count=INFERENCES, window=1, warmup=2)
    return tuple(
        Inference(
            label=task.labels[int(label)],
            prediction=task.labels[int(scores.argmax())],
            edge_ms=1000.0 * float(edge_s),
            transfer_ms=1000.0 * float(transfer_s),
            cloud_ms=1000.0 * float(cloud_s),
        )
        for label, scores, edge_s, transfer_s, cloud_s in zip(
            samples.labels[:INFERENCES],
            result.outputs[0],
            result.edge_s,
            result.transfer_s,
            result.cloud_s,
            strict=True,
        )
    )


def run_demo(home: Home, *, seed: int, say: Callable[[str], None], observer: Observer) -> DemoResult:
    """The whole demo; ``say`` hears each step in a line. Raises :class:`SplitfleetError` when a part of it fails.

    An allocation that does not succeed is a result without inferences.
    """
    began = time.monotonic()
    say(f"1. Starting the server; its things are in {home.path}")
    serve = ["serve", "--bind", "tcp://127.0.0.1:*", "--home", str(home.path)]
    with running(serve, ready_file=home.path / "server.json", log_path=home.path / "server.log") as server:
        endpoint = str(server["endpoint"])
        say("2. Starting five emulated devices, each a process of its own")
        lab = ["lab", "run", str(FLEET_FILE), "--server", endpoint, "--home", str(home.path)]
        log_path = home.path / "lab.log"
        with running(lab, ready_file=home.path / "lab.json", log_path=log_path):
            for line in log_path.read_text().splitlines():
                say(f"   {line}")
            say(f"   {WHY_SO_LITTLE}")
            say("3. Allocating: each device draws a model until it meets the thresholds")
            settings = AllocationSettings(
                task=TASK,
                thresholds=THRESHOLDS,
                latency_samples=LATENCY_SAMPLES,
                # The zoo's models are so small that any process could take them whole.
                memory_model="cumulative",
                seed=seed,
                baselines=True,
            )
            allocation = run_allocation(
                settings, endpoint=endpoint, registry_url=home.registry_url, home=home, observer=observer
            )
            chosen = None if allocation.error() else _most_interesting(allocation)
            inferences: tuple[Inference, ...] = ()
            if chosen is not None:
                say(f"4. Inferring {INFERENCES} images of the test set on {chosen[0]} through its allocation")
                inferences = infer(endpoint, *chosen)
            say("5. Stopping the devices and the server")
    return DemoResult(
        allocation=allocation,
        device_id=None if chosen is None else chosen[0],
        inferences=inferences,
        duration_s=time.monotonic() - began,
    )


def _most_interesting(allocation: AllocationResult) -> tuple[str, str] | None:
    """Device and bundle: of an accepted split where there is one, with the most trials."""
    accepted = [
        (trial.placement.k < trial.placement.n, len(device.trials), device.device_id, trial.placement.bundle)
        for device in allocation.devices
        if (trial := device.trial) is not None and trial.placement is not None
    ]
    return max(accepted)[2:] if accepted else None
