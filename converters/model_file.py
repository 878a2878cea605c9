"""A model file, looked at before anything in it is believed: its format, and what its configuration asks for.

Nothing here runs the model's code or builds a layer; that is :mod:`converters.loading`'s matter.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_sdk.bundle import open_regular
from edge_sdk.errors import ModelError, UnsupportedModelError

MAX_CONFIG_BYTES = 64 * 1024 * 1024
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
RESAVE = "load it where it was made and save it with model.save('model.keras')"
# Layers that run what Keras cannot check: code in the file, or another file.
_CODE_LAYERS = ("Lambda", "TFSMLayer", "TorchModuleWrapper", "FlaxLayer", "JaxLayer")
_OTHER_FORMATS = {
    ".tflite": "a TensorFlow Lite model, which holds no layers that could be split",
    ".onnx": "an ONNX model",
    ".pt": "a PyTorch model",
    ".pth": "a PyTorch model",
    ".pb": "a TensorFlow graph",
    ".json": "an architecture without weights",
    ".pkl": "a pickle, which runs code when it is loaded",
}


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """``config`` is the model's configuration as Keras wrote it; ``legacy`` is true for HDF5.

    ``keras_version`` is the one that wrote it, or empty.
    """

    path: Path
    legacy: bool
    keras_version: str
    config: dict[str, Any]


def open_model_file(path: Path) -> ModelFile:
    """Raises :class:`ModelError` for a file that is damaged, :class:`UnsupportedModelError` for another format."""
    try:
        with open_regular(path) as file:
            magic = file.read(8)
    except IsADirectoryError:
        raise folder_error(path) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    suffix = path.suffix.lower()
    if suffix in (".h5", ".hdf5"):
        return _open_hdf5(path)
    if suffix == ".keras" and magic[:8] == HDF5_MAGIC:
        return _open_hdf5(path)
    if suffix == ".keras":
        return _open_zip(path)
    what = _OTHER_FORMATS.get(suffix, "of no known format")
    raise UnsupportedModelError(f"{path} is {what}; expected a .keras or a legacy .h5/.hdf5 file: {RESAVE}")


def folder_error(path: Path) -> UnsupportedModelError:
    """What there is to say of a folder where a model file is expected."""
    kind = "a TensorFlow SavedModel" if (path / "saved_model.pb").exists() else "a folder"
    return UnsupportedModelError(
        f"{path} is {kind}; expected a .keras or a legacy .h5/.hdf5 file: if it was a Keras model, {RESAVE}"
    )


def require_known(file: ModelFile, custom: Collection[str], *, unsafe: bool) -> None:
    """Raise :class:`UnsupportedModelError` for code in the configuration, unless ``unsafe``, and for classes and
    functions that are neither Keras's nor among the ``custom`` ones; it names all of them.
    """
    unknown: dict[str, str] = {}
    for entry in _objects(file.config):
        kind = str(entry["class_name"])
        config = entry.get("config")
        name = config.get("name") if isinstance(config, dict) else None
        if (kind in _CODE_LAYERS or kind == "__lambda__") and not unsafe:
            raise UnsupportedModelError(
                f"{file.path}: the layer {name or kind!r} ({kind}) holds Python code or calls for another file. "
                "To load it means to run, with your rights, whatever the author of the file put there. If you trust "
                "them, pass --unsafe; else ask for the model with a layer class in place of it"
            )
        module = entry.get("module")
        if not isinstance(module, str) or module.partition(".")[0] in ("keras", "builtins"):
            continue
        called = config if kind == "function" and isinstance(config, str) else kind
        registered = str(entry.get("registered_name") or called)
        if not {called, registered, registered.rpartition(">")[2]} & set(custom):
            unknown.setdefault(called, module)
    if foreign := next((f"{module}.{name}" for name, module in unknown.items() if _is_of_python(module)), None):
        raise UnsupportedModelError(
            f"{file.path}: it calls for {foreign}, which is Python's own and no layer: do not trust this file"
        )
    if unknown:
        raise UnsupportedModelError(unknown_objects(file.path, unknown))


def unknown_objects(path: Path, names: Mapping[str, str]) -> str:
    """What to say of objects that are not Keras's: name -> module, empty where the file does not tell it."""
    shown = ", ".join(f"{name} ({module})" if module else name for name, module in names.items())
    options = " ".join(
        f"--custom-objects {module if module not in ('', '__main__') else 'MODULE'}:{name.rpartition('>')[2]}"
        for name, module in names.items()
    )
    return f"{path}: Keras does not know what its author made: {shown}; name where it is with {options}"


def _is_of_python(module: str) -> bool:
    return module != "__main__" and module.partition(".")[0] in sys.stdlib_module_names


def _open_zip(path: Path) -> ModelFile:
    damaged = f"{path} is damaged: "
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            if "config.json" not in names:
                raise ModelError(f"{damaged}a .keras file holds a config.json, this one has {sorted(names)[:5]}")
            if archive.getinfo("config.json").file_size > MAX_CONFIG_BYTES:
                raise ModelError(f"{damaged}its config.json is larger than {MAX_CONFIG_BYTES} bytes")
            config = json.loads(archive.read("config.json"))
            metadata = json.loads(archive.read("metadata.json")) if "metadata.json" in names else {}
            if (broken := archive.testzip()) is not None:
                raise ModelError(f"{damaged}{broken} does not match its checksum")
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        # RuntimeError: encrypted, or JSON that is nested too deeply.
        raise ModelError(f"{damaged}it is truncated or no .keras file at all ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{damaged}its config.json describes no model")
    version = metadata.get("keras_version", "") if isinstance(metadata, dict) else ""
    return ModelFile(path=path, legacy=False, keras_version=str(version), config=config)


def _open_hdf5(path: Path) -> ModelFile:
    import h5py  # type: ignore[import-untyped]

    try:
        with h5py.File(path, "r") as file:
            text = file.attrs.get("model_config")
            version = file.attrs.get("keras_version", "")
            contents = sorted(file)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise ModelError(f"{path} is damaged: it is truncated or no HDF5 file at all ({error})") from None
    if text is None:
        raise UnsupportedModelError(
            f"{path} holds weights only ({', '.join(contents[:4]) or 'nothing'}), no model: build it, load these into "
            "it with model.load_weights(), and save it with model.save('model.keras')"
        )
    try:
        config = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: its configuration is no JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is damaged: its configuration describes no model")
    return ModelFile(path=path, legacy=True, keras_version=_text(version), config=config)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _objects(config: Any) -> Iterator[dict[str, Any]]:
    """All that is to be made from the configuration, at any depth: what has a ``class_name``."""
    # An explicit stack: a hostile file may be nested as deep as JSON can be read.
    stack = [config]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if isinstance(value.get("class_name"), str):
                yield value
            stack.extend(reversed(value.values()))
        elif isinstance(value, list):
            stack.extend(reversed(value))
