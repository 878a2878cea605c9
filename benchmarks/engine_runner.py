"""The process of one engine for ``benchmarks.engines``: loads a bundle, then answers a line of JSON with one.

    python benchmarks/engine_runner.py ENGINE BUNDLE BATCHES

``["run", batch, runs]`` gives the least seconds of some runs, ``["outputs", batch, file]`` writes outputs as ``.npz``.
OpenVINO runs in an environment of its own, so nothing of splitfleet is imported for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray[Any, Any]]
Run = Callable[[Arrays], Arrays]


def load_engine(name: str, folder: Path, threads: int, most: int) -> Run:
    """An engine of the server, by name, ``litert`` with its threads: ``litert:2``."""
    from cloud_server.engines.race import Entrant
    from edge_sdk.bundle import Bundle

    kind, _, wanted = name.partition(":")
    engine = Entrant(engine=kind, threads=int(wanted or threads)).load(Bundle.open(folder), most)  # type: ignore[arg-type]
    return engine.run


def load_openvino(own_precision: bool, folder: Path, threads: int) -> Run:
    import openvino

    options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    if not own_precision:
        options["INFERENCE_PRECISION_HINT"] = "f32"
    core = openvino.Core()
    request = core.compile_model(core.read_model(folder / "tail"), "CPU", options).create_infer_request()
    inputs = {port.any_name: port for port in request.model_inputs}

    def run(features: Arrays) -> Arrays:
        # The signature's names stand within names such as "serving_default_feature_0:0".
        request.infer({given: features[next(name for name in features if name in given)] for given in inputs})
        made = zip(request.model_outputs, request.output_tensors, strict=True)
        return {port.any_name: np.array(tensor.data) for port, tensor in made}

    return run


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    name, folder, batches = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    crossing = json.loads((folder / "manifest.json").read_text())["crossing"]
    draw = np.random.default_rng(1)
    features = {
        batch: {
            spec["name"]: draw.integers(-128, 128, (batch, *spec["shape"])).astype(np.int8)
            for spec in crossing
        }
        for batch in batches
    }  # fmt: skip
    threads = len(os.sched_getaffinity(0))
    before_mb, began = resident_mb(), perf_counter()
    if name.startswith("openvino"):
        run = load_openvino("own" in name, folder, threads)
    else:
        run = load_engine(name, folder, threads, max(batches))
    for batch in batches:
        for _ in range(4):
            run(features[batch])
    answer(load_s=perf_counter() - began, grown_mb=resident_mb() - before_mb)
    for line in sys.stdin:
        command, batch, *rest = json.loads(line)
        if command == "outputs":
            outputs = run(features[batch])
            np.savez(rest[0], **{f"{number}": value for number, value in enumerate(_ordered(outputs))})
            answer()
            continue
        took_s = cpu_s = float("inf")
        for _ in range(rest[0]):
            start, cpu = perf_counter(), process_time()
            run(features[batch])
            took_s, cpu_s = min(took_s, perf_counter() - start), min(cpu_s, process_time() - cpu)
        answer(took_s=took_s, cpu_s=cpu_s)


def _ordered(outputs: Arrays) -> list[np.ndarray[Any, Any]]:
    return [outputs[name] for name in sorted(outputs)]


def answer(**values: float) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
