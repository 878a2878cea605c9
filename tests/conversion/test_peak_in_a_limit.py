"""A head that is predicted to fit a memory limit runs inside it; one that is far from fitting is refused, cleanly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.lab.limits import DataLimits, Groups, MemoryLimits, open_limits
from cloud_server.lab.process import CONFINE
from edge_sdk import memory
from edge_sdk.errors import DoesNotFitError, RuntimeUnavailableError
from edge_sdk.memory import measure
from edge_sdk.runtime import choose_runtime

POPEN = subprocess.Popen


@pytest.fixture(scope="module")
def hungry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A small file whose activations take tens of megabytes, and what is predicted for it."""
    import keras

    from converters.calibration import Calibration
    from converters.flatten import flatten
    from converters.head import write_head
    from converters.peak import predicted_peaks
    from converters.split import split

    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((224, 224, 3), name="image")
    for _ in range(6):
        x = keras.layers.Conv2D(48, 3, padding="same", activation="relu")(x)
    flat = flatten(keras.Model(inputs, keras.layers.MaxPooling2D(4)(x)))
    image = np.random.default_rng(1).uniform(0, 255, (1, 224, 224, 3)).astype(np.float32)
    path = tmp_path_factory.mktemp("hungry") / "head.tflite"
    write_head(split(flat, flat.graph.n).head, ["output_0"], Calibration.of(flat.graph, {"image": image}), path)
    return path, predicted_peaks(flat, flat.graph.n, "int8")[choose_runtime()]


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """Puts the process that measures heads under a limit.

    ``counted`` is the most of a process that the limit is about, ``surely_counted`` the least: a cgroup does not count
    pages of libraries that the system holds in its cache for others already.
    """

    limits: MemoryLimits
    counted: str
    surely_counted: str
    monkeypatch: pytest.MonkeyPatch

    def base_bytes(self, runtime: str, counted: str) -> int:
        """Interpreter, numpy and runtime, by a figure of ``/proc/self/status``."""
        code = (
            "import sys; from edge_sdk.memory import _status; from edge_sdk.runtime import load_interpreter_module\n"
            "load_interpreter_module(sys.argv[1]); print(_status(sys.argv[2]))"
        )
        command = [sys.executable, "-c", code, runtime, counted]
        return int(subprocess.check_output(command, env=os.environ | memory.ONE_BLAS_THREAD))

    def set_limit(self, limit_bytes: int) -> None:
        limit = self.limits.limit(f"head-{limit_bytes}", limit_bytes)
        prefix = [sys.executable, "-I", "-S", str(CONFINE), "--parent", str(os.getpid()), *limit.arguments, "--"]

        def confined(command: list[str], **options: Any) -> subprocess.Popen[str]:
            return POPEN([*prefix, *command], **options)

        self.monkeypatch.setattr(memory.subprocess, "Popen", confined)


@pytest.fixture(params=["the best of this machine", "RLIMIT_DATA"])
def confinement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Confinement]:
    limits = open_limits() if request.param.startswith("the best") else DataLimits()
    counted, surely = ("VmRSS", "RssAnon") if isinstance(limits, Groups) else ("VmData", "VmData")
    yield Confinement(limits=limits, counted=counted, surely_counted=surely, monkeypatch=monkeypatch)
    limits.close()


def test_it_survives_with_what_is_predicted_and_is_refused_with_far_less(
    hungry: tuple[Path, int], confinement: Confinement
) -> None:
    head, predicted_bytes = hungry
    runtime = choose_runtime()
    free = measure(head, runtime=runtime)
    assert free.peak_bytes > 20 * head.stat().st_size, "the activations were to dwarf the file"
    assert 0.95 * free.peak_bytes <= predicted_bytes <= 1.3 * free.peak_bytes

    confinement.set_limit(confinement.base_bytes(runtime, confinement.counted) + predicted_bytes)
    assert measure(head, runtime=runtime).peak_bytes <= predicted_bytes

    confinement.set_limit(confinement.base_bytes(runtime, confinement.surely_counted) + predicted_bytes // 20)
    # Under RLIMIT_DATA XNNPACK only says that it failed, not that it was for want of memory.
    with pytest.raises((DoesNotFitError, RuntimeUnavailableError), match=r"too little memory|refuses it"):
        measure(head, runtime=runtime)
