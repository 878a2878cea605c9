"""Which engine runs a tail: the one that is asked for, or the one that is fastest here and computes the same.

``auto`` races what the bundle offers (:mod:`cloud_server.engines.race`) in a process of its own, which stays for the
next race and ends when none comes for a while. The result is remembered (:mod:`cloud_server.engines.results`): the same
bundle on the same machine is loaded without a race, and without TensorFlow where that did not win.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock, Timer
from typing import Any, Literal

from cloud_server.engines.base import TailEngine, engine_threads
from cloud_server.engines.race import Entrant, Finish, race, speedup, winner
from cloud_server.engines.results import Facts, Result, Results
from converters.worker import Worker
from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, ConversionError

_LOG = logging.getLogger(__name__)
EngineChoice = Literal["auto", "tensorflow", "litert"]
_LIBRARIES = ("tensorflow", "ai-edge-litert", "numpy")
# A race takes a second or two, and TensorFlow's start some more.
_RACE_PATIENCE_S = 300.0
_IDLE_S = 120.0


class EngineChooser:
    """Loads tails with ``engine``; a race is run for ``batches``, the batch sizes in use."""

    def __init__(self, engine: EngineChoice, batches: Sequence[int], results_path: Path) -> None:
        self._engine = engine
        self._batches = tuple(batches)
        self._results = Results(path=results_path)
        self._track = _Track()

    def load(self, bundle: Bundle) -> TailEngine:
        """The engine for the tail in ``bundle``, loaded; its ``reason`` says why it is this one.

        Raises :class:`BundleError`, also where the bundle does not offer the engine that was asked for.
        """
        entrants, reason = self._entrants(bundle)
        if len(entrants) == 1:
            engine = entrants[0].load(bundle, max(self._batches))
        else:
            result = self._result(bundle, entrants)
            entrant = next(each for each in entrants if (each.engine, each.threads) == (result.engine, result.threads))
            engine, reason = entrant.load(bundle, max(self._batches)), result.reason
        engine.reason = reason
        return engine

    def close(self) -> None:
        """End the process of races, if there is one."""
        self._track.close()

    def _entrants(self, bundle: Bundle) -> tuple[list[Entrant], str]:
        """What may run the tail, the reference first, and why where that is only one."""
        cores = engine_threads()
        tensorflow = Entrant(engine="tensorflow", threads=cores)
        litert = [Entrant(engine="litert", threads=threads) for threads in sorted({1, cores})]
        if self._engine == "tensorflow":
            return [tensorflow], "it was asked for"
        if self._engine == "litert":
            if not bundle.manifest.has_tail_tflite:
                raise BundleError(
                    f"bundle {bundle.digest} cannot be served with --engine litert: {_lack(bundle)}; "
                    "serve it with --engine auto or tensorflow"
                )
            return litert, "it was asked for"
        if not bundle.manifest.has_tail_tflite:
            return [tensorflow], _lack(bundle)
        if not _version("ai-edge-litert"):
            return [tensorflow], "ai-edge-litert is not installed here"
        return [tensorflow, *litert], ""

    def _result(self, bundle: Bundle, entrants: Sequence[Entrant]) -> Result:
        """The result of the race, remembered or run now."""
        facts = _facts(bundle, entrants, self._batches)
        # Without waiting for a race that some other bundle runs.
        known = self._known(facts, entrants)
        if known is not None:
            return known
        with self._results.turn():
            known = self._known(facts, entrants)
            if known is not None:
                return known
            try:
                finishes = self._track.race(bundle.path, entrants, self._batches)
            except ConversionError as error:
                # It crashed, or took too long: what is not known to be right is not taken, nor is this remembered.
                _LOG.warning("bundle %s: the race of its engines failed: %s", bundle.digest[:12], error.message)
                first = entrants[0]
                return Result(engine=first.engine, threads=first.threads, reason=f"the race failed: {error.message}")
            best = winner(finishes)
            for finish in finishes:
                if finish.error:
                    _LOG.warning("bundle %s: %s is not taken: %s", bundle.digest[:12], finish.entrant, finish.error)
            result = Result(engine=best.entrant.engine, threads=best.entrant.threads, reason=_reason(best, finishes))
            self._results.put(facts, result)
            return result

    def _known(self, facts: Facts, entrants: Sequence[Entrant]) -> Result | None:
        known = self._results.get(facts)
        possible = {(entrant.engine, entrant.threads) for entrant in entrants}
        if known is None or (known.engine, known.threads) not in possible:
            return None
        return replace(known, reason=f"{known.reason}; remembered")


class _Track:
    """The process that races are run in: started for the first one, ended when it has been idle for a while."""

    def __init__(self) -> None:
        self._turn = Lock()
        self._worker: Worker | None = None
        self._idle: Timer | None = None

    def race(self, folder: Path, entrants: Sequence[Entrant], batches: Sequence[int]) -> list[Finish]:
        """See :func:`race`. Raises :class:`ConversionError` where the process dies or never ends."""
        with self._turn:
            self._cancel()
            worker = self._worker = self._worker or Worker(engine_threads(), gpu=True)
            late = Event()

            def give_up() -> None:
                late.set()
                worker.kill()

            patience = _timer(_RACE_PATIENCE_S, give_up)
            try:
                return worker.run(race, folder.absolute(), list(entrants), list(batches))
            except ConversionError as error:
                if error.details.get("died"):
                    self._worker = None
                if late.is_set():
                    raise ConversionError(f"it took longer than {_RACE_PATIENCE_S:g} s") from error
                raise
            finally:
                patience.cancel()
                if late.is_set():
                    self._worker = None
                self._idle = _timer(_IDLE_S, self.close)

    def close(self) -> None:
        with self._turn:
            self._cancel()
            if self._worker is not None:
                self._worker.stop()
                self._worker = None

    def _cancel(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


def _timer(after_s: float, call: Callable[[], None]) -> Timer:
    timer = Timer(after_s, call)
    timer.daemon = True
    timer.start()
    return timer


def _lack(bundle: Bundle) -> str:
    reason = bundle.manifest.tail_tflite_reason
    return f"the bundle has no tail.tflite{f': {reason}' if reason else ''}"


def _reason(best: Finish, finishes: Sequence[Finish]) -> str:
    """One sentence on the race."""
    reference = finishes[0]
    times = {
        finish.entrant: ", ".join(f"{1000 * seconds:.3g} ms" for seconds in finish.seconds.values())
        for finish in finishes
    }
    batches = " and ".join(map(str, reference.seconds)) + (", reckoned on a busy machine" if best.reckoned else "")
    told = "; ".join(f"{finish.entrant}: {finish.error or times[finish.entrant]}" for finish in finishes)
    if best is reference:
        return f"nothing that computes the same is faster; batches of {batches}: {told}"
    return f"{speedup(reference, best):.1f} times as fast as {reference.entrant}; batches of {batches}: {told}"


def _facts(bundle: Bundle, entrants: Sequence[Entrant], batches: Sequence[int]) -> Facts:
    """All that a result depends on."""
    return {
        "bundle": bundle.digest,
        "entrants": [str(entrant) for entrant in entrants],
        "batches": list(batches),
        "cores": engine_threads(),
        "processor": _processor(),
        "gpus": _gpus(),
        "versions": {library: _version(library) for library in _LIBRARIES},
    }


def _processor() -> str:
    """The model of the processor, and a hash of what it can do: machines of a cloud differ in that alone."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        lines.setdefault(key.strip().lower(), value.strip())
    model = lines.get("model name") or lines.get("model") or lines.get("cpu part") or ""
    flags = lines.get("flags") or lines.get("features") or ""
    return f"{platform.machine()} {model} {hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def _gpus() -> list[Any]:
    """What TensorFlow may find, without asking it."""
    return [
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        sorted(path.name for path in Path("/proc/driver/nvidia/gpus").glob("*")),
    ]


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
