"""What int8 heads cost in accuracy, made in splitfleet's way and in the usual one (benchmarks/usual_head.py).

    python benchmarks/int8_accuracy.py [--models residual,…] [--cuts 0.1,0.25,0.5,0.75,0.9] [--json PATH]

Each model of the zoo for fashion-mnist, with the weights that ship, cut at parts of its legal cut points: the accuracy
of int8 head and float tail together on the 2000 images for validation and testing, minus that of the whole model in
float, in points; and the head's error against float on images for calibration (see converters/deviation.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from usual_head import error_of, run_head, silence, write_usual_head

TASK = "fashion-mnist"
WAYS = ("usual", "splitfleet")


def measure(name: str, parts: list[float]) -> list[dict[str, Any]]:
    import zoo_keras
    from converters.calibration import Calibration
    from converters.cuts import cut_points
    from converters.flatten import flatten
    from converters.head import write_head
    from converters.split import split

    task = zoo_keras.task(TASK)
    flat = flatten(zoo_keras.load_model(TASK, name))
    calibration = Calibration.of(flat.graph, task.samples("calibration").inputs)
    held_out = [task.samples(part) for part in ("validation", "test")]
    images = np.concatenate([samples.inputs["image"] for samples in held_out]).astype(np.float32)
    labels = np.concatenate([samples.labels for samples in held_out])

    def accuracy(outputs: Any) -> float:
        return float(100 * np.mean(np.asarray(outputs).argmax(axis=1) == labels))

    whole = accuracy(flat.model.predict(images, verbose=0))
    legal = [cut.k for cut in cut_points(flat.graph) if cut.legal]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.tflite"
        for k in sorted({legal[int(len(legal) * part)] for part in parts}):
            halves = split(flat, k)
            assert halves.head is not None
            assert halves.tail is not None
            keys = [f"feature_{number}" for number in range(len(halves.crossing))]
            row: dict[str, Any] = {"model": name, "k": k, "n": flat.graph.n, "float_accuracy": whole}
            for way in WAYS:
                if way == "usual":
                    write_usual_head(halves.head, keys, calibration.inputs, path)
                else:
                    write_head(halves.head, keys, calibration, path)
                made = run_head(path, [images])
                outputs = halves.tail([made[key] for key in keys])[0]
                row[way] = {
                    "points": round(accuracy(outputs) - whole, 3),
                    "error": error_of(path, halves.head, keys, calibration.inputs),
                }
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'':24}{'points of accuracy':>24}{'error':>24}")
    print(f"{'model':16}{'k of n':>8}" + f"{'usual':>12}{'splitfleet':>12}" * 2)
    for row in rows:
        points = "".join(f"{row[way]['points']:+12.2f}" for way in WAYS)
        errors = "".join(f"{row[way]['error']:12.4f}" for way in WAYS)
        print(f"{row['model']:16}{row['k']:>3} of {row['n']:<3}{points}{errors}")
    for what, of in (("mean", statistics.mean), ("worst", min)):
        points = "".join(f"{of([row[way]['points'] for row in rows]):+12.3f}" for way in WAYS)
        errors = "".join(f"{(max if of is min else of)([row[way]['error'] for row in rows]):12.4f}" for way in WAYS)
        print(f"{what:24}{points}{errors}")


def main() -> None:
    import zoo_keras

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(zoo_keras.task(TASK).models))
    parser.add_argument("--cuts", default="0.1,0.25,0.5,0.75,0.9")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with silence():
        parts = [float(part) for part in options.cuts.split(",")]
        rows = [row for name in options.models.split(",") for row in measure(name, parts)]
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
