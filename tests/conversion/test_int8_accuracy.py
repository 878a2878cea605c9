"""What int8 costs: trained models of the zoo, cut, against themselves in float, on validation and on test data."""

from __future__ import annotations

import numpy as np
import pytest

import zoo_keras
from edge_sdk.quantization import dequantize, quantize
from edge_sdk.runtime import Interpreter

TASK = "fashion-mnist"
POINTS = 1.5


def accuracies(flat, k, samples, path):
    """Accuracy in percent of int8 head and float tail together, and of the whole in float."""
    from converters.calibration import Calibration
    from converters.head import write_head
    from converters.split import split

    halves = split(flat, k)
    keys = [f"feature_{number}" for number in range(len(halves.crossing))]
    keys += [f"output_{place}" for place in halves.head_outputs]
    calibration = Calibration.of(flat.graph, zoo_keras.task(TASK).samples("calibration").inputs)
    head = write_head(halves.head, keys, calibration, path)
    images = samples.inputs["image"].astype(np.float32)
    taken = head.inputs["input_0"]
    raw = quantize(images, taken.scale, taken.zero_point, "int8")
    interpreter = Interpreter(path)
    rows = [interpreter.run({"input_0": raw[number : number + 1]}) for number in range(len(raw))]
    made = [
        dequantize(np.concatenate([row[key] for row in rows]), head.outputs[key].scale, head.outputs[key].zero_point)
        for key in keys
    ]
    split_outputs = np.asarray(halves.tail(made)[0]) if halves.tail is not None else made[0]
    whole_outputs = np.asarray(flat.model(images, training=False))
    return tuple(100 * np.mean(outputs.argmax(axis=1) == samples.labels) for outputs in (split_outputs, whole_outputs))


def assert_accurate(name, fractions, path):
    from converters.cuts import cut_points
    from converters.flatten import flatten

    flat = flatten(zoo_keras.load_model(TASK, name))
    legal = [cut.k for cut in cut_points(flat.graph) if cut.legal]
    for k in [*(legal[int(len(legal) * fraction)] for fraction in fractions), flat.graph.n]:
        for part in ("validation", "test"):
            divided, whole = accuracies(flat, k, zoo_keras.task(TASK).samples(part), path)
            assert whole > 75
            assert divided >= whole - POINTS, (name, k, part)


def test_int8_costs_little_accuracy(tmp_path):
    assert_accurate("residual", (0.5,), tmp_path / "head.tflite")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", zoo_keras.task(TASK).models)
def test_int8_costs_little_accuracy_anywhere(tmp_path, name):
    assert_accurate(name, (0.0, 0.1, 0.25, 0.5, 0.75, 0.9), tmp_path / "head.tflite")
