"""The TFLite runtime of a device: one adapter over ``ai-edge-litert`` and ``tflite-runtime``.

Both are the same interpreter of different age. Which one runs a head: the name that is asked for, else
``$SPLITFLEET_RUNTIME``, else the first usable of :data:`RUNTIMES`. What the tensors mean is :mod:`edge_sdk.head`'s
business.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_sdk.errors import BundleError, RuntimeUnavailableError
from edge_sdk.quiet import without_lines

Array = npt.NDArray[Any]

RUNTIMES: dict[str, tuple[str, str]] = {
    "litert": ("ai-edge-litert", "ai_edge_litert.interpreter"),
    "tflite-runtime": ("tflite-runtime", "tflite_runtime.interpreter"),
}
"""Name -> (distribution, module), in order of preference."""

RUNTIME_VARIABLE = "SPLITFLEET_RUNTIME"
SIGNATURE = "serving_default"

# What a runtime says of itself with the first file that it loads, and which of them have.
_ANNOUNCEMENT = b"INFO: Created TensorFlow Lite"
_announced: set[str] = set()


def usable_runtimes() -> dict[str, str]:
    """Name -> version of the runtimes that can run here, in order of preference. Imports none of them."""
    return {name: version for name in RUNTIMES if (version := _version(name)) and _obstacle(name) is None}


def choose_runtime(name: str | None = None) -> str:
    """The runtime to use: ``name``, else ``$SPLITFLEET_RUNTIME``, else the first usable one.

    Raises :class:`RuntimeUnavailableError` telling what to install.
    """
    wanted = name or os.environ.get(RUNTIME_VARIABLE)
    if wanted is None:
        usable = usable_runtimes()
        if usable:
            return next(iter(usable))
        reasons = [reason for each in RUNTIMES if _version(each) and (reason := _obstacle(each))]
        raise RuntimeUnavailableError(
            "no TFLite runtime can run here: "
            + (reasons[0] if reasons else "install one with  pip install ai-edge-litert")
        )
    if wanted not in RUNTIMES:
        raise RuntimeUnavailableError(f"{wanted!r} is no TFLite runtime; expected one of {', '.join(RUNTIMES)}")
    if _version(wanted) is None:
        raise RuntimeUnavailableError(
            f"the runtime {wanted!r} is not installed here: install it with  pip install {_requirement(wanted)}"
        )
    if reason := _obstacle(wanted):
        raise RuntimeUnavailableError(reason)
    return wanted


def runtime_version(name: str) -> str:
    """Version of an installed runtime, ``""`` when it is not installed."""
    return _version(name) or ""


def load_interpreter_module(name: str) -> Any:
    """Import the runtime ``name``. Raises :class:`RuntimeUnavailableError` when it does not come up."""
    try:
        return importlib.import_module(RUNTIMES[name][1])
    except (ImportError, SystemError, AttributeError) as error:
        raise RuntimeUnavailableError(
            f"the runtime {name!r} is installed but cannot be imported ({error}): "
            f"install it anew with  pip install --force-reinstall {_requirement(name)}"
        ) from error


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(RUNTIMES[name][0])
    except importlib.metadata.PackageNotFoundError:
        return None


def _obstacle(name: str) -> str | None:
    # Built against numpy 1: with numpy 2 it imports, then fails with a SystemError that names no cause.
    if name == "tflite-runtime" and int(np.__version__.partition(".")[0]) >= 2:
        return (
            f"tflite-runtime needs numpy 1, numpy {np.__version__} is installed: "
            "pip install 'numpy<2', or use ai-edge-litert instead"
        )
    return None


def _requirement(name: str) -> str:
    return "'splitfleet[tflite-runtime]'" if name == "tflite-runtime" else RUNTIMES[name][0]


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor of the file; ``shape`` has the batch axis. ``scale`` is ``None`` where it is not quantized."""

    index: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    scale: float | None
    zero_point: int | None


class Interpreter:
    """One loaded TensorFlow Lite file, a head or a tail. Not thread-safe: one thread at a time."""

    def __init__(
        self,
        path: Path,
        *,
        runtime: str | None = None,
        num_threads: int = 1,
        delegate: Path | str | None = None,
    ) -> None:
        """Load ``path`` with ``runtime`` and allocate its tensors; ``delegate`` is a shared library (GPU, Coral).

        Raises :class:`RuntimeUnavailableError` when the runtime is missing or refuses the file,
        :class:`BundleError` when the file has no usable signature.
        """
        self.runtime = choose_runtime(runtime)
        module = load_interpreter_module(self.runtime)
        self.runtime_version = runtime_version(self.runtime)
        self._path = path
        with nullcontext() if self.runtime in _announced else without_lines(_ANNOUNCEMENT):
            self._load(module, num_threads, delegate)
        _announced.add(self.runtime)

    def _load(self, module: Any, num_threads: int, delegate: Path | str | None) -> None:
        path = self._path
        try:
            delegates = None if delegate is None else [module.load_delegate(str(delegate))]
            self._interpreter = module.Interpreter(
                model_path=str(path), num_threads=num_threads, experimental_delegates=delegates
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise RuntimeUnavailableError(
                f"{path}: {self.runtime} {self.runtime_version} cannot load it: {_first_line(error)}"
            ) from error
        if SIGNATURE not in self._interpreter.get_signature_list():
            raise BundleError(f"{path}: it has no signature {SIGNATURE!r}; build the bundle again")
        # Tensors are set by index: a signature runner looks each key up and resizes on every call.
        runner = self._interpreter.get_signature_runner(SIGNATURE)
        inputs, outputs = runner.get_input_details(), runner.get_output_details()
        # While a runner lives, the interpreter believes that its memory is in use and refuses to allocate.
        del runner
        self.inputs = {key: _tensor_info(details) for key, details in inputs.items()}
        self.outputs = {key: _tensor_info(details) for key, details in outputs.items()}
        self._allocate()

    def resize(self, batch: int) -> None:
        """Have the inputs take ``batch`` samples; for a file whose batch axis is free. :attr:`inputs` stays as it was.

        Raises :class:`RuntimeUnavailableError` when the runtime refuses that.
        """
        for info in self.inputs.values():
            self._interpreter.resize_tensor_input(info.index, (batch, *info.shape[1:]))
        self._allocate()

    def _allocate(self) -> None:
        try:
            self._interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise RuntimeUnavailableError(
                f"{self._path}: {self.runtime} {self.runtime_version} refuses it: {_first_line(error)}"
            ) from error

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by signature key for ``inputs`` by signature key, in the file's own shapes and dtypes.

        Each output is an array of its own: nothing that is returned changes with the next run.
        """
        interpreter = self._interpreter
        try:
            for key, info in self.inputs.items():
                interpreter.set_tensor(info.index, inputs[key])
            interpreter.invoke()
        except (ValueError, RuntimeError) as error:
            raise RuntimeUnavailableError(
                f"{self._path}: {self.runtime} {self.runtime_version} failed to run it: {_first_line(error)}"
            ) from error
        return {key: interpreter.get_tensor(info.index) for key, info in self.outputs.items()}


def _tensor_info(details: Mapping[str, Any]) -> TensorInfo:
    quantization = details["quantization_parameters"]
    quantized = len(quantization["scales"]) == 1
    return TensorInfo(
        index=int(details["index"]),
        shape=tuple(int(axis) for axis in details["shape"]),
        dtype=np.dtype(details["dtype"]),
        scale=float(quantization["scales"][0]) if quantized else None,
        zero_point=int(quantization["zero_points"][0]) if quantized else None,
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
