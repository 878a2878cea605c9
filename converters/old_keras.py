"""Legacy files that Keras 3 does not read: the old Keras loads them, and the same model is built anew in Keras 3.

Each layer becomes the Keras 3 layer of that name with its configuration and weights. What has no counterpart (plain
TensorFlow operations in a model's graph, mostly) is carried over as it is. Both models must compute the same.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from converters.carried import carried, is_carried
from converters.keras_backend import load_keras, load_tensorflow, valid_name
from converters.model_file import RESAVE, ModelFile
from edge_sdk.errors import ModelError, SplitfleetError, UnsupportedModelError

OLD_KERAS = "tf_keras"
TOLERANCE = 1e-3
_OWN_LAYERS = "Layers of its author's own are named with --custom-objects module:attr"
# What TensorFlow operations may a graph hold: those that only compute. Others read files or write them.
_COMPUTING = re.compile(
    r"(math|nn|linalg|signal|image|__operators__|compat\.v1\.(math|nn))\.\w+|"
    r"(compat\.v1\.)?(reshape|transpose|concat|cast|expand_dims|squeeze|stack|unstack|split|pad|tile|gather|slice|"
    r"strided_slice|shape|clip_by_value|where|zeros_like|ones_like|reverse|roll|broadcast_to|one_hot|fill|identity|"
    r"convert_to_tensor|repeat|stop_gradient|depth_to_space|space_to_depth|space_to_batch|batch_to_space|range|rank|"
    r"size|abs|maximum|minimum|add|subtract|multiply|divide|pow|square|sqrt|exp|sigmoid|tanh|reduce_\w+|argmax|argmin|"
    r"matmul|einsum|tensordot|greater|less|equal|logical_\w+|round|sign|zeros|ones)"
)


def load_through_old_keras(file: ModelFile, custom: Mapping[str, Any], reason: str, *, unsafe: bool) -> Any:
    """The Keras 3 model in a legacy ``file`` that Keras 3 could not load for ``reason``.

    Raises :class:`UnsupportedModelError` that names what to install where the old Keras is missing, and for what cannot
    be carried over; :class:`ModelError` where the old Keras cannot load it either.
    """
    if importlib.util.find_spec(OLD_KERAS) is None:
        raise UnsupportedModelError(
            f"{file.path} was written by Keras {file.keras_version or '2'}, and Keras 3 cannot load it ({reason}). The "
            f"old Keras may: install it with  pip install {OLD_KERAS}  and try again; or {RESAVE}. {_OWN_LAYERS}"
        )
    where = str(file.path)
    if not unsafe:
        _require_computing(file)
    old_keras = importlib.import_module(OLD_KERAS)
    try:
        old = old_keras.models.load_model(where, custom_objects=dict(custom), compile=False, safe_mode=not unsafe)
    except Exception as error:  # it raises whatever the file provokes
        raise ModelError(
            f"{where}: neither Keras 3 ({reason}) nor the old one can load it: {_first_line(error)}. {_OWN_LAYERS}"
        ) from error
    try:
        model = _Translation(where).model(old)
        _require_equal(old, model, where)
    except SplitfleetError:
        raise
    except Exception as error:  # layers raise what they like
        raise UnsupportedModelError(
            f"{where}: only the old Keras loads it, and in Keras 3 it cannot be built: {_first_line(error)}; {RESAVE}"
        ) from error
    return model


def _require_computing(file: ModelFile) -> None:
    for entry in _entries(file.config):
        function = entry["config"].get("function")
        if isinstance(function, str) and not _COMPUTING.fullmatch(function):
            raise UnsupportedModelError(
                f"{file.path}: its graph calls tf.{function}, which does more than to compute. If you trust its "
                "author, pass --unsafe"
            )


def _entries(config: Any) -> Iterator[dict[str, Any]]:
    stack = [config]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if str(value.get("class_name")).endswith("OpLambda") and isinstance(value.get("config"), dict):
                yield value
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)


class _Translation:
    """Layers of one old model and those nested in it, each translated once, however often it is called."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._made: dict[int, Any] = {}

    def model(self, old: Any) -> Any:
        keras = load_keras()
        if not getattr(old, "_is_graph_network", False):
            raise UnsupportedModelError(
                f"{self._where}: {old.name!r} is a subclassed model ({type(old).__name__}) and has no graph to cut"
            )
        known: dict[int, Any] = {}
        names = old.input_names
        for name, tensor in zip(names, old.inputs, strict=True):
            known[id(tensor)] = keras.Input(tuple(tensor.shape[1:]), dtype=tensor.dtype.name, name=name)
        inputs = [known[id(tensor)] for tensor in old.inputs]
        for depth in sorted(old._nodes_by_depth, reverse=True):
            for node in old._nodes_by_depth[depth]:
                if not node.is_input:
                    self._call(node, known)
        structure = keras.tree.pack_sequence_as
        return keras.Model(
            structure(_plain(old._nested_inputs), inputs),
            structure(_plain(old._nested_outputs), [known[id(tensor)] for tensor in old.outputs]),
            name=old.name,
        )

    def _call(self, node: Any, known: dict[int, Any]) -> None:
        keras = load_keras()
        for tensor in keras.tree.flatten(node.outputs):
            if getattr(tensor, "_keras_mask", None) is not None:
                raise UnsupportedModelError(
                    f"{self._where}: the layer {node.layer.name!r} makes a mask, which is not carried over from the "
                    f"old Keras; {RESAVE}"
                )
        args, kwargs = keras.tree.map_structure(
            lambda value: known.get(id(value), value), (_plain(node.call_args), _plain(node.call_kwargs))
        )
        kwargs.pop("training", None)
        layer = self._layer(node.layer)
        made = layer(*args, **{name: value for name, value in kwargs.items() if value is not None})
        if not isinstance(layer, keras.Model) and not is_carried(layer):
            self._copy_weights(node.layer, layer)
        for before, after in zip(keras.tree.flatten(node.outputs), keras.tree.flatten(made), strict=True):
            known[id(before)] = after

    def _layer(self, old: Any) -> Any:
        if id(old) not in self._made:
            nested = getattr(old, "_is_graph_network", False)
            self._made[id(old)] = self.model(old) if nested else _counterpart(old) or carried(old)
        return self._made[id(old)]

    def _copy_weights(self, old: Any, layer: Any) -> None:
        values = old.get_weights()
        if [value.shape for value in values] != [tuple(variable.shape) for variable in layer.weights]:
            raise UnsupportedModelError(
                f"{self._where}: the layer {old.name!r} ({type(old).__name__}) has other weights in Keras 3; {RESAVE}"
            )
        layer.set_weights(values)


