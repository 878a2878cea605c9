"""The workshop: outlines and bundles, made in processes of their own or found in the cache.

The caller's process never loads TensorFlow. What is in the cache, for a recipe with a fingerprint, is returned without
starting a process at all.
"""

from __future__ import annotations

import functools
import os
import pickle
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from converters import jobs
from converters.cache import Cache, bundle_key
from converters.outline import Outline
from converters.precision import Attempt, Ladder, Precision
from converters.recipe import Recipe
from converters.worker import Worker
from edge_sdk.errors import ConfigError, ConversionError, SplitfleetError

T = TypeVar("T")


class Workshop:
    """``workers`` processes over a ``cache`` folder. May be called from any thread.

    Used as a context manager it waits for what was asked of it; when left by an exception it drops that.
    """

    def __init__(self, cache: Path, workers: int = 2) -> None:
        if workers < 1:
            raise ConfigError(f"a workshop needs at least 1 worker, got {workers}")
        self._cache = Cache(folder=cache)
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        self._workers = [Worker(threads, cache / "work") for _ in range(workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # One thread for each process, to wait for it.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="workshop")
        self._lock = threading.Lock()
        self._under_way: dict[tuple[bytes, Ladder | None], Future[Any]] = {}

    def outline(self, recipe: Recipe) -> Future[Outline]:
        """The outline of a recipe's model. The future raises :class:`SplitfleetError`."""
        known = self._cache.known(recipe)
        if known is not None:
            return _finished(known.outline)
        return self._submit(recipe, None, lambda worker: worker.run(jobs.outline, self._cache, recipe).outline)

    def build(
        self, recipe: Recipe, k: int, precision: Precision = "int8", max_error: float | None = None
    ) -> Future[Path]:
        """The folder of the bundle of a recipe's model cut after operation ``k``, which belongs to the cache.

        ``k == 0``: cloud-only, ``k == n``: edge-only. With the precision ``auto`` the head is the first of int8, int8
        weights with float activations, float16 and float32 that converts and whose error (:mod:`converters.deviation`)
        is at most ``max_error``; the bundle's manifest tells which and why. Raises :class:`ConfigError` for a precision
        or an error that is none; the future as that of :meth:`build_first`.
        """
        return self.build_first(recipe, Ladder.of(precision, max_error, lambda _: k))

    def build_first(self, recipe: Recipe, ladder: Ladder) -> Future[Path]:
        """The folder of the first bundle on ``ladder`` that can be made and is good, which belongs to the cache.

        The future raises :class:`IllegalCutError`, :class:`ConversionError` or another :class:`SplitfleetError`; a
        process that dies is a ``ConversionError``.
        """
        try:
            return _finished(ladder.climb(functools.partial(self._known_bundle, recipe)))
        except _NotMadeYet:
            return self._submit(
                recipe, ladder, lambda worker: ladder.climb(functools.partial(self._build, worker, recipe))
            )
        except SplitfleetError as error:
            return _failed(error)

    def _known_bundle(self, recipe: Recipe, attempt: Attempt) -> Path:
        """Raises :class:`_NotMadeYet` where nobody has tried."""
        known = self._cache.known(recipe)
        if known is None:
            raise _NotMadeYet
        key = bundle_key(recipe, known, attempt)
        ready = self._cache.bundle(key)
        if ready is not None:
            return ready
        refusal = self._cache.refusal(key)
        if not refusal:
            raise _NotMadeYet
        raise ConversionError(refusal)

    def _build(self, worker: Worker, recipe: Recipe, attempt: Attempt) -> Path:
        try:
            return worker.run(jobs.build, self._cache, recipe, attempt)
        except ConversionError as error:
            if not error.details.get("died") or error.details.get("closed"):
                raise
            # It may not be for want of ``tail.tflite`` that there is no bundle.
            return worker.run(jobs.build, self._cache, recipe, attempt, tail_tflite_failed=error.message)

    def close(self, *, wait: bool = True) -> None:
        """End the processes, after they have finished what was asked for, or (not ``wait``) at once."""
        if not wait:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=kind is None)

    def _submit(self, recipe: Recipe, wanted: Ladder | None, task: Callable[[Worker], T]) -> Future[T]:
        """Run ``task`` on an idle worker; who asks for the same again meanwhile gets the same future."""
        try:
            key = (pickle.dumps(recipe), wanted)
        except Exception as error:  # pickle raises PicklingError, TypeError, AttributeError
            raise ConfigError(
                f"the recipe of model {recipe.model_name!r} cannot be sent to a worker process ({error}); "
                "its functions must be importable: functions of a module, or functools.partial of such"
            ) from error
        with self._lock:
            future = self._under_way.get(key)
            if future is not None:
                return cast("Future[T]", future)
            future = self._under_way[key] = self._threads.submit(self._run, task)
        future.add_done_callback(lambda _: self._under_way.pop(key, None))
        return future

    def _run(self, task: Callable[[Worker], T]) -> T:
        worker = self._idle.get()
        try:
            return task(worker)
        finally:
            self._idle.put(worker)


class _NotMadeYet(Exception):
    """A bundle that is not in the cache, and neither is why not."""


def _finished(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _failed(error: SplitfleetError) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
