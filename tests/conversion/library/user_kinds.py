"""Keras models of the kinds that users bring, each as small as it can be and still be of that kind.

A plain module on ``sys.path`` (see conftest.py), so that worker processes can import it too. :func:`load` gives every
weight a random value; :func:`samples` makes inputs for a model by its own input shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

KINDS: dict[str, Callable[[], Any]] = {}
VOCABULARY = 20


def kind(build: Callable[[], Any]) -> Callable[[], Any]:
    KINDS[build.__name__] = build
    return build


@kind
def u_net() -> Any:
    """Skips from each level of the way down to the same level of the way up."""
    import keras
    from keras import layers

    def block(x: Any, filters: int) -> Any:
        return layers.Conv2D(filters, 3, padding="same", activation="relu")(x)

    image = keras.Input((16, 16, 1), name="image")
    one = block(image, 4)
    two = block(layers.MaxPooling2D(2)(one), 6)
    three = block(layers.MaxPooling2D(2)(two), 8)
    up = layers.Conv2DTranspose(6, 2, strides=2)(three)
    up = block(layers.Concatenate()([up, two]), 6)
    up = layers.UpSampling2D(2)(up)
    up = block(layers.Concatenate()([up, one]), 4)
    return keras.Model(image, layers.Conv2D(1, 1, activation="sigmoid", name="segments")(up))


@kind
def odd_names() -> Any:
    """Names with spaces and of other scripts, which Keras takes and TensorFlow's graphs do not."""
    import keras
    from keras import layers

    series = keras.Input((3, 4), name="вход мой")
    x = layers.TimeDistributed(layers.Dense(4, name="ein Schritt"), name="слой один")(series)
    x = layers.Flatten(name="[bold] 2")(x)
    return keras.Model(series, layers.Dense(2, name="выход")(x), name="имя [red]")


@kind
def inception() -> Any:
    """Four branches of different depth side by side, twice."""
    import keras
    from keras import layers

    def block(x: Any) -> Any:
        one = layers.Conv2D(3, 1, activation="relu")(x)
        three = layers.Conv2D(3, 3, padding="same")(layers.Conv2D(2, 1, activation="relu")(x))
        five = layers.Conv2D(3, (5, 1), padding="same")(layers.Conv2D(3, (1, 5), padding="same")(x))
        pooled = layers.Conv2D(2, 1)(layers.AveragePooling2D(3, strides=1, padding="same")(x))
        return layers.Concatenate()([one, three, five, pooled])

    image = keras.Input((8, 8, 3), name="image")
    x = block(block(layers.Conv2D(4, 3, padding="same", name="stem")(image)))
    return keras.Model(image, layers.Dense(4, activation="softmax")(layers.GlobalAveragePooling2D()(x)))


@kind
def dense_net() -> Any:
    """Each layer takes all before it."""
    import keras
    from keras import layers

    image = keras.Input((8, 8, 3), name="image")
    x = layers.Conv2D(4, 3, padding="same", name="stem")(image)
    for _ in range(4):
        new = layers.Conv2D(3, 3, padding="same")(layers.ReLU()(layers.BatchNormalization()(x)))
        x = layers.Concatenate()([x, new])
    return keras.Model(image, layers.Dense(4)(layers.GlobalMaxPooling2D()(x)))


@kind
def ten_branches() -> Any:
    """As NASNet has it: so many branches under way that ten tensors cross."""
    import keras
    from keras import layers

    image = keras.Input((8, 8, 3), name="image")
    stem = layers.Conv2D(4, 3, padding="same", name="stem")(image)
    wide = [layers.SeparableConv2D(2, 3, padding="same", name=f"branch_{number}")(stem) for number in range(10)]
    merged = [layers.Conv2D(2, 1, activation="relu", name=f"after_{number}")(x) for number, x in enumerate(wide)]
    x = layers.Concatenate()([layers.Add()(merged[:5]), layers.Average()(merged[5:])])
    return keras.Model(image, layers.Dense(4)(layers.Flatten()(x)))


