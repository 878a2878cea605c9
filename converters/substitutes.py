"""Layers that TensorFlow Lite has no kernel for, or none that is right, in terms of those that it has.

Only what a head needs and only where the result is the same, number by number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from converters.keras_backend import load_keras, load_tensorflow


def call_on_device(layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``layer(*args, **kwargs)`` returns, for arguments with a batch axis of fixed size."""
    keras = load_keras()
    if isinstance(layer, (keras.layers.MaxPooling3D, keras.layers.AveragePooling3D)):
        return _pool_3d(layer, args[0] if args else kwargs["inputs"])
    if isinstance(layer, keras.layers.CategoryEncoding) and len(args) == 1 and not kwargs.get("count_weights"):
        return _encode_categories(layer, args[0])
    if isinstance(layer, (keras.src.ops.numpy.Argmax, keras.src.ops.numpy.Argmin)) and layer.axis is not None:
        return _extreme_place(layer, args[0])
    return layer(*args, **kwargs)


@contextmanager
def exact_one_hot() -> Iterator[None]:
    """Within it, Keras's one-hot encoding is arithmetic on integers.

    TensorFlow Lite 2.21 quantizes what the ONE_HOT kernel writes for "off" with a scale of its own: an int8 head would
    have halves in place of zeros.
    """
    backend = load_keras().src.backend
    before = backend.nn.one_hot

    def one_hot(x: Any, num_classes: int, axis: int = -1, dtype: Any = None, sparse: bool = False) -> Any:
        if sparse:
            return before(x, num_classes, axis=axis, dtype=dtype, sparse=sparse)
        return load_keras().ops.moveaxis(_compared(x, num_classes, dtype or "float32"), -1, axis)

    backend.nn.one_hot = one_hot
    try:
        yield
    finally:
        backend.nn.one_hot = before


@contextmanager
def exact_sum() -> Iterator[None]:
    """Within it, Keras's sum of two tensors is just that.

    Keras 3 takes a second term with one axis longer than 1 for the bias of a filter and adds it along the channels, or
    along the first axis of a sample, whichever is as long. With a batch of 1 that may well be another axis: the sum of
    (1, 6, 6) and (1, 6, 1) would be that of (1, 6, 6) and (6,).
    """
    keras = load_keras()
    place = keras.src.backend.numpy
    before = place.add

    def add(x1: Any, x2: Any) -> Any:
        first, second = (tuple(getattr(term, "shape", ())) for term in (x1, x2))
        if len(second) > 1 or (second and first[-1:] != second):
            dtype = keras.backend.result_type(getattr(x1, "dtype", type(x1)), x2.dtype)
            return load_tensorflow().add(*(keras.ops.convert_to_tensor(term, dtype=dtype) for term in (x1, x2)))
        return before(x1, x2)

    place.add = add
    try:
        yield
    finally:
        place.add = before


def _extreme_place(layer: Any, x: Any) -> Any:
    """Keras tells -0.0 from 0.0 on the way, bit by bit; which of equal values is named does not matter here."""
    tensorflow = load_tensorflow()
    find = tensorflow.argmax if type(layer).__name__ == "Argmax" else tensorflow.argmin
    place = find(x, axis=layer.axis, output_type=tensorflow.int32)
    return tensorflow.expand_dims(place, layer.axis) if layer.keepdims else place


def _compared(x: Any, count: int, dtype: Any) -> Any:
    """One more axis, of ``count``: 1 where ``x`` is that number."""
    ops = load_keras().ops
    # Whole numbers only, and no comparison: the converter would take that for a one-hot encoding again.
    distance = ops.expand_dims(ops.cast(x, "int32"), -1) - ops.arange(count, dtype="int32")
    apart = ops.clip(distance, -1, 1)
    return ops.cast(1 - apart * apart, dtype)


def _encode_categories(layer: Any, x: Any) -> Any:
    """Keras's own goes by way of floats, which int8 rounds to other categories, or counts with a kernel that lacks."""
    ops = load_keras().ops
    hot = _compared(x, layer.num_tokens, layer.compute_dtype)
    if layer.output_mode == "one_hot":
        return ops.squeeze(hot, -2) if len(x.shape) > 1 and x.shape[-1] == 1 else hot
    if len(x.shape) == 1:
        return hot
    return ops.max(hot, axis=-2) if layer.output_mode == "multi_hot" else ops.sum(hot, axis=-2)


def _pool_3d(layer: Any, volume: Any) -> Any:
    """Pooling over three axes is pooling over two of them and then over the third, in every padding."""
    ops = load_keras().ops
    pool = ops.max_pool if "Max" in type(layer).__name__ else ops.average_pool
    first = layer.data_format == "channels_first"
    x = ops.transpose(volume, (0, 2, 3, 4, 1)) if first else volume
    batch, depth, height, width, channels = x.shape
    (deep, *plane), (deep_stride, *plane_strides) = layer.pool_size, layer.strides
    x = ops.reshape(x, (batch * depth, height, width, channels))
    x = pool(x, plane, plane_strides, layer.padding, data_format="channels_last")
    height, width = x.shape[1:3]
    x = ops.reshape(x, (batch, depth, height * width, channels))
    x = pool(x, (deep, 1), (deep_stride, 1), layer.padding, data_format="channels_last")
    x = ops.reshape(x, (batch, x.shape[1], height, width, channels))
    return ops.transpose(x, (0, 4, 1, 2, 3)) if first else x
