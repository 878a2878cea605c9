"""The tails that this server serves: loading, checking features, running batches, unloading.

A tail is loaded beside those that serve, and appears once it is warm. Each has a queue and a thread of its own, so a
slow one does not hold up another; here is where requests will be batched, and where worker processes will come in.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from cloud_server.engines.base import TailEngine
from cloud_server.lanes import Lane
from cloud_server.repository import ArtifactRepository
from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, FeatureMismatchError, SplitfleetError, TailFailedError, UnknownBundleError
from edge_sdk.manifest import CrossingSpec, Manifest
from edge_sdk.wire import DTYPES, Tensor

_LOG = logging.getLogger(__name__)
QUEUED_REQUESTS = 64
MAX_BATCH = 256

LoadEngine = Callable[[Bundle], TailEngine]
Result = tuple[Tensor, ...]


class Tail:
    """One loaded tail: what it takes, what it gives, and the engine that computes it."""

    def __init__(self, manifest: Manifest, digest: str, engine: TailEngine) -> None:
        self.digest = digest
        self.engine = engine
        self._crossing = {spec.name: spec for spec in manifest.crossing}
        self._outputs = {
            f"output_{j}": output.shape for j, output in enumerate(manifest.outputs) if output.side == "tail"
        }

    def check(self, features: Sequence[Tensor]) -> None:
        """Raises :class:`FeatureMismatchError` unless ``features`` are this tail's, with one common batch axis."""
        names = {tensor.name for tensor in features}
        if names != self._crossing.keys():
            raise FeatureMismatchError(
                f"bundle {self.digest[:12]} takes the features {sorted(self._crossing)}, got {sorted(names)}"
            )
        batches = set()
        for tensor in features:
            self._check_one(self._crossing[tensor.name], tensor.data)
            batches.add(tensor.data.shape[0])
        if len(batches) != 1:
            raise FeatureMismatchError(f"the features of one request have different batch sizes: {sorted(batches)}")

    def _check_one(self, spec: CrossingSpec, data: npt.NDArray[Any]) -> None:
        if data.dtype != DTYPES[spec.dtype] or data.shape[1:] != spec.shape or data.ndim != len(spec.shape) + 1:
            raise FeatureMismatchError(
                f"bundle {self.digest[:12]}: {spec.name} is {spec.dtype} {['batch', *spec.shape]}, "
                f"got {data.dtype.name} {list(data.shape)}: is the device's head of another bundle?"
            )
        if not 1 <= data.shape[0] <= MAX_BATCH:
            raise FeatureMismatchError(f"{spec.name}: a batch has 1 to {MAX_BATCH} samples, got {data.shape[0]}")

    def run(self, features: Sequence[Tensor]) -> Result:
        """The outputs ``output_j``, float32 (batch, *shape). Raises :class:`TailFailedError`."""
        batch = features[0].data.shape[0]
        try:
            outputs = self.engine.run({tensor.name: tensor.data for tensor in features})
        except Exception as error:
            _LOG.exception("the tail of bundle %s failed", self.digest)
            reason = str(error).partition("\n")[0][:500]
            raise TailFailedError(f"the tail of bundle {self.digest[:12]} failed: {reason}") from error
        shapes = {name: array.shape for name, array in outputs.items()}
        expected = {name: (batch, *shape) for name, shape in self._outputs.items()}
        if shapes != expected:
            raise TailFailedError(f"the tail of bundle {self.digest[:12]} gave {shapes}, its manifest says {expected}")
        return tuple(Tensor(name=name, data=np.asarray(outputs[name], np.float32)) for name in self._outputs)

    def warm(self) -> None:
        """Make the first request as fast as any. Raises :class:`BundleError` when the tail is not what it should be."""
        zeros = [
            Tensor(name=spec.name, data=np.zeros((1, *spec.shape), DTYPES[spec.dtype]))
            for spec in self._crossing.values()
        ]
        try:
            self.engine.warm({tensor.name: tensor.data for tensor in zeros})
            self.run(zeros)
        except Exception as error:
            reason = error.message if isinstance(error, SplitfleetError) else str(error).partition("\n")[0][:500]
            raise BundleError(f"bundle {self.digest}: its tail cannot be run: {reason}") from error


