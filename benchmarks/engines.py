"""The engines of the server beside each other: what a batch of a tail takes, on one core and on two.

    python -m benchmarks.engines [--tails tiny,mobilenet,zoo] [--batches 1,8] [--cores 1,2] [--rounds N]
                                 [--openvino PYTHON] [--json PATH]

Tails: ``tiny`` and ``mobilenet`` (MobileNetV2 at 224 px from its sixth block on) as in ``benchmarks.serving``, and each
model of the zoo cut at a third of its legal cut points, or some of them by name (``zoo:mobile``). Each engine loads the
same bundle in a process of its own that is pinned to so many cores; they take turns, batch by batch, with random
features. ``litert`` runs with one thread and, on more cores, with one for each. With ``--openvino``, a Python that has
``openvino`` and ``numpy``, OpenVINO runs the SavedModel as well: in float32 (``openvino``) and with the precision that
it takes by itself (``openvino, own precision``).

``ms`` is the best of all runs, ``cpu ms`` the least CPU time of one: others may use this machine too. ``×`` is how many
times as fast as ``tensorflow`` an engine is: by ``ms``, on one core by ``cpu ms``, which is the same there but for what
else runs. In the end it is told for each engine over all tails. ``differs`` is how far its outputs are from those of
the SavedModel in proportion to the largest value; ``load s`` is loading and warming for all batches, ``MB`` by how much
the process grew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

CACHE = Path("~/.cache/splitfleet-benchmarks").expanduser()
RUNS_A_TURN = 3
REFERENCE = "tensorflow"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one engine at one batch size on so many cores."""

    tail: str
    cores: int
    batch: int
    engine: str
    ms: float
    cpu_ms: float
    speedup: float
    differs: float
    load_s: float
    grown_mb: float


