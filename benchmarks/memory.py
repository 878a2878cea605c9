"""How well the memory of a head is predicted: prediction against measurement, for heads of many models.

    python benchmarks/memory.py [MODEL ...] [--precision P ...] [--cache DIR] [--json PATH] [--plot PATH]

Each model of the zoo and of 16 kinds of ``keras.applications`` (random weights, small inputs) is cut at 25, 50 and 75 %
of its legal cut points, in int8; those named in ``FLOAT_MODELS`` in the other precisions, too. The heads are converted
once and kept in the cache; tails are not made, since nothing of them is measured. A head is measured as a device does
it, in a fresh process, with both runtimes; tflite-runtime in a venv of its own. The coefficients of
:mod:`converters.peak` were fitted to the models that are not marked with ``*``.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/edge/library")]

from tflite_runtime_venv import environment_of_the_venv, python_of_the_venv  # noqa: E402

from converters.cache import BUILD_FORMAT  # noqa: E402
from converters.versions import versions  # noqa: E402
from converters.worker import Worker  # noqa: E402
from edge_sdk.errors import SplitfleetError  # noqa: E402
from edge_sdk.memory import ONE_BLAS_THREAD  # noqa: E402
from edge_sdk.sizes import format_size  # noqa: E402

RUNTIMES = ("litert", "tflite-runtime")
SHARES = (25, 50, 75)
SEED = 3
TICKS_MB = (2.5, 4, 6, 10, 20, 40, 80, 150)
SAMPLES = 2
APPLICATIONS = {
    "MobileNet": 96,
    "MobileNetV2": 96,
    "MobileNetV3Small": 96,
    "MobileNetV3Large": 96,
    "EfficientNetB0": 96,
    "EfficientNetV2B0": 96,
    "NASNetMobile": 96,
    "DenseNet121": 96,
    "DenseNet169": 96,
    "InceptionV3": 96,
    "InceptionResNetV2": 96,
    "Xception": 96,
    "ResNet50": 96,
    "ResNet50V2": 96,
    "VGG16": 96,
    "ConvNeXtTiny": 96,
}
"""Name -> width and height of the input in pixels."""

HELD_OUT = {
    "MobileNetV3Large",
    "EfficientNetB0",
    "EfficientNetV2B0",
    "DenseNet169",
    "InceptionResNetV2",
    "Xception",
    "VGG16",
    "zoo:inception",
    "zoo:mobile",
    "zoo:mlp-mixer",
    "zoo:squeeze-excite",
}

PRECISIONS = ("int8", "int8-weights", "float16", "float32")
FLOAT_MODELS = {
    "MobileNetV2",
    "EfficientNetB0",
    "NASNetMobile",
    "DenseNet121",
    "InceptionV3",
    "Xception",
    "ResNet50",
    "ResNet50V2",
    "VGG16",
    "ConvNeXtTiny",
    "zoo:residual",
    "zoo:squeeze-excite",
    "zoo:mlp-mixer",
    "zoo:vision-transformer",
}


@dataclass(frozen=True, kw_only=True)
class PredictedHead:
    """The head of ``model`` at ``share`` % of its legal cuts, in the file ``path``; ``predicted`` by runtime."""

    model: str
    precision: str
    share: int
    k: int
    n: int
    path: str
    file_bytes: int
    predicted: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One head, measured: bytes by runtime."""

    head: PredictedHead
    measured: dict[str, int]

    @property
    def held_out(self) -> bool:
        return self.head.model in HELD_OUT

    def ratio(self, runtime: str) -> float:
        return self.head.predicted[runtime] / self.measured[runtime]


def zoo_names() -> list[str]:
    from zoo_keras.builders import ARCHITECTURES

    return [f"zoo:{name}" for name in ARCHITECTURES]


