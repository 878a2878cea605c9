"""How much memory a head takes, measured: the growth of a fresh process that loads and runs it.

The process imports Python, numpy and the runtime first; what it grows by from there on, at its peak over loading, the
first and the tenth invoke, is the head's. Run as a program it *is* that process::

    python -m edge_sdk.memory HEAD RUNTIME

Whether a head fits is others' decision.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_sdk.errors import (
    DeadlineExceededError,
    DoesNotFitError,
    RuntimeUnavailableError,
    SplitfleetError,
    from_wire,
    to_wire,
)

INVOKES = 10
POLL_S = 0.2
PR_SET_PDEATHSIG = 1
# numpy's OpenBLAS sets 32 MB aside for each core, for a thread that no head ever uses.
ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}

_OUT_OF_MEMORY = re.compile(r"bad_alloc|MemoryError|[Cc]annot allocate memory|[Mm]emory allocation")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Growth of a fresh process in bytes, above ``base_bytes`` (interpreter, numpy, runtime).

    The peaks are those up to that point, so they never fall. ``exact`` is false where the kernel does not let a process
    reset its peak: the figures then miss what was taken and given back in between.
    """

    runtime: str
    base_bytes: int
    load_peak_bytes: int
    first_invoke_peak_bytes: int
    tenth_invoke_peak_bytes: int
    exact: bool

    @property
    def peak_bytes(self) -> int:
        return self.tenth_invoke_peak_bytes


def measure(
    head_path: Path, *, runtime: str, timeout_s: float = 300.0, stop: threading.Event | None = None
) -> Measurement:
    """Measure a head in a fresh process, which is gone when this returns or raises; ``stop`` ends it early.

    Raises :class:`DoesNotFitError` when the memory that this device has did not suffice,
    :class:`RuntimeUnavailableError` when the runtime refuses the head, :class:`DeadlineExceededError`.
    """
    command = [sys.executable, "-m", "edge_sdk.memory", str(head_path), runtime]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ONE_BLAS_THREAD,
    ) as process:
        try:
            output, log = _communicate(process, timeout_s, stop)
        finally:
            process.kill()
    try:
        report = json.loads(output)
    except ValueError:
        raise _failure(head_path, process.returncode, log) from None
    if "error" in report:
        raise from_wire(report["error"])
    return Measurement(**report)


def _communicate(process: subprocess.Popen[str], timeout_s: float, stop: threading.Event | None) -> tuple[str, str]:
    for _ in range(max(int(timeout_s / POLL_S), 1)):
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=POLL_S)
        if stop is not None and stop.is_set():
            raise DeadlineExceededError("the device shuts down: the measurement was broken off")
    raise DeadlineExceededError(f"loading and running the head {INVOKES} times took longer than {timeout_s:g} s")


def _failure(head_path: Path, return_code: int, log: str) -> SplitfleetError:
    # What a process says when its memory runs out depends on who asked for it: the kernel, C++ or Python.
    if return_code == -signal.SIGKILL or _OUT_OF_MEMORY.search(log):
        return DoesNotFitError(f"{head_path}: this device has too little memory to run the head even by itself")
    reason = log.strip().rpartition("\n")[2] or f"exit code {return_code}"
    return RuntimeUnavailableError(f"{head_path}: the process that measures the head failed: {reason}")


def _measure_here(head_path: Path, runtime: str) -> Measurement:
    import numpy as np

    from edge_sdk.runtime import Interpreter, load_interpreter_module

    load_interpreter_module(runtime)
    gc.collect()
    exact = _reset_peak()
    base_bytes = _status("VmRSS")
    before_bytes = _status("VmHWM")
    peaks: list[int] = []

    def note_peak() -> None:
        peak_bytes = _status("VmHWM")
        # A peak that was there before tells nothing of the head.
        grown = peak_bytes if exact or peak_bytes > before_bytes else _status("VmRSS")
        peaks.append(max(grown - base_bytes, peaks[-1] if peaks else 0))

    interpreter = Interpreter(head_path, runtime=runtime)
    inputs: dict[str, Any] = {key: np.zeros(info.shape, info.dtype) for key, info in interpreter.inputs.items()}
    note_peak()
    for number in range(INVOKES):
        interpreter.run(inputs)
        if number in (0, INVOKES - 1):
            note_peak()
    return Measurement(
        runtime=runtime,
        base_bytes=base_bytes,
        load_peak_bytes=peaks[0],
        first_invoke_peak_bytes=peaks[1],
        tenth_invoke_peak_bytes=peaks[2],
        exact=exact,
    )


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeUnavailableError(f"/proc/self/status has no {name}: memory is measured on Linux only")


def _main() -> None:
    # An agent that is killed cannot stop us any more.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Where the memory runs out, it is this process that the kernel shall end, not the agent.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        document = vars(_measure_here(Path(sys.argv[1]), sys.argv[2]))
    except SplitfleetError as error:
        document = {"error": to_wire(error)}
    print(json.dumps(document))


if __name__ == "__main__":
    _main()
