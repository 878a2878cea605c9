"""How long a bundle takes, step by step, and what making constants of the weights before converting is worth.

    python benchmarks/converting.py [--models MobileNetV2,ResNet50V2,…] [--size PX] [--rounds N] [--json PATH]

For each model of ``keras.applications`` (random weights), cut in the middle: building it, flattening it, its hash,
listing all its cuts, tracing the head and freezing its weights, converting it to int8, the whole bundle with its tail,
and finding it in the cache. The head is converted twice a round, in turns: ``frozen`` as splitfleet does it,
``variables`` with the weights as variables, which is what ``TFLiteConverter.from_keras_model`` does. Both heads' errors
against float are shown (see converters/deviation.py): they must be equal.

Seconds of CPU time next to those of the clock, as others may use this machine too; both are medians of rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

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


def with_variables(half: Any, takes: Any, names: Any, keys: Any) -> Any:
    """The head as a module that owns its weights as variables, in place of converters.head's frozen one."""
    import tensorflow

    from converters.substitutes import call_on_device

    signature = [
        tensorflow.TensorSpec((1, *tensor.shape), tensor.dtype, name=name)
        for tensor, name in zip(takes, names, strict=True)
    ]
    module = tensorflow.Module()
    module.weights = [variable.value for step in half.steps for variable in getattr(step.layer, "variables", ())]
    module.run = tensorflow.function(
        lambda *values: dict(zip(keys, half(values, call_on_device), strict=True)), signature, autograph=False
    )
    return module


def measure(name: str, size: int, rounds: int) -> dict[str, Any]:
    import keras

    from converters import cuts, head, split
    from converters.bundles import build_bundle
    from converters.cache import Cache, Known, bundle_key
    from converters.calibration import Calibration
    from converters.deviation import Reference
    from converters.flatten import flatten
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
    halves = split.split(flat, k)
    half = halves.head
    assert half is not None
    keys = tuple(f"feature_{number}" for number in range(len(half.outputs)))
    reference = Reference(halves=halves, features=keys, returned=(), calibration=calibration)
    takes = half.tensors(half.inputs)
    frozen = head._signature_module
    errors: dict[str, float] = {}
    bytes_of: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.tflite"
        for _ in range(rounds):
            clock.time("trace and freeze the head", lambda: frozen(half, takes, head.input_keys(len(takes)), keys))
            for way, module in (("frozen", frozen), ("variables", with_variables)):
                head._signature_module = module
                made = clock.time(f"head, {way}", lambda: head.write_head(half, keys, calibration, path))
                errors[way] = reference.deviation(reference.run(path, made), made.outputs).error
                bytes_of[way] = path.stat().st_size
            head._signature_module = frozen
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
        "error": errors,
        "head_bytes": bytes_of,
        "ratio_wall": round(steps["head, variables"]["wall_s"] / steps["head, frozen"]["wall_s"], 2),
        "ratio_cpu": round(steps["head, variables"]["cpu_s"] / steps["head, frozen"]["cpu_s"], 2),
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
        print(
            f"  frozen weights: {result['ratio_wall']:.2f} times as fast ({result['ratio_cpu']:.2f} in CPU time); "
            f"error {result['error']['frozen']:.5f} against {result['error']['variables']:.5f}, "
            f"{result['head_bytes']['frozen']} against {result['head_bytes']['variables']} bytes"
        )


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """The converter prints pages, past Python."""
    sys.stdout.flush()
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)


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