@kind
def structures() -> Any:
    """A list of inputs, and outputs in a dict that holds a list."""
    import keras
    from keras import layers

    inputs = [keras.Input((6,), name="first"), keras.Input((4,), name="second")]
    x = layers.Dense(6, activation="relu")(inputs[0])
    y = layers.Dense(6, activation="relu")(inputs[1])
    z = layers.Add(name="sum")([x, y])
    outputs = {"both": [layers.Dense(2, name="a")(z), layers.Dense(3, name="b")(z)], "early": y}
    return keras.Model(inputs, outputs)


@kind
def free_backbone() -> Any:
    """A backbone built for any size and called on one."""
    import keras
    from keras import layers

    inner = keras.Input((None, None, 3))
    x = layers.Conv2D(4, 3, strides=2, activation="relu", name="conv")(inner)
    x = layers.BatchNormalization(name="norm")(x)
    backbone = keras.Model(inner, layers.Conv2D(5, 3, activation="relu", name="deep")(x), name="backbone")
    image = keras.Input((12, 12, 3), name="image")
    x = backbone(layers.Rescaling(1 / 127.5, offset=-1)(image))
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


@kind
def other_shape() -> Any:
    """A nested model, built for any size, called on two; one more inside it."""
    import keras
    from keras import layers

    block = keras.Sequential(
        [keras.Input((None, None, 2)), layers.Conv2D(2, 3, padding="same", name="conv")], name="block"
    )
    inner = keras.Input((None, None, 2))
    shared = keras.Model(inner, layers.ReLU(name="relu")(layers.Add()([block(inner), inner])), name="shared")
    image = keras.Input((8, 8, 2), name="image")
    x = layers.Conv2D(2, 3, padding="same", name="stem")(image)
    large = shared(x)
    small = shared(layers.MaxPooling2D(2)(large))
    x = layers.Concatenate()([layers.Flatten()(large), layers.Flatten()(small)])
    return keras.Model(image, layers.Dense(3)(x))


@kind
def nested_ends() -> Any:
    """A nested model with several inputs and outputs, called with a dict; one of its outputs is not used."""
    import keras
    from keras import layers

    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    joined = layers.Concatenate()([layers.Dense(4, name="da")(a), layers.Dense(4, name="db")(b)])
    inner = keras.Model({"a": a, "b": b}, {"sum": layers.Dense(3, name="s")(joined), "rest": joined}, name="inner")
    left, right = keras.Input((4,), name="left"), keras.Input((3,), name="right")
    made = inner({"a": left, "b": right})
    return keras.Model([left, right], layers.Dense(2)(layers.ReLU()(made["sum"])))


@kind
def twins() -> Any:
    """A whole encoder shared by two calls."""
    import keras
    from keras import layers

    encoder = keras.Sequential(
        [keras.Input((8,)), layers.Dense(6, activation="relu", name="one"), layers.Dense(4, name="two")], name="encoder"
    )
    left, right = keras.Input((8,), name="left"), keras.Input((8,), name="right")
    distance = keras.ops.abs(encoder(left) - encoder(right))
    return keras.Model([left, right], layers.Dense(1, activation="sigmoid")(distance))


@kind
def operations() -> Any:
    """Arithmetic, slices, a concatenation, a reduction, and a matrix product, none of them a layer."""
    import keras
    from keras import layers

    image = keras.Input((6, 6, 4), name="image")
    x = layers.Conv2D(4, 1, name="conv")(image)
    x = keras.ops.concatenate([x[:, ::2, :, :2] * 2.0, x[:, 1::2, :, 2:] - 1.0], axis=-1)
    x = keras.ops.reshape(x, (-1, 18, 4))
    x = keras.ops.matmul(x, keras.ops.transpose(x, (0, 2, 1))) / 4.0
    x = keras.ops.maximum(x, 0.0) + keras.ops.expand_dims(keras.ops.max(x, axis=-1), -1)
    return keras.Model(image, layers.Dense(3)(keras.ops.mean(x, axis=1)))


