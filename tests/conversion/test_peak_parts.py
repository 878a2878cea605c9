"""What runtimes allocate: the figures are those of traced allocations of heads of one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from converters.arena import Use, arena_bytes, drifting_bytes
from converters.kernels import HeadKernels
from converters.lowering import lower
from converters.peak_litert import litert_parts
from converters.peak_tflite_runtime import tflite_runtime_parts

IMAGE = (24, 24, 48)


def head_of(shape: tuple[int, ...], layers: Callable[[Any], list[Any]], *, quantized: bool = True) -> HeadKernels:
    import keras

    from converters.flatten import flatten

    x = inputs = keras.Input(shape)
    for layer in layers(keras.layers):
        x = layer(x)
    flat = flatten(keras.Model(inputs, x))
    return lower(flat, quantized=quantized).head(flat.graph.n)


@pytest.mark.parametrize(
    ("shape", "layer", "weights", "tables"),
    [
        (IMAGE, lambda make: make.Conv2D(40, 3, padding="same"), 21_120, 41_832),
        (IMAGE, lambda make: make.Conv2D(40, 3, strides=2, padding="same"), 21_120, 10_584),
        (IMAGE, lambda make: make.Conv2D(40, 7, padding="same"), 113_280, 227_752),
        (IMAGE, lambda make: make.Conv2D(40, 1), 2_688, 0),
        (IMAGE, lambda make: make.Conv2D(48, 3, groups=4, padding="same"), 64 * (9 * 16 + 8), 41_832),
        (IMAGE, lambda make: make.DepthwiseConv2D(3, padding="same"), 64 * 17, 14_976),
        (IMAGE, lambda make: make.DepthwiseConv2D(5, padding="same"), 2_112, 26_880),
        (IMAGE, lambda make: make.DepthwiseConv2D(7, padding="same"), 307_200, 227_752),
        (IMAGE, lambda make: make.Conv2DTranspose(40, 3, strides=2, padding="same"), 22_272, 165_888),
        (IMAGE, lambda make: make.AveragePooling2D(3, strides=1, padding="same"), 0, 0),
        ((500,), lambda make: make.Dense(300), 155_648, 0),
    ],
)
def test_litert_packs_weights_and_points_into_inputs(
    shape: tuple[int, ...], layer: Callable[[Any], Any], weights: int, tables: int
) -> None:
    parts = litert_parts(head_of(shape, lambda make: [layer(make)]), "int8")
    assert (parts.weights, parts.tables) == (weights, tables)


@pytest.mark.parametrize(
    ("layer", "products", "arena"),
    [
        (lambda make: make.Conv2D(40, 3, padding="same"), 274_688 + 2 * 9 * 48 * 40, 299_648),
        (lambda make: make.Conv2D(40, 1), 35_072 + 2 * 48 * 40, 50_816),
        (lambda make: make.DepthwiseConv2D(3, padding="same"), 2 * 9 * 48, 55_424),
    ],
)
def test_tflite_runtime_unrolls_windows_and_multiplies_in_a_buffer(
    layer: Callable[[Any], Any], products: int, arena: int
) -> None:
    head = head_of(IMAGE, lambda make: [layer(make)])
    parts = tflite_runtime_parts(head, "int8")
    assert (parts.weights, parts.tables) == (products, 0)
    # The caller's copy of the output is not in the arena, which has 128 bytes to spare.
    assert parts.activations - head.sizes_bytes[head.outputs[0]] == arena - 128


@pytest.mark.parametrize(
    ("shape", "layer", "floats", "int8_weights", "tables"),
    [
        (IMAGE, lambda make: make.Conv2D(40, 3, padding="same"), 110_848, 21_312, 41_832),
        (IMAGE, lambda make: make.Conv2D(8, 3, padding="same"), 27_712, 7_104, 41_832),
        (IMAGE, lambda make: make.Conv2D(40, 1), 9_408, 2_880, 0),
        (IMAGE, lambda make: make.Conv2D(48, 3, groups=4, padding="same"), 27_904, 9_984, 41_832),
        (IMAGE, lambda make: make.DepthwiseConv2D(3, padding="same"), 1_920, 1_920, 14_976),
        (IMAGE, lambda make: make.DepthwiseConv2D(5, padding="same"), 4_992, 0, 26_880),
        (IMAGE, lambda make: make.DepthwiseConv2D(7, padding="same"), 153_600, 0, 227_752),
        ((500,), lambda make: make.Dense(300), 609_216, 163_840, 0),
    ],
)
def test_litert_packs_other_precisions_as_floats_or_with_sums(
    shape: tuple[int, ...], layer: Callable[[Any], Any], floats: int, int8_weights: int, tables: int
) -> None:
    """A depthwise filter of int8 weights alone is not packed at all, and has no table; a small one stays float."""
    head = head_of(shape, lambda make: [layer(make)], quantized=False)
    full, weights = litert_parts(head, "float32"), litert_parts(head, "int8-weights")
    assert (full.weights, full.tables) == (floats, tables)
    assert (weights.weights, weights.tables) == (int8_weights, tables if int8_weights else 0)
    half = litert_parts(head, "float16")
    assert (half.tables, half.activations) == (full.tables, full.activations)
    (kernel,) = head.kernels
    assert kernel.weights is not None
    assert half.weights == floats + 4 * (kernel.weights.count + kernel.weights.channels)


def test_transposed_filters_of_int8_weights_are_as_those_of_float16() -> None:
    head = head_of(IMAGE, lambda make: [make.Conv2DTranspose(40, 3, strides=2, padding="same")], quantized=False)
    packed, unpacked = 83_712, 4 * 9 * 48 * 40
    weights = tflite_runtime_parts(head, "int8-weights")
    assert (weights.weights, weights.tables) == (packed + unpacked, 165_888)
    assert weights.activations == tflite_runtime_parts(head, "float16").activations
    assert litert_parts(head, "int8-weights").weights == 111_616 + unpacked


def test_tflite_runtime_packs_floats_and_keeps_float16_as_float32_too() -> None:
    head = head_of(IMAGE, lambda make: [make.Conv2D(40, 3, padding="same")], quantized=False)
    full, half = tflite_runtime_parts(head, "float32"), tflite_runtime_parts(head, "float16")
    assert (full.weights, full.tables) == (83_136, 41_832)
    assert (half.weights, half.tables) == (83_136 + 69_280, 41_832)


def test_tflite_runtime_rounds_and_unrolls_inputs_of_int8_weights() -> None:
    head = head_of(IMAGE, lambda make: [make.Conv2D(40, 3, padding="same")], quantized=False)
    parts = tflite_runtime_parts(head, "int8-weights")
    image, rows, channels = 24 * 24 * 48, 24 * 24, 40
    assert parts.weights == 274_688
    # Input and output as floats and the caller's copy; rounded input, windows, and sums.
    assert parts.activations == 4 * image + 2 * 4 * rows * channels + image + 9 * image + 4 * rows * channels


@pytest.mark.parametrize(
    ("layers", "litert", "tflite_runtime"),
    [
        (lambda make: [make.Conv2D(16, 1) for _ in range(6)], 73_728, 184_320),
        (lambda make: [make.Conv2D(16, 1), make.Activation("swish"), make.Conv2D(16, 1)], 110_592, 73_728),
    ],
)
def test_workspaces_of_floats(layers: Callable[[Any], list[Any]], litert: int, tflite_runtime: int) -> None:
    """That of tflite-runtime drifts along a chain; a product is written over one of its factors."""
    head = head_of(IMAGE, layers, quantized=False)
    ends = 4 * 24 * 24 * (48 + 16 + 16)
    assert litert_parts(head, "float32").activations - ends == litert
    assert tflite_runtime_parts(head, "float32").activations - ends == tflite_runtime


def test_what_is_not_alive_together_shares_memory() -> None:
    assert arena_bytes([]) == 0
    chain = [Use(640, 0, 1), Use(640, 1, 2), Use(640, 2, 3), Use(640, 3, 4)]
    assert arena_bytes(chain) == 1280
    skip = [Use(640, 0, 4), Use(128, 1, 2), Use(128, 2, 3), Use(128, 3, 4)]
    assert arena_bytes(skip) == 640 + 256
    # The large ones come first, at both ends of time; between them only the gap above is free.
    assert arena_bytes([Use(64, 0, 9), Use(6400, 0, 3), Use(6400, 6, 9)]) == 6464


def test_a_drifting_plan_leaves_free_what_lies_before_its_neighbours() -> None:
    assert drifting_bytes([]) == 0
    assert drifting_bytes([Use(640, 0, 1), Use(640, 1, 2), Use(640, 2, 3), Use(640, 3, 4)]) == 4 * 640
    # A gap between two is used.
    assert drifting_bytes([Use(640, 0, 9), Use(640, 0, 3), Use(640, 0, 9), Use(64, 5, 6)]) == 3 * 640


@pytest.mark.parametrize(
    ("layers", "kinds"),
    [
        (lambda make: [make.Conv2D(4, 3), make.BatchNormalization(), make.ReLU()], ["conv"]),
        (lambda make: [make.Conv2D(4, 3, activation="swish")], ["conv", "sigmoid", "mul"]),
        (lambda make: [make.BatchNormalization(), make.ReLU()], ["mul", "add"]),
        (lambda make: [make.ZeroPadding2D(((0, 1), (0, 1))), make.Conv2D(4, 3, strides=2)], ["conv"]),
        (lambda make: [make.ZeroPadding2D(1), make.Conv2D(4, 3, strides=2)], ["pad", "conv"]),
        (lambda make: [make.Rescaling(1 / 255), make.Conv2D(4, 3)], ["conv"]),
        (lambda make: [make.Rescaling(1 / 255, offset=-1), make.Conv2D(4, 3)], ["mul", "add", "conv"]),
        (
            lambda make: [make.SeparableConv2D(4, 3), make.Dropout(0.5), make.Flatten()],
            ["depthwise", "conv", "reshape"],
        ),
        (lambda make: [make.Activation("elu")], ["dequantize", "float", "quantize"]),
        (lambda make: [make.Lambda(lambda x: x)], ["dequantize", "float", "quantize"]),
    ],
)
def test_kernels_are_those_that_the_converter_makes(layers: Callable[[Any], list[Any]], kinds: list[str]) -> None:
    assert [kernel.kind for kernel in head_of((8, 8, 3), layers).kernels] == kinds


def test_the_same_twice_is_computed_once() -> None:
    import keras

    from converters.flatten import flatten

    inputs = keras.Input((8, 8, 3))
    both = keras.layers.Concatenate()([keras.layers.ReLU()(inputs), keras.layers.ReLU()(inputs)])
    lowered = lower(flatten(keras.Model(inputs, both)))
    assert [kernel.kind for kernel in lowered.kernels] == ["relu", "concat"]


def test_a_head_that_ends_before_the_filter_still_pads() -> None:
    import keras

    from converters.flatten import flatten

    x = inputs = keras.Input((8, 8, 3))
    for layer in (keras.layers.ZeroPadding2D(((0, 1), (0, 1))), keras.layers.Conv2D(4, 3, strides=2)):
        x = layer(x)
    lowered = lower(flatten(keras.Model(inputs, x)))
    assert [kernel.kind for kernel in lowered.head(1).kernels] == ["pad"]
    assert [kernel.kind for kernel in lowered.head(2).kernels] == ["conv"]