def _counterpart(old: Any) -> Any | None:
    """The Keras 3 layer of the same class and configuration, not built yet; ``None`` where there is none."""
    keras = load_keras()
    kind = getattr(keras.layers, type(old).__name__, None)
    if kind is None or type(old).__module__.partition(".")[0] != OLD_KERAS:
        return None
    try:
        return kind.from_config(_understood(kind, old.get_config()))
    except (TypeError, ValueError):
        return None


def _understood(kind: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Of an old layer's configuration what its Keras 3 class takes, also of the layers that it wraps."""
    keras = load_keras()
    taken = {"name", "dtype", "trainable", *inspect.signature(kind.__init__).parameters}
    understood: dict[str, Any] = {}
    for name, value in config.items():
        if name not in taken:
            continue
        inner = getattr(keras.layers, str(value.get("class_name")), None) if isinstance(value, dict) else None
        if name == "dtype" and isinstance(value, dict):
            understood[name] = value["config"]["name"]
        elif name == "name":
            understood[name] = valid_name(value)
        elif inner is not None:
            understood[name] = dict(value) | {"module": "keras.layers", "config": _understood(inner, value["config"])}
        else:
            # An axis of the old Keras is a list of one.
            understood[name] = (
                value[0] if name == "axis" and isinstance(value, (list, tuple)) and len(value) == 1 else value
            )
    return understood


def _plain(structure: Any) -> Any:
    """The dicts, lists and tuples of Keras's own kinds as plain ones."""
    if isinstance(structure, dict):
        return {key: _plain(value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return (tuple if type(structure) is tuple else list)(_plain(value) for value in structure)
    return structure


def _require_equal(old: Any, model: Any, where: str) -> None:
    keras, tensorflow = load_keras(), load_tensorflow()
    rng = np.random.default_rng(0)
    values = [
        rng.uniform(0, 2, (2, *(axis or 64 for axis in tensor.shape[1:]))).astype(tensor.dtype.name)
        for tensor in old.inputs
    ]
    ours = keras.tree.flatten(model(keras.tree.pack_sequence_as(model._inputs_struct, values), training=False))
    theirs = tensorflow.nest.flatten(old(tensorflow.nest.pack_sequence_as(old._nested_inputs, values), training=False))
    for one, other in zip(ours, theirs, strict=True):
        if not np.allclose(np.asarray(one), np.asarray(other), rtol=TOLERANCE, atol=TOLERANCE):
            raise UnsupportedModelError(f"{where}: built anew in Keras 3 it computes something else; {RESAVE}")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
