"""How long a bundle takes, step by step, and how much sooner than in the usual way its int8 head is made.

    python benchmarks/converting.py [--models MobileNetV2,ResNet50V2,…] [--size PX] [--rounds N] [--json PATH]

For each model of ``keras.applications`` (random weights), cut in the middle: building it, flattening it, its hash,
listing all its cuts, its int8 head step by step, the whole bundle with its tail, and finding that in the cache. In
each round the head is made in both ways, in turns: splitfleet's, and the usual one (benchmarks/usual_head.py). Both
heads' errors against float are shown (see converters/deviation.py).

Seconds of CPU time next to those of the clock, as others may use this machine too; both are medians of rounds, after
one that does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from usual_head import error_of, silence, write_usual_head

CALIBRATION_SAMPLES = 100
LISTED_MODEL = "DenseNet121"


class Clock:
    """Collects the seconds of named steps: (wall, CPU)."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[float, float]]] = {}

    def time(self, step: str, work: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        self.seen.setdefault(step, []).append((time.perf_counter() - wall, time.process_time() - cpu))
        return result

    def medians(self) -> dict[str, dict[str, float]]:
        return {
            step: {
                "wall_s": round(statistics.median(wall for wall, _ in times), 4),
                "cpu_s": round(statistics.median(cpu for _, cpu in times), 4),
            }
            for step, times in self.seen.items()
        }


def measure(name: str, size: int, rounds: int) -> dict[str, Any]:
    import keras

    from converters import cuts, split
    from converters.bundles import build_bundle
    from converters.cache import Cache, Known, bundle_key
    from converters.calibration import Calibration
    from converters.flatten import flatten
    from converters.head import input_keys, traced, write_head
    from converters.int8 import quantized, ranges
    from converters.lite_model import converted
    from converters.model_hash import model_sha256
    from converters.outline import Outline
    from converters.precision import Attempt
    from converters.recipe import Recipe
    from edge_sdk.manifest import ModelRef

    keras.utils.set_random_seed(0)
    clock = Clock()
    build = getattr(keras.applications, name)
    model = clock.time("build the Keras model", lambda: build(weights=None, input_shape=(size, size, 3)))
    flat = clock.time("flatten", lambda: flatten(model))
    sha256 = clock.time("hash", lambda: model_sha256(flat))
    legal = [cut.k for cut in clock.time("list all cuts", lambda: cuts.cut_points(flat.graph)) if cut.legal]
    images = np.random.default_rng(0).uniform(0, 255, (CALIBRATION_SAMPLES, size, size, 3)).astype(np.float32)
    calibration = Calibration.of(flat.graph, {flat.graph.tensors[flat.graph.inputs[0]].name: images})
    k = legal[len(legal) // 2]
    half = split.split(flat, k).head
    assert half is not None
    keys = [f"feature_{number}" for number in range(len(half.outputs))]
    names = input_keys(len(half.inputs))
    made: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.tflite"

        def one_round(clock: Clock) -> None:
            for way, write in (
                ("usual", lambda: write_usual_head(half, keys, calibration.inputs, path)),
                ("splitfleet", lambda: write_head(half, keys, calibration, path)),
            ):
                clock.time(f"head, {way}", write)
                made[way] = {"error": error_of(path, half, keys, calibration.inputs), "bytes": path.stat().st_size}
            function = clock.time("  trace", lambda: traced(half, names))
            whole = clock.time("  freeze and convert", lambda: converted(function, names, keys))
            clock.time("  find the ranges", lambda: ranges(whole, calibration.inputs))
            # Of one sample the ranges are found at once: what remains is the quantizer.
            clock.time("  quantize", lambda: quantized(whole, [array[:1] for array in calibration.inputs]))

        one_round(Clock())
        for _ in range(rounds):
            one_round(clock)
        cache = Cache(folder=Path(folder) / "cache")
        recipe = Recipe(task="t", model_name=name, load=dict, calibration=None, fingerprint="one")
        known = Known(outline=Outline.of(flat.graph, sha256), calibration_sha256=calibration.sha256)
        key = bundle_key(recipe, known, Attempt(k=k, precision="int8"))
        reference_to = ModelRef(name=name, sha256=sha256)
        clock.time(
            "bundle: head, tail, manifest",
            lambda: cache.make_bundle(
                key,
                lambda into: build_bundle(flat, k, calibration, task="t", model=reference_to, folder=into),
            ),
        )
        clock.time("the same from the cache", lambda: cache.bundle(key))
    steps = clock.medians()
    return {
        "model": name,
        "operations": flat.graph.n,
        "k": k,
        "steps": steps,
        "heads": made,
        "ratio_wall": round(steps["head, usual"]["wall_s"] / steps["head, splitfleet"]["wall_s"], 2),
        "ratio_cpu": round(steps["head, usual"]["cpu_s"] / steps["head, splitfleet"]["cpu_s"], 2),
    }


def list_cuts(name: str) -> dict[str, Any]:
    """From a loaded Keras model to all its cuts and their sizes."""
    import keras

    from converters.flatten import flatten
    from converters.outline import Outline

    model = getattr(keras.applications, name)(weights=None, input_shape=(96, 96, 3))
    clock = Clock()
    outline = clock.time("all", lambda: Outline.of(flatten(model).graph, "0" * 64))
    return {"model": name, "operations": outline.n, **clock.medians()["all"]}


def show(results: list[dict[str, Any]], listing: dict[str, Any]) -> None:
    print(
        f"{listing['model']}, {listing['operations']} operations: all cuts listed {listing['wall_s']:.2f} s after it "
        f"was loaded ({listing['cpu_s']:.2f} s of CPU time)"
    )
    for result in results:
        print(f"\n{result['model']}, {result['operations']} operations, cut after {result['k']}")
        for step, seconds in result["steps"].items():
            print(f"  {step:32} {seconds['wall_s']:8.2f} s  {seconds['cpu_s']:8.2f} s CPU")
        usual, ours = result["heads"]["usual"], result["heads"]["splitfleet"]
        print(
            f"  the head {result['ratio_wall']:.2f} times as fast as the usual one ({result['ratio_cpu']:.2f} in CPU "
            f"time); error {ours['error']:.5f} against {usual['error']:.5f}, {ours['bytes']} against "
            f"{usual['bytes']} bytes"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="MobileNetV2,ResNet50V2,ConvNeXtTiny")
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with silence():
        results = [measure(name, options.size, options.rounds) for name in options.models.split(",")]
        listing = list_cuts(LISTED_MODEL)
    show(results, listing)
    if options.json:
        options.json.write_text(json.dumps({"cuts": listing, "models": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