def load(name: str) -> Any:
    """A model with random weights and, so that nothing is folded away that real weights keep, random statistics."""
    import numpy as np

    from converters.keras_backend import load_keras
    from zoo_keras.builders import architecture

    keras = load_keras()
    keras.utils.set_random_seed(SEED)
    if name.startswith("zoo:"):
        model = architecture(name.removeprefix("zoo:")).build(10)
    else:
        size = APPLICATIONS[name]
        model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3))
    rng = np.random.default_rng(SEED)
    for variable in model.weights:
        if "moving_" in variable.path:
            low, high = (0.2, 1.5) if variable.path.endswith("variance") else (-0.2, 0.2)
            variable.assign(rng.uniform(low, high, variable.shape))
        elif variable.path.endswith(("beta", "gamma", "bias")):
            variable.assign_add(rng.uniform(0.05, 0.1, variable.shape))
    return model


def prepare(name: str, precisions: Sequence[str], cache: Path) -> list[PredictedHead]:
    """Convert the heads of a model that are not in the cache, and predict all. Runs in a worker process."""
    import numpy as np

    from converters.calibration import Calibration
    from converters.cuts import cut_points
    from converters.flatten import flatten
    from converters.head import write_head
    from converters.keras_backend import load_keras
    from converters.peak import predicted_peaks
    from converters.split import split

    load_keras().backend.clear_session()
    flat = flatten(load(name))
    legal = [cut.k for cut in cut_points(flat.graph) if cut.legal]
    image = flat.graph.tensors[flat.graph.inputs[0]]
    pixels = np.random.default_rng(SEED).uniform(0, 255, (SAMPLES, *image.shape)).astype(np.float32)
    heads = []
    for share in SHARES:
        k = legal[min(len(legal) * share // 100, len(legal) - 1)]
        for precision in precisions:
            path = cache / f"{name.replace(':', '-')}-{k}-{precision}.tflite"
            if not path.exists():
                halves = split(flat, k)
                keys = [f"feature_{number}" for number in range(len(halves.crossing))]
                keys += [f"output_{place}" for place in halves.head_outputs]
                unfinished = path.with_suffix(".part")
                write_head(halves.head, keys, Calibration.of(flat.graph, {image.name: pixels}), unfinished, precision)
                unfinished.rename(path)
            heads.append(
                PredictedHead(
                    model=name,
                    precision=precision,
                    share=share,
                    k=k,
                    n=flat.graph.n,
                    path=str(path),
                    file_bytes=path.stat().st_size,
                    predicted=predicted_peaks(flat, k, precision),
                )
            )
    return heads


def measure(path: str, runtime: str) -> int:
    """The growth of a fresh process, in bytes."""
    second = runtime == "tflite-runtime"
    python = second_python() if second else sys.executable
    environment = environment_of_the_venv() if second else {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(python), "-m", "edge_sdk.memory", path, runtime]
    done = subprocess.run(command, env=environment | ONE_BLAS_THREAD, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout or "{}")
    if "tenth_invoke_peak_bytes" not in report:
        raise SystemExit(f"{path}: {runtime} cannot measure it: {report or done.stderr[-1000:]}")
    return int(report["tenth_invoke_peak_bytes"])


@functools.cache
def second_python() -> Path:
    return python_of_the_venv()


def summary(rows: Sequence[Row], runtime: str) -> dict[str, float]:
    ratios = sorted(row.ratio(runtime) for row in rows)
    return {"heads": len(ratios), "least": ratios[0], "median": statistics.median(ratios), "most": ratios[-1]}


def summaries(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    groups = {
        "int8, fitted": [row for row in rows if row.head.precision == "int8" and not row.held_out],
        "int8, held out": [row for row in rows if row.head.precision == "int8" and row.held_out],
        **{precision: [row for row in rows if row.head.precision == precision] for precision in PRECISIONS},
        "all": rows,
    }
    return {name: {runtime: summary(group, runtime) for runtime in RUNTIMES} for name, group in groups.items() if group}


def print_table(rows: Sequence[Row]) -> None:
    columns = "".join(f"{'predicted':>13}{'measured':>10}{'ratio':>7}" for _ in RUNTIMES)
    print(f"{'':58}" + "".join(f"{runtime:>30}" for runtime in RUNTIMES))
    print(f"{'model, cut of operations':32}{'precision':14}{'file':>12}{columns}")
    for row in sorted(rows, key=lambda row: PRECISIONS.index(row.head.precision)):
        head = row.head
        name = f"{head.model}{'*' if row.held_out else ''}, {head.k} of {head.n}"
        print(f"{name:32}{head.precision:14}{format_size(head.file_bytes):>12}", end="")
        for runtime in RUNTIMES:
            predicted, measured = head.predicted[runtime], row.measured[runtime]
            print(f"{predicted / 1e6:10.2f} MB{measured / 1e6:7.2f} MB{row.ratio(runtime):7.3f}", end="")
        print()
    print()
    for name, by_runtime in summaries(rows).items():
        for runtime, figures in by_runtime.items():
            print(
                f"{name:16}{runtime:16}{figures['heads']:4.0f} heads: predicted / measured"
                f"  least {figures['least']:.3f}  median {figures['median']:.3f}  most {figures['most']:.3f}"
            )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Predicted over measured, both logarithmic, with the target band."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    colours = dict(zip(PRECISIONS, ("tab:blue", "tab:orange", "tab:green", "tab:red"), strict=True))
    for axes, runtime in zip(figure.subplots(1, 2), RUNTIMES, strict=True):
        for precision, colour in colours.items():
            points = [
                (row.measured[runtime] / 1e6, row.head.predicted[runtime] / 1e6)
                for row in rows
                if row.head.precision == precision
            ]
            if points:
                axes.scatter(*zip(*points, strict=True), s=14, c=colour, label=precision)
        ends = [min(row.measured[runtime] for row in rows) / 1e6, max(row.measured[runtime] for row in rows) / 1e6]
        axes.plot(ends, ends, "k-", linewidth=0.8, label="as measured")
        axes.fill_between(ends, [0.95 * x for x in ends], [1.15 * x for x in ends], alpha=0.15, label="-5 % to +15 %")
        axes.set(xscale="log", yscale="log", xlabel="measured growth, MB", ylabel="predicted, MB", title=runtime)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(TICKS_MB, labels=map(str, TICKS_MB))
            axis.set_ticks([], minor=True)
        axes.set(xlim=(TICKS_MB[0], TICKS_MB[-1]), ylim=(TICKS_MB[0], TICKS_MB[-1]))
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    known = [*zoo_names(), *APPLICATIONS]
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(known)}; all without")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="all of them without; repeatable")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "splitfleet-memory-heads")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them into this PNG file")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(known):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    made_by = hashlib.sha256(json.dumps([BUILD_FORMAT, versions(), SEED], sort_keys=True).encode()).hexdigest()[:16]
    cache = arguments.cache / made_by
    cache.mkdir(parents=True, exist_ok=True)
    worker = Worker(threads=len(os.sched_getaffinity(0)))
    rows: list[Row] = []
    try:
        for name in arguments.models or known:
            print(f"{name} …", file=sys.stderr)
            wanted = [
                precision
                for precision in arguments.precision or PRECISIONS
                if precision == "int8" or name in FLOAT_MODELS
            ]
            try:
                heads = worker.run(prepare, name, wanted, cache)
            except SplitfleetError as error:
                print(f"{name} is left out: {error.message}", file=sys.stderr)
                continue
            rows += [
                Row(head=head, measured={runtime: measure(head.path, runtime) for runtime in RUNTIMES})
                for head in heads
            ]
    finally:
        worker.stop()
    if not rows:
        raise SystemExit("no head was measured")
    print_table(rows)
    if arguments.json:
        document = {"rows": [asdict(row) for row in rows], "summary": summaries(rows), "versions": versions()}
        for row in document["rows"]:
            row["head"]["path"] = Path(row["head"]["path"]).name
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    if arguments.plot:
        draw(rows, arguments.plot)


if __name__ == "__main__":
    main()
