"""The SavedModel as each peer, the bare loop and the ceiling run it: one signature, one feature in, one output out.

It is what the author of a service would write for speed: raw bytes become an array without a copy, a batch is one call,
and TensorFlow has as many threads as the process has cores and none to wait for them. Needs numpy and TensorFlow only,
since it runs in the peers' environments too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

_WARM_RUNS = 3


class SavedModel:
    """``tail/`` of a bundle."""

    def __init__(self, folder: Path, *, max_batch: int) -> None:
        """Load it, and run it until it is warm, alone and in the largest batch."""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import tensorflow

        tensorflow.config.threading.set_intra_op_parallelism_threads(len(os.sched_getaffinity(0)))
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)
        self._constant = tensorflow.constant
        # A signature does not keep the variables of its model alive.
        self._model = tensorflow.saved_model.load(str(folder))
        self._call = self._model.signatures["serving_default"]
        ((self._input, spec),) = self._call.structured_input_signature[1].items()
        (self._output,) = self._call.structured_outputs
        self._shape = tuple(spec.shape[1:])
        self._dtype = np.dtype(spec.dtype.as_numpy_dtype)
        for batch in (1, max_batch):
            for _ in range(_WARM_RUNS):
                self.run([np.zeros(self._shape, self._dtype)] * batch)

    def feature(self, body: bytes) -> Array:
        """The feature of one request, (*shape), from its bytes."""
        return np.frombuffer(body, self._dtype).reshape(self._shape)

    def run(self, features: Sequence[Array]) -> Array:
        """Outputs (batch, …) of features (*shape) each."""
        batch = features[0][None] if len(features) == 1 else np.stack(features)
        outputs: Array = self._call(**{self._input: self._constant(batch)})[self._output].numpy()
        return outputs

    def run_each(self, features: Array) -> npt.NDArray[np.float32]:
        """Outputs of features (n, *shape), each run alone."""
        return np.concatenate([self.run([feature]) for feature in features]).astype(np.float32)
