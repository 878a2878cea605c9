"""The program that runs a head over many samples: a runtime that crashes takes its own process with it, and no other.

::

    python -m edge_sdk.head_process FOLDER                    tells which runtimes can run a head here
    python -m edge_sdk.head_process FOLDER BUNDLE RUNTIME     runs the head of a bundle

FOLDER has ``input_0.npy``, …, an array (N, …) for each input of the manifest. The program adds ``feature_0.npy``, …,
and ``output_P.npy`` for each output P that the head returns, in the same way, and ``report.json``, what came of it.
Who starts it, and on which interpreter, is others' matter.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from pathlib import Path
from typing import Any

from edge_sdk.errors import SplitfleetError, StorageError, to_wire

REPORT = "report.json"
NO_RUNTIME = "none"
PR_SET_PDEATHSIG = 1


def _runtimes() -> dict[str, Any]:
    from edge_sdk.runtime import usable_runtimes

    return {"runtimes": usable_runtimes()}


def _run(folder: Path, path: Path, runtime: str) -> dict[str, Any]:
    import numpy as np

    from edge_sdk.bundle import Bundle
    from edge_sdk.head import Head

    bundle = Bundle.open(path)
    manifest = bundle.manifest
    head = Head(bundle, runtime=None if runtime == NO_RUNTIME else runtime)
    samples = {
        spec.name: np.load(folder / f"input_{place}.npy", mmap_mode="r") for place, spec in enumerate(manifest.inputs)
    }
    count = min(map(len, samples.values()))
    results = [head.run({name: array[number] for name, array in samples.items()}) for number in range(count)]
    for place in range(len(manifest.crossing)):
        np.save(folder / f"feature_{place}.npy", np.concatenate([result.features[place].data for result in results]))
    for place, spec in enumerate(manifest.outputs):
        if spec.side == "head":
            np.save(folder / f"output_{place}.npy", np.stack([result.outputs[spec.name] for result in results]))
    return {}


def _main() -> None:
    # Who waits for this process may be killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    folder = Path(sys.argv[1])
    try:
        report = _run(folder, Path(sys.argv[2]), sys.argv[3]) if len(sys.argv) > 2 else _runtimes()
    except SplitfleetError as error:
        report = {"error": to_wire(error)}
    except OSError as error:
        report = {"error": to_wire(StorageError(f"{folder}: {error.strerror or error}"))}
    (folder / REPORT).write_text(json.dumps(report))


if __name__ == "__main__":
    _main()