class Runner:
    """A process with one engine and one tail, pinned to the first ``cores`` cores."""

    def __init__(self, python: str, engine: str, bundle: Path, cores: int, batches: Sequence[int]) -> None:
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < cores:
            raise SystemExit(f"--cores {cores}: this process may use {len(usable)}")
        command = [
            "taskset",
            "-c",
            ",".join(map(str, usable[:cores])),
            python,
            str(Path(__file__).with_name("engine_runner.py")),
        ]
        self._process = subprocess.Popen(
            [*command, engine, str(bundle), json.dumps(list(batches))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        loaded = self._answer()
        self.engine: str = engine
        self.load_s: float = loaded["load_s"]
        self.grown_mb: float = loaded["grown_mb"]

    def run(self, batch: int, runs: int) -> tuple[float, float]:
        """The least seconds and the least CPU seconds of some runs."""
        found = self._ask(["run", batch, runs])
        return found["took_s"], found["cpu_s"]

    def outputs(self, batch: int, file: Path) -> list[Any]:
        """All outputs of a batch, in the order of their keys."""
        self._ask(["outputs", batch, str(file)])
        with np.load(file) as arrays:
            return [arrays[name] for name in sorted(arrays)]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, command: list[Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended:\n{self._process.stderr.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(
    name: str, bundle: Path, cores: int, batches: Sequence[int], openvino: str | None, rounds: int
) -> Iterator[Figures]:
    """The figures of all engines for one tail on so many cores."""
    engines = {REFERENCE: sys.executable, "litert:1": sys.executable}
    if cores > 1:
        engines[f"litert:{cores}"] = sys.executable
    if openvino:
        engines |= {"openvino": openvino, "openvino, own precision": openvino}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as work:
        runners = []
        for engine, python in engines.items():
            runners.append(Runner(python, engine, bundle, cores, batches))
            stack.callback(runners[-1].close)
        for batch in batches:
            expected = runners[0].outputs(batch, Path(work) / "expected.npz")
            best = {runner.engine: (float("inf"), float("inf")) for runner in runners}
            for _ in range(rounds):
                for runner in runners:
                    took_s, cpu_s = runner.run(batch, RUNS_A_TURN)
                    best[runner.engine] = min(best[runner.engine][0], took_s), min(best[runner.engine][1], cpu_s)
            for runner in runners:
                took_s, cpu_s = best[runner.engine]
                yield Figures(
                    tail=name,
                    cores=cores,
                    batch=batch,
                    engine=runner.engine,
                    ms=1000 * took_s,
                    cpu_ms=1000 * cpu_s,
                    speedup=best[REFERENCE][1] / cpu_s if cores == 1 else best[REFERENCE][0] / took_s,
                    differs=_difference(expected, runner.outputs(batch, Path(work) / "made.npz")),
                    load_s=runner.load_s,
                    grown_mb=runner.grown_mb,
                )


def _difference(expected: list[Any], made: list[Any]) -> float:
    return max(
        float(np.abs(one - other).max()) / (float(np.abs(one).max()) or 1.0)
        for one, other in zip(expected, made, strict=True)
    )


def bundles(wanted: Sequence[str]) -> dict[str, Path]:
    """The folder of a bundle for each tail; they are kept in a cache."""
    from benchmarks.serving import tails
    from zoo_keras.builders import ARCHITECTURES

    found = {}
    for name in wanted:
        if name in tails.TAILS:
            found[name] = tails.make(name, CACHE).bundle.path
            continue
        kind, _, one = name.partition(":")
        if kind != "zoo" or (one and one not in ARCHITECTURES):
            raise SystemExit(f"--tails {name}: expected {', '.join(tails.TAILS)}, zoo or zoo:NAME")
        for each in [one] if one else ARCHITECTURES:
            found[f"zoo:{each}"] = _zoo_bundle(each)
    return found


def _zoo_bundle(name: str) -> Path:
    from cloud_server.models import zoo_source
    from converters import Workshop

    source = zoo_source(name)
    recipe = source.recipe(source.calibration)
    with Workshop(CACHE / "conversions", workers=1) as workshop:
        legal = [cut.k for cut in workshop.outline(recipe).result().cuts if cut.legal]
        return workshop.build(recipe, legal[len(legal) // 3]).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tails", default="tiny,mobilenet,zoo")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--cores", default="1,2")
    parser.add_argument("--rounds", type=int, default=20, help=f"of {RUNS_A_TURN} runs each")
    parser.add_argument("--openvino", metavar="PYTHON", help="an interpreter that has openvino and numpy")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    batches = [int(each) for each in arguments.batches.split(",")]
    figures = []
    print(f"{'tail':24}{'cores':>6}{'batch':>6}  {'engine':26}{'ms':>9}{'cpu ms':>9}{'×':>7}", end="")
    print(f"{'differs':>9}{'load s':>8}{'MB':>6}")
    for name, bundle in bundles(arguments.tails.split(",")).items():
        for cores in map(int, arguments.cores.split(",")):
            for it in measure(name, bundle, cores, batches, arguments.openvino, arguments.rounds):
                figures.append(it)
                print(
                    f"{it.tail:24}{it.cores:6}{it.batch:6}  {it.engine:26}{it.ms:9.3f}{it.cpu_ms:9.3f}"
                    f"{it.speedup:7.2f}{it.differs:9.0e}{it.load_s:8.2f}{it.grown_mb:6.0f}",
                    flush=True,
                )
    print(f"\n{'cores':>5}{'batch':>6}  {'engine':26}{'× median':>9}{'least':>7}{'most':>7}{'differs':>9}")
    for cores, batch, engine in dict.fromkeys((it.cores, it.batch, it.engine) for it in figures):
        alike = [it for it in figures if (it.cores, it.batch, it.engine) == (cores, batch, engine)]
        speedups = [it.speedup for it in alike]
        print(
            f"{cores:5}{batch:6}  {engine:26}{statistics.median(speedups):9.2f}{min(speedups):7.2f}{max(speedups):7.2f}"
            f"{max(it.differs for it in alike):9.0e}"
        )
    if arguments.json:
        document = {"rounds": arguments.rounds, "figures": [asdict(each) for each in figures]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
