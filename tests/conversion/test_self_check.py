"""The self check's inputs and comparison: the same on every machine, for ever."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.errors import BundleError
from edge_sdk.manifest import InputSpec
from edge_sdk.self_check import compare, observe, self_check_inputs

IMAGE = InputSpec(name="image", shape=(2, 3), dtype="float32", scale=1.0, zero_point=-128)


def test_int8_inputs_are_the_bytes_of_the_stream():
    (made,) = self_check_inputs([IMAGE], 7).values()
    assert made.dtype == np.int8
    assert made.shape == (1, 2, 3)
    assert made.tobytes() == hashlib.shake_128(b"7").digest(6)
    assert made.tolist() == [[[-7, -112, 121], [-88, -22, -58]]]


def test_several_inputs_share_one_stream():
    specs = [
        IMAGE,
        InputSpec(name="facts", shape=(2,), dtype="float32"),
        InputSpec(name="tokens", shape=(3,), dtype="int32"),
    ]
    made = self_check_inputs(specs, 0)
    stream = hashlib.shake_128(b"0").digest(11)
    assert list(made) == ["input_0", "input_1", "input_2"]
    assert made["input_0"].tobytes() == stream[:6]
    assert made["input_1"].dtype == np.float32
    assert np.allclose(made["input_1"], np.frombuffer(stream[6:8], np.uint8) / 255)
    assert made["input_2"].dtype == np.int32
    assert made["input_2"].tolist() == [[byte & 1 for byte in stream[8:]]]


@given(st.integers(1, 2000))
def test_at_most_256_values_first_and_last_among_them(size):
    (values,) = observe({"feature_0": np.arange(size)}).values()
    assert len(values) == min(size, 256)
    assert values[0] == 0
    assert values[-1] == size - 1
    assert list(values) == sorted(set(values))


@given(st.lists(st.integers(-128, 127), min_size=1, max_size=300), st.integers(0, 20))
def test_what_was_observed_compares_in_steps(values, shift):
    output = np.array(values, np.int16).reshape(1, -1)
    expected = observe({"feature_0": output, "output_1": output})
    assert compare(expected, {"feature_0": output, "output_1": output}) == 0
    assert compare(expected, {"feature_0": output, "output_1": output + shift}) == shift


def test_a_value_that_is_no_number_is_infinitely_far():
    assert compare({"output_0": (1.0, 2.0)}, {"output_0": np.array([1.0, np.nan])}) == math.inf


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"feature_1": np.zeros(2)}, r"expected the outputs \['feature_0'\], the head gave \['feature_1'\]"),
        ({"feature_0": np.zeros(3)}, "expected 2 values, the head gave 3"),
    ],
)
def test_other_outputs_are_refused(outputs, message):
    with pytest.raises(BundleError, match=message):
        compare({"feature_0": (0.0, 0.0)}, outputs)