@kind
def preprocessing() -> Any:
    """What the data need is inside, first of all a cast: the input is bytes."""
    import keras
    from keras import layers

    image = keras.Input((20, 20, 3), dtype="uint8", name="image")
    x = layers.Resizing(12, 12)(image)
    x = layers.CenterCrop(10, 10)(x)
    x = layers.Rescaling(1 / 255)(x)
    x = layers.Normalization(mean=[0.4, 0.5, 0.6], variance=[0.04, 0.05, 0.06])(x)
    x = layers.RandomFlip("horizontal")(x)
    x = layers.RandomRotation(0.1)(x)
    x = layers.RandomContrast(0.2)(x)
    x = layers.Conv2D(4, 3, activation="relu", name="conv")(x)
    x = layers.SpatialDropout2D(0.3)(x)
    return keras.Model(image, layers.Dense(3)(layers.Dropout(0.4)(layers.Flatten()(x))))


@kind
def recurrent() -> Any:
    """LSTM, GRU and simple RNN, with sequences and with states between them."""
    import keras
    from keras import layers

    series = keras.Input((6, 3), name="series")
    x = layers.LSTM(5, return_sequences=True, name="lstm")(series)
    x, state = layers.GRU(4, return_sequences=True, return_state=True, name="gru")(x)
    x = layers.SimpleRNN(4, name="simple")(x, initial_state=state)
    return keras.Model(series, layers.Dense(2, name="scores")(x))


@kind
def bidirectional() -> Any:
    """Both directions, and a layer that is applied to each step."""
    import keras
    from keras import layers

    series = keras.Input((6, 3), name="series")
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True), name="both")(series)
    x = layers.TimeDistributed(layers.Dense(4, activation="relu"), name="each")(x)
    x = layers.Bidirectional(layers.GRU(3), merge_mode="sum", name="sum")(x)
    return keras.Model(series, layers.Dense(2)(x))


@kind
def long_series() -> Any:
    """More steps than an unrolled layer may have: the recurrent layer belongs into the tail."""
    import keras
    from keras import layers

    series = keras.Input((600, 2), name="series")
    x = layers.Conv1D(4, 5, strides=2, activation="relu", name="conv")(series)
    x = layers.LSTM(4, name="lstm")(x)
    return keras.Model(series, layers.Dense(2, name="scores")(x))


@kind
def masked() -> Any:
    """The mask of the embedding is used by the recurrent layer and by the pooling: it crosses as one more tensor."""
    import keras
    from keras import layers

    tokens = keras.Input((7,), dtype="int32", name="tokens")
    x = layers.Embedding(VOCABULARY, 5, mask_zero=True, name="embedding")(tokens)
    x = layers.Dropout(0.2, name="dropout")(x)
    x = layers.LSTM(4, return_sequences=True, name="lstm")(x)
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(tokens, layers.Dense(2, name="scores")(x))


@kind
def masked_nested() -> Any:
    """A nested model that is called on what has a mask."""
    import keras
    from keras import layers

    encoder = keras.Sequential(
        [keras.Input((7, 5)), layers.Dense(5, name="dense"), layers.GRU(4, name="gru")], name="encoder"
    )
    tokens = keras.Input((7,), dtype="int32", name="tokens")
    x = layers.Embedding(VOCABULARY, 5, mask_zero=True, name="embedding")(tokens)
    return keras.Model(tokens, layers.Dense(2, name="scores")(encoder(x)))


@kind
def one_dimension() -> Any:
    """Causal, separable and transposed convolutions over a signal."""
    import keras
    from keras import layers

    signal = keras.Input((32, 2), name="signal")
    x = layers.Conv1D(4, 3, padding="causal", activation="relu")(signal)
    x = layers.SeparableConv1D(4, 3, padding="same")(x)
    x = layers.MaxPooling1D(2)(layers.LeakyReLU()(x))
    x = layers.Conv1DTranspose(3, 2, strides=2)(x)
    x = layers.DepthwiseConv1D(3)(x)
    return keras.Model(signal, layers.Dense(2)(layers.GlobalMaxPooling1D()(x)))


