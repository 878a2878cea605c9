"""The tails that this server serves: loading, checking features, running batches, unloading.

A tail is loaded beside those that serve, and appears once it is warm. Each has a queue and a thread of its own
(:mod:`cloud_server.batches`), so a slow one does not hold up another.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from cloud_server.batches import Batcher, BatchLimits, Done, Features, Result
from cloud_server.engines.base import TailEngine
from cloud_server.repository import ArtifactRepository
from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, FeatureMismatchError, SplitfleetError, TailFailedError, UnknownBundleError
from edge_sdk.manifest import CrossingSpec, Manifest
from edge_sdk.wire import DTYPES, Tensor

_LOG = logging.getLogger(__name__)
# Of one request.
MAX_BATCH = 256

LoadEngine = Callable[[Bundle], TailEngine]


class Tail:
    """One loaded tail: what it takes, what it gives, and the engine that computes it."""

    def __init__(self, manifest: Manifest, digest: str, engine: TailEngine) -> None:
        self.digest = digest
        self.engine = engine
        self._crossing = {spec.name: spec for spec in manifest.crossing}
        self._outputs = {
            f"output_{j}": output.shape for j, output in enumerate(manifest.outputs) if output.side == "tail"
        }

    def check(self, features: Features) -> None:
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

    def run(self, requests: Sequence[Features]) -> list[Result]:
        """Run requests whose features were checked as one batch; gives each its own outputs.

        ``output_j`` is float32 (batch, *shape), in the order of the manifest. Raises :class:`TailFailedError`.
        """
        ends = np.cumsum([features[0].data.shape[0] for features in requests]).tolist()
        try:
            outputs = self.engine.run(_joined(requests))
        except Exception as error:
            _LOG.exception("the tail of bundle %s failed", self.digest)
            reason = str(error).partition("\n")[0][:500]
            raise TailFailedError(f"the tail of bundle {self.digest[:12]} failed: {reason}") from error
        shapes = {name: array.shape for name, array in outputs.items()}
        expected = {name: (ends[-1], *shape) for name, shape in self._outputs.items()}
        if shapes != expected:
            raise TailFailedError(f"the tail of bundle {self.digest[:12]} gave {shapes}, its manifest says {expected}")
        arrays = {name: np.asarray(outputs[name], np.float32) for name in self._outputs}
        return [
            tuple(Tensor(name=name, data=array[begin:end]) for name, array in arrays.items())
            for begin, end in zip([0, *ends], ends, strict=False)
        ]

    def warm(self, batches: Sequence[int]) -> None:
        """Make the first request as fast as any, for batches of these sizes.

        Raises :class:`BundleError` when the tail is not what it should be.
        """
        try:
            for batch in batches:
                zeros = [
                    Tensor(name=spec.name, data=np.zeros((batch, *spec.shape), DTYPES[spec.dtype]))
                    for spec in self._crossing.values()
                ]
                self.engine.warm({tensor.name: tensor.data for tensor in zeros})
                self.run([zeros])
        except Exception as error:
            reason = error.message if isinstance(error, SplitfleetError) else str(error).partition("\n")[0][:500]
            raise BundleError(f"bundle {self.digest}: its tail cannot be run: {reason}") from error


def _joined(requests: Sequence[Features]) -> dict[str, npt.NDArray[Any]]:
    """The features of several requests, one after another along the batch axis, by name."""
    if len(requests) == 1:
        return {tensor.name: tensor.data for tensor in requests[0]}
    # By name, since each request may have them in an order of its own.
    arrays = [{tensor.name: tensor.data for tensor in features} for features in requests]
    return {name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]}


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
        limits: BatchLimits | None = None,
    ) -> None:
        self._repository = repository
        self._folder = folder
        self._load_engine = load_engine
        self.limits = limits or BatchLimits()
        self._ready: dict[str, tuple[Tail, Batcher]] = {}
        self._closing: list[Batcher] = []
        self._loading = Lock()

    @property
    def ready(self) -> tuple[str, ...]:
        """Digests of the bundles that are served."""
        return tuple(self._ready)

    def is_ready(self, digest: str) -> bool:
        """Whether that bundle is served."""
        return digest in self._ready

    def depths(self) -> dict[str, int]:
        """By digest, how many requests wait for each tail."""
        return {digest: batcher.depth for digest, (_, batcher) in self._ready.copy().items()}

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
                tail.warm(sorted({1, self.limits.max_batch}))
            except BaseException:
                engine.close()
                raise
            self._ready[digest] = tail, Batcher(f"tail {digest[:12]}", tail.run, self.limits)
            return engine.name

    def unload(self, digest: str) -> bool:
        """Stop serving a tail; what is in its queue is still run. ``False``: it was not loaded."""
        with self._loading:
            present = self._ready.pop(digest, None)
            if present is None:
                return False
            tail, batcher = present
            batcher.close(last=tail.engine.close)
            self._closing = [other for other in self._closing if not other.join(0.0)] + [batcher]
            shutil.rmtree(self._folder / digest, ignore_errors=True)
            return True

    def submit(
        self,
        digest: str,
        caller: Hashable,
        features: Features,
        *,
        begin: Callable[[], None],
        done: Done,
        flush: Callable[[], None],
    ) -> None:
        """Queue a request of ``caller`` for a tail, to be run as part of a batch: see :meth:`Batcher.submit`.

        Raises :class:`UnknownBundleError`, :class:`FeatureMismatchError` or :class:`OverloadedError` at once.
        """
        present = self._ready.get(digest)
        if present is None:
            raise _unknown(digest)
        tail, batcher = present
        tail.check(features)
        if not batcher.submit(caller, features, begin=begin, done=done, flush=flush):
            raise _unknown(digest)

    def close(self, timeout_s: float) -> bool:
        """Unload all tails; whether all of their threads ended within ``timeout_s``."""
        for digest in self.ready:
            self.unload(digest)
        return all(batcher.join(timeout_s) for batcher in self._closing)


def _unknown(digest: str) -> UnknownBundleError:
    return UnknownBundleError(f"no tail of bundle {digest} is loaded here", bundle=digest)
