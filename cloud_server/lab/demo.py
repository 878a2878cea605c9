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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud_server.home import Home
from cloud_server.lab.limits import LabError
from cloud_server.lab.process import Child, stop_all

TASK = "fashion-mnist"
FLEET_FILE = Path(__file__).with_name("demo_fleet.yaml")
SPLITFLEET = (sys.executable, "-c", "from cloud_server.cli import main; main()")
START_TIMEOUT_S = 90.0
# The lab and the server need some of it to stop their own.
GRACE_S = 20.0
POLL_S = 0.05
INFERENCES = 10
CALL_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Inference:
    """One image of the test set, inferred through a device's allocation; times as in :class:`edge_sdk` replies."""

    label: str
    prediction: str
    edge_ms: float
    transfer_ms: float
    cloud_ms: float


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


def infer(endpoint: str, device_id: str, bundle: str) -> list[Inference]:
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
    return [
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
    ]


@contextlib.contextmanager
def server_and_fleet(home: Home) -> Iterator[tuple[str, list[str]]]:
    """The server and the lab, running; yields the server's endpoint and what the lab says of its devices."""
    serve = ["serve", "--bind", "tcp://127.0.0.1:*", "--home", str(home.path)]
    with running(serve, ready_file=home.path / "server.json", log_path=home.path / "server.log") as server:
        endpoint = str(server["endpoint"])
        lab = ["lab", "run", str(FLEET_FILE), "--server", endpoint, "--home", str(home.path)]
        log_path = home.path / "lab.log"
        with running(lab, ready_file=home.path / "lab.json", log_path=log_path):
            yield endpoint, log_path.read_text().splitlines()