@kind
def three_dimensions() -> Any:
    import keras
    from keras import layers

    volume = keras.Input((8, 8, 8, 1), name="volume")
    x = layers.Conv3D(3, 3, activation="relu")(volume)
    x = layers.MaxPooling3D(2)(layers.BatchNormalization()(x))
    x = layers.Conv3D(4, 2, padding="same", activation="relu")(x)
    return keras.Model(volume, layers.Dense(2)(layers.GlobalAveragePooling3D()(x)))


@kind
def transformer() -> Any:
    """Tokens, positions, attention, and a block as it is used for language."""
    import keras
    from keras import layers

    tokens = keras.Input((6,), dtype="int32", name="tokens")
    x = layers.Embedding(VOCABULARY, 8, name="embedding")(tokens)
    x = x + layers.Embedding(6, 8, name="positions")(keras.ops.arange(6))
    attended = layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    x = layers.LayerNormalization(epsilon=1e-5)(x + attended)
    wide = layers.Dense(16, activation="gelu")(x)
    x = layers.LayerNormalization(epsilon=1e-5)(layers.Add()([x, layers.Dense(8)(wide)]))
    return keras.Model(tokens, layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(x)))


@kind
def vision_transformer() -> Any:
    import keras
    from keras import layers

    image = keras.Input((8, 8, 3), name="image")
    x = layers.Conv2D(8, 4, strides=4, name="patches")(image)
    x = layers.Reshape((4, 8))(x)
    y = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(y, y)])
    y = layers.Dense(8)(layers.Activation("swish")(layers.Dense(12)(layers.LayerNormalization()(x))))
    return keras.Model(image, layers.Dense(3)(layers.Flatten()(layers.Add()([x, y]))))


@kind
def convolutions() -> Any:
    """Dilated and grouped ones, squeeze and excitation, padding."""
    import keras
    from keras import layers

    image = keras.Input((10, 10, 4), name="image")
    x = layers.Conv2D(8, 3, dilation_rate=2, activation="relu", name="dilated")(image)
    x = layers.Conv2D(8, 3, groups=4, padding="same", activation="relu6", name="grouped")(x)
    squeezed = layers.GlobalAveragePooling2D(keepdims=True)(x)
    excited = layers.Conv2D(8, 1, activation="hard_sigmoid")(layers.Conv2D(2, 1, activation="relu")(squeezed))
    x = layers.Multiply()([x, excited])
    x = layers.ZeroPadding2D(((1, 0), (0, 1)))(x)
    x = layers.DepthwiseConv2D(3, dilation_rate=2)(x)
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(layers.PReLU(shared_axes=[1, 2])(x))))


def _mixed(policy: str) -> Any:
    import keras
    from keras import layers

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        image = keras.Input((8, 8, 3), name="image", dtype="float16" if policy == "float16" else "float32")
        x = layers.Rescaling(1 / 255)(image)
        x = layers.Conv2D(4, 3, activation="relu")(x)
        x = layers.BatchNormalization()(x)
        x = layers.ReLU()(x + 1.0)
        x = layers.GlobalAveragePooling2D()(x)
        return keras.Model(image, layers.Dense(3, activation="softmax", dtype="float32")(x))
    finally:
        keras.config.set_dtype_policy(before)


@kind
def mixed_float16() -> Any:
    return _mixed("mixed_float16")


@kind
def mixed_bfloat16() -> Any:
    return _mixed("mixed_bfloat16")


@kind
def half_precision() -> Any:
    """Not mixed: inputs and weights are float16 too."""
    return _mixed("float16")


