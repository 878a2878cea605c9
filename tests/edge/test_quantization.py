"""Quantization against TFLite's definition, and against the head's own arithmetic."""

import numpy as np
import pytest

from edge_sdk.quantization import dequantize, quantize


@pytest.mark.parametrize(
    ("real", "expected"),
    [
        # Half a step rounds away from zero, as TfLiteRound does.
        ([0.5, 1.5, 2.5, -0.5, -1.5], [1, 2, 3, -1, -2]),
        # Just below half a step does not, though its float32 sum with 0.5 is 1.
        ([0.49999997, -0.49999997], [0, 0]),
        ([126.4, 127.0, 128.0, 1e30, np.inf], [126, 127, 127, 127, 127]),
        ([-128.4, -129.0, -1e30, -np.inf], [-128, -128, -128, -128]),
    ],
)
def test_rounding_and_saturation(real, expected):
    values = quantize(np.array(real, np.float32), 1.0, 0, np.int8)
    assert values.dtype == np.int8
    np.testing.assert_array_equal(values, expected)


def test_the_zero_point_is_added_after_rounding():
    np.testing.assert_array_equal(quantize(np.array([0.5, -0.5], np.float32), 1.0, -3, np.int8), [-2, -4])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
@pytest.mark.parametrize("scale", [0.003921569, 0.1, 7.3])
def test_every_integer_survives_the_way_there_and_back(dtype, scale):
    bounds = np.iinfo(dtype)
    values = np.arange(bounds.min, bounds.max + 1, dtype=np.int64).astype(dtype)
    zero_point = int(bounds.min) // 3
    np.testing.assert_array_equal(quantize(dequantize(values, scale, zero_point), scale, zero_point, dtype), values)


def test_the_input_is_left_alone():
    real = np.ones(4, np.float32)
    quantize(real, 0.5, 3, np.int8)
    np.testing.assert_array_equal(real, np.ones(4))


def test_an_image_of_bytes_needs_no_rounding():
    image = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(quantize(image, 1.0, -128, np.int8), image.astype(np.int16) - 128)
