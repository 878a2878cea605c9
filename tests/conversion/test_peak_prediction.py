"""Predicted memory against measured, the rule that picks a cut by it, and where the figures go."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_models

from converters import Outline, PeakChoice, choose_peak
from converters.graph import Graph
from converters.precision import PRECISIONS
from edge_sdk.errors import ConfigError, InvalidInputError
from edge_sdk.manifest import Precision
from edge_sdk.memory import measure
from edge_sdk.runtime import RUNTIMES, choose_runtime
from zoo_keras.builders import ARCHITECTURES

# A runtime's code that a head is the first to use counts as growth only where the system has not mapped it together
# with the code around it, which depends on how the library lies in the page cache: measured, 0.9 to 1.7 MB.
CODE_PAGES_BYTES = 2_000_000


def outline_of(flat: Any) -> Outline:
    from converters.peak import all_peaks

    return Outline.of(flat.graph, "0" * 64, all_peaks(flat))


def assert_prediction_holds(
    flat: Any, k: int, samples: dict[str, Any], path: Path, precision: Precision = "int8"
) -> None:
    """Never 5 % too little, and not far too much."""
    from converters.calibration import Calibration
    from converters.head import write_head
    from converters.peak import predicted_peaks
    from converters.split import split

    halves = split(flat, k)
    keys = [f"feature_{number}" for number in range(len(halves.crossing))]
    keys += [f"output_{place}" for place in halves.head_outputs]
    write_head(halves.head, keys, Calibration.of(flat.graph, samples), path, precision)
    runtime = choose_runtime()
    measured = measure(path, runtime=runtime).peak_bytes
    predicted = predicted_peaks(flat, k, precision)[runtime]
    # Never too little. Too much by the code pages of the runtime too, where the system mapped them with the library.
    assert 0.95 * measured <= predicted <= 1.3 * measured + CODE_PAGES_BYTES


@pytest.mark.parametrize("name", ["inception", "mobile", "mlp-mixer"])
def test_heads_of_the_zoo_grow_by_what_is_predicted(zoo_model: Any, tmp_path: Path, name: str) -> None:
    flat = zoo_model(name)
    legal = [cut.k for cut in outline_of(flat).cuts if cut.legal]
    pixels = np.random.default_rng(1).uniform(0, 255, (4, 28, 28, 1)).astype(np.float32)
    assert_prediction_holds(flat, legal[len(legal) // 2], {"image": pixels}, tmp_path / "head.tflite")


@pytest.mark.parametrize("kind", ["two_ends", "siamese", "nested"])
def test_heads_of_any_kind_grow_by_what_is_predicted(flat_model: Any, tmp_path: Path, kind: str) -> None:
    flat = flat_model(kind)
    assert_prediction_holds(flat, flat.graph.n, small_models.samples(kind), tmp_path / "head.tflite")


@pytest.mark.parametrize("precision", ["int8-weights", "float16", "float32"])
def test_heads_of_other_precisions_grow_by_what_is_predicted(zoo_model: Any, tmp_path: Path, precision: Any) -> None:
    flat = zoo_model("residual")
    pixels = np.random.default_rng(1).uniform(0, 255, (4, 28, 28, 1)).astype(np.float32)
    assert_prediction_holds(flat, flat.graph.n, {"image": pixels}, tmp_path / "head.tflite", precision)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    ("share", "precision"),
    [(0.25, "int8"), (0.5, "int8"), (0.75, "int8")]
    + [(1.0, precision) for precision in ("int8", "int8-weights", "float16", "float32")],
)
def test_all_models_of_the_zoo(zoo_model: Any, tmp_path: Path, name: str, share: float, precision: Any) -> None:
    flat = zoo_model(name)
    legal = [*(cut.k for cut in outline_of(flat).cuts if cut.legal), flat.graph.n]
    pixels = np.random.default_rng(1).uniform(0, 255, (4, 28, 28, 1)).astype(np.float32)
    k = legal[int((len(legal) - 1) * share)]
    assert_prediction_holds(flat, k, {"image": pixels}, tmp_path / "head.tflite", precision)


def test_there_is_a_prediction_for_every_runtime_and_head(flat_model: Any) -> None:
    from converters.peak import predicted_peaks

    flat = flat_model("branches")
    outline = outline_of(flat)
    assert set(outline.peak_bytes) == set(outline.cumulative_bytes) == set(PRECISIONS)
    for precision, by_runtime in outline.peak_bytes.items():
        assert set(by_runtime) == set(RUNTIMES)
        for runtime, peaks in by_runtime.items():
            assert peaks == tuple(predicted_peaks(flat, k, precision)[runtime] for k in range(1, outline.n + 1))
    assert Outline.from_json(outline.to_json()) == outline


def test_layers_that_nobody_foresaw_are_reckoned_as_weights() -> None:
    import keras

    from converters.flatten import flatten
    from converters.peak import predicted_peaks

    class Mystery(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:  # noqa: ARG002
            self.table = self.add_weight(shape=(1000, 1000))

        def call(self, x: Any) -> Any:
            return x

    inputs = keras.Input((10,))
    flat = flatten(keras.Model(inputs, Mystery()(inputs)))
    for precision in PRECISIONS:
        assert min(predicted_peaks(flat, 1, precision).values()) > 3_000_000 + 1_000_000


class TestChoosing:
    PEAKS = (4_000_000, 4_500_000, 6_000_000, 5_000_000)

    @pytest.fixture
    def outline(self, flat_model: Any) -> Outline:
        graph: Graph = flat_model("chain").graph
        whole = Outline.of(graph, "0" * 64)
        peaks = (*self.PEAKS, *range(5_000_001, 5_000_001 + whole.n - len(self.PEAKS)))
        return dataclasses.replace(whole, peak_bytes={"int8": {"litert": peaks}})

    def test_the_deepest_that_fits(self, outline: Outline) -> None:
        legal = [cut.k for cut in outline.cuts if cut.legal]
        peaks = outline.peak_bytes["int8"]["litert"]
        expected = max(k for k in legal if peaks[k - 1] <= 5_000_000)
        assert choose_peak(outline, 5_000_000, "litert") == PeakChoice(k=expected, peak_bytes=peaks[expected - 1])

    def test_everything_fits(self, outline: Outline) -> None:
        choice = choose_peak(outline, 10**9, "litert")
        assert choice == PeakChoice(k=outline.n, peak_bytes=outline.peak_bytes["int8"]["litert"][-1])

    def test_what_no_device_can_run_stays_a_split(self, outline: Outline) -> None:
        never = dataclasses.replace(outline, edge_only_reason="no")
        assert choose_peak(never, 10**9, "litert").k == max(cut.k for cut in outline.cuts if cut.legal)

    def test_nothing_fits(self, outline: Outline) -> None:
        assert choose_peak(outline, 3_999_999, "litert") == PeakChoice(k=None, peak_bytes=0)

    def test_bad_questions(self, outline: Outline) -> None:
        with pytest.raises(InvalidInputError, match="0 or more; got -1"):
            choose_peak(outline, -1, "litert")
        with pytest.raises(ConfigError, match="no prediction of memory for the runtime 'onnx'"):
            choose_peak(outline, 1, "onnx")