@kind
def categories() -> Any:
    """Numbers that name things, one-hot in three ways, next to a measured one."""
    import keras
    from keras import layers

    first = keras.Input((1,), dtype="int32", name="first")
    second = keras.Input((3,), dtype="int32", name="second")
    measured = keras.Input((2,), name="measured")
    x = layers.CategoryEncoding(VOCABULARY, output_mode="one_hot", name="encoded")(first)
    y = keras.ops.reshape(keras.ops.one_hot(second, VOCABULARY), (-1, 3 * VOCABULARY))
    z = layers.CategoryEncoding(VOCABULARY, output_mode="multi_hot", name="several")(second)
    parts = [layers.Dense(4)(x), layers.Dense(4)(y), layers.Dense(3)(z), layers.Dense(3)(measured)]
    x = layers.Concatenate()(parts)
    return keras.Model([first, second, measured], layers.Dense(2)(layers.Dense(4, activation="relu")(x)))


@kind
def grouped_queries() -> Any:
    """Attention as language models have it by now."""
    import keras
    from keras import layers

    steps = keras.Input((6, 8), name="steps")
    x = layers.Dense(8)(steps)
    x = layers.RMSNormalization()(x + layers.GroupQueryAttention(4, 4, 2, name="attention")(x, x))
    return keras.Model(steps, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


@kind
def wrappers() -> Any:
    """A nested model for each time step, a convolution within a recurrent layer, stacked cells, spectral norms."""
    import keras
    from keras import layers

    film = keras.Input((3, 8, 8, 2), name="film")
    x = layers.ConvLSTM2D(2, 3, padding="same", return_sequences=True, name="conv_lstm")(film)
    each = keras.Sequential([keras.Input((8, 8, 2)), layers.Conv2D(3, 3), layers.GlobalAveragePooling2D()])
    x = layers.TimeDistributed(each, name="each")(x)
    x = layers.RNN([layers.LSTMCell(4), layers.GRUCell(3)], name="cells")(x)
    return keras.Model(film, layers.Dense(2)(layers.SpectralNormalization(layers.Dense(4))(x)))


@kind
def whole_numbers() -> Any:
    """Integers and booleans come out, one of each early."""
    import keras
    from keras import layers

    image = keras.Input((6, 6, 1), dtype="uint8", name="image")
    x = layers.Conv2D(3, 3, name="conv")(keras.ops.cast(image, "float32") / 255.0)
    bright = keras.ops.any(x > 1.5, axis=(1, 2, 3))
    x = layers.Dense(5, activation="relu")(layers.Flatten()(x))
    code = keras.ops.argmax(x, axis=-1)
    scores = layers.Dense(4)(x)
    return keras.Model(image, [bright, code, scores, keras.ops.argmax(scores, axis=-1)])


def load(name: str, seed: int = 0) -> Any:
    """A model of that kind with random weights, moving statistics of normalizations included."""
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = KINDS[name]()
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        if not variable.path.rpartition("/")[0].startswith("normalization"):
            value = rng.normal(0.0, 0.4, variable.shape)
            variable.assign(0.5 + np.abs(value) if variable.path.endswith("moving_variance") else value)
    return model


def samples(model: Any, count: int = 24) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs by name for a model of these kinds: pixels where it takes such, token numbers where integers."""
    rng = np.random.default_rng(1)
    rescales = any(type(layer).__name__ == "Rescaling" for layer in model.layers)
    made: dict[str, np.ndarray[Any, Any]] = {}
    for tensor in model.inputs:
        shape = (count, *tensor.shape[1:])
        if tensor.dtype == "uint8" or (rescales and tensor.dtype.startswith("float")):
            made[tensor.name] = rng.integers(0, 256, shape).astype(tensor.dtype)
        elif tensor.dtype == "int32":
            made[tensor.name] = rng.integers(1, VOCABULARY, shape).astype("int32")
            made[tensor.name][: count // 2, -2:] = 0
        else:
            made[tensor.name] = rng.normal(0.0, 1.0, shape).astype(tensor.dtype)
    return made
