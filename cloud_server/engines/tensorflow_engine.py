"""The reference engine: TensorFlow runs the SavedModel of a bundle's tail, on a GPU where there is one."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy.typing as npt

from cloud_server.engines.base import Arrays, TailEngine, engine_threads
from cloud_server.engines.quiet import stderr_discarded
from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError

_SIGNATURE = "serving_default"
# The graph is traced and optimised over the first calls.
_WARM_RUNS = 3
_importing = Lock()


def import_tensorflow() -> Any:
    """The module ``tensorflow``, with its threads limited to the cores of this process, and quiet.

    The first call takes seconds. What anything writes to file descriptor 2 meanwhile is lost: TensorFlow's libraries
    write there before they can be told not to. A log that must not be lost goes to a duplicate of that descriptor.
    """
    with _importing:
        if "tensorflow" in sys.modules:
            return sys.modules["tensorflow"]
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        with stderr_discarded():
            import tensorflow

            # Else the first process takes all memory of a GPU, and a second one with tails finds none.
            for gpu in tensorflow.config.list_physical_devices("GPU"):
                with suppress(RuntimeError, ValueError):
                    tensorflow.config.experimental.set_memory_growth(gpu, True)
            # Too late only where the program has used TensorFlow before, and then its choice stands.
            with suppress(RuntimeError):
                tensorflow.config.threading.set_intra_op_parallelism_threads(engine_threads())
                tensorflow.config.threading.set_inter_op_parallelism_threads(1)
            tensorflow.constant(0)  # The first tensor makes TensorFlow look for devices, which it comments on as well.
        # A search for garbage in all that TensorFlow consists of takes a fifth of a second, in which no tail runs.
        gc.freeze()
        return tensorflow


class TensorFlowEngine(TailEngine):
    """``tail/`` of a bundle, through its signature ``serving_default``.

    The converter has made constants of its variables already: freezing them once more here changes nothing.
    """

    name = "tensorflow"

    def __init__(self, tensorflow: Any, model: Any, call: Any) -> None:
        self._tensorflow = tensorflow
        # A signature does not keep the variables of its model alive.
        self._model = model
        # The function behind a signature, which is called by name, takes and gives plain lists, in the order of the
        # names: sorting those out takes as long as a small batch, each time.
        self._call = call.inference_fn.call_flat
        self._captured = tuple(call.captured_inputs)
        self._inputs = sorted(call.structured_input_signature[1])
        self._outputs = sorted(call.structured_outputs)

    @classmethod
    def load(cls, bundle: Bundle) -> Self:
        tensorflow = import_tensorflow()
        model = _load(tensorflow, bundle.tail_path)
        call = model.signatures.get(_SIGNATURE)
        if call is None:
            raise BundleError(
                f"{bundle.tail_path}: the SavedModel has no signature {_SIGNATURE!r}, only {sorted(model.signatures)}"
            )
        inputs = set(call.structured_input_signature[1])
        expected = {spec.name for spec in bundle.manifest.crossing}
        if inputs != expected:
            raise BundleError(
                f"{bundle.tail_path}: the SavedModel takes {sorted(inputs)}, the manifest's features are "
                f"{sorted(expected)}"
            )
        return cls(tensorflow, model, call)

    def warm(self, features: Arrays) -> None:
        for _ in range(_WARM_RUNS):
            self.run(features)

    def run(self, features: Arrays) -> dict[str, npt.NDArray[Any]]:
        constant = self._tensorflow.constant
        outputs = self._call(*(constant(features[name]) for name in self._inputs), *self._captured)
        return {name: tensor.numpy() for name, tensor in zip(self._outputs, outputs, strict=True)}

    def close(self) -> None:
        del self._call, self._captured, self._model
        # Functions and variables of TensorFlow refer to each other in circles.
        gc.collect()


def _load(tensorflow: Any, path: Path) -> Any:
    try:
        return tensorflow.saved_model.load(str(path))
    except (OSError, ValueError, KeyError, tensorflow.errors.OpError) as error:
        reason = str(error).partition("\n")[0]
        raise BundleError(f"{path}: TensorFlow cannot load this SavedModel: {reason}; build the bundle again") from None
