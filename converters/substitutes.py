"""Layers that TensorFlow Lite has no kernel for, in terms of those that it has.

Only what a head needs and only where the result is the same, number by number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from converters.keras_backend import load_keras


def call_on_device(layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``layer(*args, **kwargs)`` returns, for arguments with a batch axis of fixed size."""
    keras = load_keras()
    if isinstance(layer, (keras.layers.MaxPooling3D, keras.layers.AveragePooling3D)):
        return _pool_3d(layer, args[0] if args else kwargs["inputs"])
    return layer(*args, **kwargs)


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
