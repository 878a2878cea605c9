"""Heads run over many samples, each in a process of its own, on this interpreter or on another one.

Only one TFLite runtime can be had beside TensorFlow on most machines: ``tflite-runtime`` needs numpy 1. Another
interpreter in which splitfleet is installed brings its runtimes along.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import edge_sdk
from converters.scratch import Scratch
from edge_sdk.bundle import Bundle
from edge_sdk.errors import ConfigError, RuntimeUnavailableError, SplitfleetError, from_wire
from edge_sdk.head_process import NO_RUNTIME, REPORT

# An interpreter that does not even tell its runtimes within this is none.
ANSWER_TIMEOUT_S = 60.0
HERE = Path(sys.executable)

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class InstalledRuntime:
    """A runtime, its version, and the interpreter that imports it. The one called ``none`` is for a bundle without a
    head.
    """

    name: str
    version: str
    python: Path


@dataclass(frozen=True, kw_only=True)
class HeadRun:
    """What a head made of N samples. ``features`` are parallel to the manifest's crossing tensors, each (N, …) as it
    travels; ``outputs`` has those of the model's outputs that the head returns, by place, as real numbers.
    """

    features: tuple[Array, ...]
    outputs: dict[int, Array]


def installed_runtimes(bundle: Bundle, pythons: Sequence[Path] = ()) -> tuple[InstalledRuntime, ...]:
    """The runtimes that can run the head of ``bundle``: those of this interpreter, then what ``pythons`` add to them.

    Raises :class:`ConfigError` for a file among ``pythons`` that is no interpreter with splitfleet.
    """
    if not bundle.manifest.has_head:
        return (InstalledRuntime(name=NO_RUNTIME, version="", python=HERE),)
    found: dict[str, InstalledRuntime] = {}
    for python in (HERE, *pythons):
        for name, version in _runtimes_of(python).items():
            found.setdefault(name, InstalledRuntime(name=name, version=version, python=python))
    return tuple(found.values())


def run_head(bundle: Bundle, runtime: InstalledRuntime, samples: Sequence[Array]) -> HeadRun:
    """Run ``samples``, parallel to the manifest's inputs and each (N, …), one after another.

    Raises :class:`RuntimeUnavailableError` when the runtime refuses the head or crashes, :class:`BundleError` when the
    head is not what its manifest says, :class:`InvalidInputError`, :class:`StorageError`.
    """
    manifest = bundle.manifest
    with _folder() as folder:
        for place, array in enumerate(samples):
            np.save(folder / f"input_{place}.npy", array)
        _ask(runtime.python, folder, str(bundle.path.absolute()), runtime.name, what=f"the head on {runtime.name}")
        return HeadRun(
            features=tuple(np.load(folder / f"feature_{place}.npy") for place in range(len(manifest.crossing))),
            outputs={
                place: np.load(folder / f"output_{place}.npy")
                for place, spec in enumerate(manifest.outputs)
                if spec.side == "head"
            },
        )


def _runtimes_of(python: Path) -> dict[str, str]:
    with _folder() as folder:
        try:
            report = _ask(python, folder, what="it", timeout_s=ANSWER_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired, RuntimeUnavailableError) as error:
            reason = error.message if isinstance(error, SplitfleetError) else str(error)
            raise ConfigError(
                f"{python} is no Python interpreter in which splitfleet is installed ({reason}); "
                "install it there, with the runtime as an extra: pip install '.[tflite-runtime]'"
            ) from None
    return dict(report["runtimes"])


def _ask(python: Path, folder: Path, *arguments: str, what: str, timeout_s: float | None = None) -> dict[str, Any]:
    """The report of the program that runs heads."""
    # -P: the folder where the user happens to be is no place to import from.
    command = [str(python), "-P", "-m", "edge_sdk.head_process", str(folder), *arguments]
    with (folder / "log").open("wb") as log:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=_environment(python),
            timeout=timeout_s,
            check=False,
        )
    try:
        report: dict[str, Any] = json.loads((folder / REPORT).read_text())
    except (OSError, ValueError):
        raise RuntimeUnavailableError(f"{what} {_end(process.returncode, folder / 'log')}") from None
    if "error" in report:
        raise from_wire(report["error"])
    return report


def _environment(python: Path) -> dict[str, str]:
    """This interpreter finds the SDK where this process found it; another one has its own."""
    kept = {name: value for name, value in os.environ.items() if name != "SPLITFLEET_RUNTIME"}
    if python != HERE:
        return kept
    place = str(Path(edge_sdk.__file__).parents[1])
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, (place, kept.get("PYTHONPATH"))))}


def _end(code: int, log: Path) -> str:
    """How a process ended that reported nothing."""
    if code < 0:
        cause = f"crashed its process: {signal.Signals(-code).name}"
        return cause + (", as happens when memory runs out" if -code == signal.SIGKILL else "")
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    return f"ended with exit code {code}" + (f": {last}" if last else "")


@contextmanager
def _folder() -> Iterator[Path]:
    scratch = Scratch()
    try:
        yield scratch.path
    finally:
        scratch.remove()
