"""The tails that this server serves: loading them into workers, running batches there, unloading.

A tail is loaded beside those that serve, and appears once it is warm. Where one cannot run for a while (it is loaded at
the start, it made room for others, its worker died) its requests wait in its queue. Everything belongs to the I/O
thread, but for what may be called from any and for the part of loading that reads and writes files.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

from cloud_server.batches import BatchLimits, Done
from cloud_server.eviction import victim_of
from cloud_server.handover import Handover
from cloud_server.lanes import Lane, log_failure
from cloud_server.loop import Loop
from cloud_server.repository import ArtifactRepository
from cloud_server.served_tail import ServedTail, State
from cloud_server.tail_signature import Features, TailSignature
from cloud_server.workers.crew import Crew, CrewLimits
from cloud_server.workers.launch import Launch
from cloud_server.workers.worker import Loaded, Worker
from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, OverloadedError, SplitfleetError, UnknownBundleError

_LOG = logging.getLogger(__name__)
_AGAIN_S = 1.0
# A batch that runs on that long after everybody has given it up never ends.
_STUCK_S = 30.0

T = TypeVar("T")


class WorkerState(NamedTuple):
    """A worker in figures."""

    number: int
    up: bool
    restarts: int
    rss_bytes: int
    tails: int


class TailHost:
    """The tails by bundle digest, in workers that ``launch`` starts.

    ``folder`` is where bundles are laid out for the engines.
    """

    def __init__(
        self,
        repository: ArtifactRepository,
        folder: Path,
        *,
        loop: Loop,
        launch: Launch,
        limits: BatchLimits | None = None,
        crew: CrewLimits | None = None,
    ) -> None:
        self._repository = repository
        self._folder = folder
        self._loop = loop
        self._limits = limits or BatchLimits()
        self._memory_bytes = (crew or CrewLimits()).memory_bytes
        self._crew = Crew(loop, launch, crew or CrewLimits(), on_up=self._went_up, on_down=self._went_down)
        self._served: dict[str, ServedTail] = {}
        # Unloaded, but what was queued is still run.
        self._leaving: set[ServedTail] = set()
        # One thread: loading takes all cores anyway.
        self.lane = Lane("loading of tails", capacity=64)
        self._loading = Lock()
        self._handover = Handover(loop.mailbox)

    # From any thread.

    @property
    def ready(self) -> tuple[str, ...]:
        """Digests of the bundles that are served, be it that they have to be brought back first."""
        return tuple(
            digest for digest, served in self._served.copy().items() if served.state in (State.READY, State.AWAY)
        )

    def is_known(self, digest: str) -> bool:
        """Whether that bundle is or should be served."""
        return digest in self._served

    def depths(self) -> dict[str, int]:
        """By digest, how many requests wait for each tail."""
        return {digest: served.batcher.depth for digest, served in self._served.copy().items()}

    def engines(self) -> dict[str, str]:
        """By digest, the name of the engine that runs each tail that is loaded."""
        loaded = {digest: served.loaded for digest, served in self._served.copy().items()}
        return {digest: tail.engine for digest, tail in loaded.items() if tail is not None}

    def workers(self) -> list[WorkerState]:
        """All workers."""
        homes = [served.worker for served in self._served.copy().values() if served.state is State.READY]
        return [
            WorkerState(worker.number, worker.up, worker.restarts, worker.rss_bytes(), homes.count(worker))
            for worker in self._crew
        ]

    def troubles(self) -> dict[str, str]:
        """What is not as it should be, by the digest of a bundle or the name of a worker."""
        found = {}
        for digest, served in self._served.copy().items():
            if served.state is State.FAILED:
                found[digest] = served.failure
            elif served.state is State.COMING:
                found[digest] = f"the tail of bundle {digest[:12]} is being loaded"
        for worker in self._crew:
            ailment = worker.ailment
            if ailment is not None:
                found[str(worker)] = f"{worker} {ailment}; it is started again"
        return found

    # From any thread but the I/O thread, which has to be at work.

    def load(self, digest: str) -> Loaded:
        """Make a bundle's tail ready, which takes seconds. One that is ready stays.

        Raises :class:`UnknownBlobError`, :class:`IntegrityError` or :class:`BundleError`, or
        :class:`TailFailedError` when the worker died of it; then nothing has changed.
        """
        with self._loading:
            present = self._served.get(digest)
            loaded = None if present is None else present.loaded
            if loaded is not None:
                return loaded
            manifest = self._repository.manifest(digest)
            if not manifest.has_tail:
                raise BundleError(
                    f"bundle {digest} has no tail to load: it is edge-only (cut k={manifest.cut.k} of "
                    f"n={manifest.cut.n}), the device runs the whole model"
                )
            bundle = self._repository.lay_out(digest, self._folder / digest)
            made: Loaded = self._handover.ask(partial(self._place, bundle))
            return made

    def unload(self, digest: str) -> bool:
        """Stop serving a tail; what is in its queue is still run. ``False``: it was not loaded."""
        with self._loading:
            was_loaded: bool = self._handover.ask(partial(self._take_out, digest))
            if was_loaded:
                shutil.rmtree(self._folder / digest, ignore_errors=True)
            return was_loaded

    # All below belongs to the I/O thread.

    def start(self) -> None:
        """Start the workers."""
        self._crew.start()

    def bring(self, digests: Sequence[str], *, on_edge_only: Callable[[str], None]) -> None:
        """Load tails in the background; one that fails is logged. Their requests wait from now on.

        ``on_edge_only`` is called for those that turn out to have no tail.
        """
        for digest in digests:
            self._served[digest] = ServedTail(digest, self._limits, self._loop)
        self._bring(digests, on_edge_only)

    def submit(
        self, digest: str, caller: Hashable, features: Features, *, begin: Callable[[], None], done: Done
    ) -> None:
        """Queue a request of ``caller`` for a tail, to be run as part of a batch: see :meth:`Batcher.submit`.

        Raises :class:`UnknownBundleError`, :class:`FeatureMismatchError`, :class:`TailFailedError` or
        :class:`OverloadedError` at once.
        """
        served = self._served.get(digest)
        if served is None:
            raise _unknown(digest)
        served.submit(caller, features, begin=begin, done=done)
        if served.state is State.AWAY:
            served.state = State.COMING
            self._bring([digest])

    def sweep(self) -> None:
        """To be called now and then: look for workers that are stuck, or have too much."""
        for served in (*self._served.values(), *self._leaving):
            if served.worker is not None and served.batcher.runs_in_vain(_STUCK_S):
                served.worker.kill(
                    f"was running the tail of bundle {served.digest[:12]} for {_STUCK_S:g} s and more, and nobody waits"
                )
        for worker in self._crew:
            self._relieve(worker)

    def close(self, timeout_s: float) -> None:
        """End the workers, whatever they are at; those that have not ended within ``timeout_s`` are killed."""
        self._handover.close()
        self.lane.close()
        self._crew.close(timeout_s)

    def _bring(self, digests: Sequence[str], on_edge_only: Callable[[str], None] = lambda _: None) -> None:
        def bring_all() -> None:
            for digest in digests:
                try:
                    if self._repository.manifest(digest).has_tail:
                        self.load(digest)
                    else:
                        self._loop.mailbox.post(partial(self._forget, digest, on_edge_only))
                except Exception as error:
                    self._loop.mailbox.post(partial(self._not_brought, digest, error))

        try:
            self.lane.submit(bring_all, log_failure("loading tails"))
        except OverloadedError:
            self._loop.call_later(_AGAIN_S, partial(self._bring, digests, on_edge_only))

    def _place(self, bundle: Bundle, future: Future[Loaded]) -> None:
        signature = TailSignature(bundle.manifest, bundle.digest)
        served = self._served.get(bundle.digest)
        if served is not None:
            served.know(signature)

        def load_into(worker: Worker) -> None:
            if served is not None:
                served.worker = worker
            worker.load(bundle.path, signature, partial(self._loaded, worker, signature, future))

        self._crew.with_one(None if served is None else served.worker, load_into)

    def _loaded(
        self, worker: Worker, signature: TailSignature, future: Future[Loaded], outcome: Loaded | SplitfleetError
    ) -> None:
        digest = signature.digest
        served = self._served.get(digest)
        if isinstance(outcome, Exception):
            if served is not None and served.state is State.COMING and outcome.details.get("died"):
                served.suspect(worker, worker.ailment or "died")
            if not future.done():
                future.set_exception(outcome)
            return
        if served is None:
            served = self._served[digest] = ServedTail(digest, self._limits, self._loop)
        served.arrive(worker, outcome, signature)
        _LOG.info("bundle %s runs on %s in %s: %s", digest[:12], outcome.engine, worker, outcome.reason)
        if not future.done():
            future.set_result(outcome)
        self._relieve(worker)

    def _forget(self, digest: str, on_edge_only: Callable[[str], None]) -> None:
        served = self._served.pop(digest, None)
        if served is not None:
            served.refuse(_unknown(digest))
        on_edge_only(digest)

    def _not_brought(self, digest: str, error: Exception) -> None:
        served = self._served.get(digest)
        # It came in another way meanwhile, or comes with its worker, or was given up.
        if served is None or served.state is not State.COMING or getattr(error, "details", {}).get("died"):
            return
        _LOG.error("the tail of bundle %s, which should be served, is not: %s", digest, error)
        if served.arrived_at:
            served.fail(f"the tail of bundle {digest[:12]} could not be loaded again: {error}")
        else:
            del self._served[digest]
            served.refuse(_unknown(digest))

    def _take_out(self, digest: str, future: Future[bool]) -> None:
        served = self._served.pop(digest, None)
        future.set_result(served is not None)
        if served is None:
            return
        if served.state is State.READY:
            self._leaving.add(served)
            served.batcher.close(last=partial(self._drained, served))
        else:
            served.refuse(_unknown(digest))

    def _drained(self, served: ServedTail) -> None:
        self._leaving.discard(served)
        if served.worker is not None and served.loaded is not None:
            served.worker.unload(served.loaded.id, lambda: None)

    def _relieve(self, worker: Worker) -> None:
        victim = victim_of(worker, self._served.values(), self._memory_bytes)
        if victim is not None and victim.loaded is not None:
            tail = victim.loaded.id
            victim.leave()
            # How much it has is known when that one is gone.
            worker.unload(tail, partial(self._relieve, worker))

    def _went_up(self, worker: Worker) -> None:
        lost = [
            digest
            for digest, served in self._served.items()
            if served.worker is worker and served.state is State.COMING
        ]
        if lost:
            self._bring(lost)

    def _went_down(self, worker: Worker, ending: str) -> None:
        for served in self._served.values():
            if served.worker is worker:
                served.lose(worker, ending)
        for served in [each for each in self._leaving if each.worker is worker]:
            self._leaving.discard(served)
            served.lose(worker, ending)
            served.refuse(_unknown(served.digest))


def _unknown(digest: str) -> UnknownBundleError:
    return UnknownBundleError(f"no tail of bundle {digest} is loaded here", bundle=digest)