class TailHost:
    """The loaded tails by bundle digest. All methods may be called from any thread.

    ``folder`` is where bundles are laid out for the engine that ``load_engine`` makes.
    """

    def __init__(
        self,
        repository: ArtifactRepository,
        folder: Path,
        *,
        load_engine: LoadEngine,
        queued_requests: int = QUEUED_REQUESTS,
    ) -> None:
        self._repository = repository
        self._folder = folder
        self._load_engine = load_engine
        self._queued_requests = queued_requests
        self._ready: dict[str, tuple[Tail, Lane]] = {}
        self._closing: list[Lane] = []
        self._loading = Lock()

    @property
    def ready(self) -> tuple[str, ...]:
        """Digests of the bundles that are served."""
        return tuple(self._ready)

    def has_tail(self, digest: str) -> bool:
        """Whether that bundle of the repository has a tail at all; an edge-only one has none."""
        return self._repository.manifest(digest).has_tail

    def load(self, digest: str) -> str:
        """Make a bundle's tail ready, which takes seconds; returns the engine's name. One that is ready stays.

        Raises :class:`UnknownBlobError`, :class:`IntegrityError` or :class:`BundleError`; then nothing has changed.
        """
        with self._loading:
            present = self._ready.get(digest)
            if present is not None:
                return present[0].engine.name
            manifest = self._repository.manifest(digest)
            if not manifest.has_tail:
                raise BundleError(
                    f"bundle {digest} has no tail to load: it is edge-only (cut k={manifest.cut.k} of "
                    f"n={manifest.cut.n}), the device runs the whole model"
                )
            bundle = self._repository.lay_out(digest, self._folder / digest)
            engine = self._load_engine(bundle)
            tail = Tail(manifest, digest, engine)
            try:
                tail.warm()
            except BaseException:
                engine.close()
                raise
            self._ready[digest] = tail, Lane(f"tail {digest[:12]}", capacity=self._queued_requests)
            return engine.name

    def unload(self, digest: str) -> bool:
        """Stop serving a tail; what is in its queue is still run. ``False``: it was not loaded."""
        with self._loading:
            present = self._ready.pop(digest, None)
            if present is None:
                return False
            tail, lane = present
            lane.close(last=tail.engine.close)
            self._closing = [other for other in self._closing if not other.join(0.0)] + [lane]
            shutil.rmtree(self._folder / digest, ignore_errors=True)
            return True

    def submit(
        self,
        digest: str,
        features: Sequence[Tensor],
        *,
        begin: Callable[[], None],
        done: Callable[[Result | Exception], None],
    ) -> None:
        """Queue a batch for a tail. ``begin`` is called right before it runs and raises to prevent that; ``done`` gets
        the outcome, in a thread of the tail's.

        Raises :class:`UnknownBundleError`, :class:`FeatureMismatchError` or :class:`OverloadedError` at once.
        """
        present = self._ready.get(digest)
        if present is None:
            raise _unknown(digest)
        tail, lane = present
        tail.check(features)

        def work() -> Result:
            begin()
            return tail.run(features)

        if not lane.submit(work, done):
            raise _unknown(digest)

    def close(self, timeout_s: float) -> bool:
        """Unload all tails; whether all of their threads ended within ``timeout_s``."""
        for digest in self.ready:
            self.unload(digest)
        return all(lane.join(timeout_s) for lane in self._closing)


def _unknown(digest: str) -> UnknownBundleError:
    return UnknownBundleError(f"no tail of bundle {digest} is loaded here", bundle=digest)
