"""`splitfleet verify` where what it runs is in other interpreters, crashes, or is broken off."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tflite_runtime_venv import ROOT, python_of_the_venv

from converters.verification import verify
from edge_sdk.bundle import Bundle

Document = Callable[..., Any]
Told = Callable[..., str]

CRASHING_RUNTIME = """
import os, signal
def Interpreter(**_):
    os.kill(os.getpid(), signal.SIGSEGV)
"""


def rewrite(bundle: Path, name: str, data: bytes) -> None:
    """Another file in a bundle, and a manifest that promises just that."""
    (bundle / name).write_bytes(data)
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    (entry,) = (entry for entry in manifest["files"] if entry["path"] == name)
    entry |= {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    (bundle / "manifest.json").write_text(text)


def ends_with_the_process() -> Any:
    """Loading a model, as the kernel sees it end when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="tflite-runtime has wheels up to Python 3.11 only")
def test_a_runtime_of_another_interpreter_runs_the_head_too(
    document: Document, bundle: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    python = python_of_the_venv()
    model = ("--model", files / "narrow.keras", "--data", files / "validation.npz")
    found = document("verify", bundle, *model, "--python", python)
    assert found["ok"]
    runtimes = found["runtimes"]
    assert {name: each["python"] for name, each in runtimes.items()} == {
        "litert": sys.executable,
        "tflite_runtime": str(python),
    }
    assert runtimes["tflite_runtime"]["version"] == "2.14.0"
    for key in ("max_abs_error", "mean_abs_error", "relative_error"):
        assert found[key] == max(each[key] for each in runtimes.values())
    assert all(0 < each["max_abs_error"] < 0.1 and each["top1_agreement"] == 1.0 for each in runtimes.values())


def test_all_runtimes_that_are_importable_here_run_the_head(
    document: Document, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where tflite-runtime is installed beside the other: here it is that one under another name."""
    package = tmp_path / "site" / "tflite_runtime"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "interpreter.py").write_text("from ai_edge_litert.interpreter import *\n")
    metadata = tmp_path / "site" / "tflite_runtime-2.14.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tflite-runtime\nVersion: 2.14.0\n")
    # It needs numpy 1, which the other packages here do not.
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\nif 'edge_sdk.head_process' in sys.orig_argv:\n    import numpy\n    numpy.__version__ = '1.26.4'\n"
    )
    # Nothing is imported from the folder that one is in.
    (tmp_path / "numpy.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    found = document("verify", bundle)
    assert {name: each["ok"] for name, each in found["runtimes"].items()} == {"litert": True, "tflite_runtime": True}


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (None, "No such file or directory"),
        ("#!/bin/sh\nexit 0\n", "ended with exit code 0"),
        ("#!/bin/sh\necho 'No module named edge_sdk' >&2\nexit 1\n", "exit code 1: No module named edge_sdk"),
        ("not a program", "Exec format error"),
    ],
)
def test_an_interpreter_that_is_none_is_told(
    error: Told, bundle: Path, tmp_path: Path, program: str | None, told: str
) -> None:
    python = tmp_path / "python"
    if program is not None:
        python.write_text(program)
        python.chmod(0o755)
    message = error("verify", bundle, "--python", python)
    assert "is no Python interpreter in which splitfleet is installed" in message
    assert told in message


def test_a_runtime_that_crashes_is_a_finding(
    document: Document, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "ai_edge_litert"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "interpreter.py").write_text(CRASHING_RUNTIME)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    found = document("verify", bundle, exit_code=1)
    told = "the head on litert crashed its process: SIGSEGV"
    assert found["problems"] == [f"litert: {told}"]
    assert (found["runtimes"]["litert"]["ok"], found["runtimes"]["litert"]["error"]) == (False, told)


def test_a_head_that_no_runtime_takes_is_a_finding(document: Document, bundle: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(bundle, tmp_path / "broken")
    rewrite(broken, "head.tflite", b"\0" * 64)
    found = document("verify", broken, exit_code=1)
    assert not found["runtimes"]["litert"]["ok"]
    assert "cannot load it" in found["problems"][0]


def test_all_that_is_wrong_is_found_and_the_head_runs(document: Document, bundle: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(bundle, tmp_path / "broken")
    rewrite(broken, "tail/saved_model.pb", b"\xff" * 64)
    (tmp_path / "model.keras").write_bytes(b"PK")
    found = document("verify", broken, "--model", tmp_path / "model.keras", exit_code=1)
    tail, model = found["problems"]
    assert "TensorFlow cannot load the tail" in tail
    assert "model.keras is damaged" in model
    assert found["runtimes"]["litert"]["ok"]
    assert found["max_abs_error"] is None


def test_a_model_that_takes_its_process_along_is_told(bundle: Path) -> None:
    found = verify(Bundle.open(bundle), ends_with_the_process, None, classifier=False)
    assert "SIGKILL" in found.model_error
    assert found.runtimes["litert"].error == found.tail_error == ""


def test_data_that_the_input_cannot_hold_are_told(error: Told, bundle: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "far.npz", picture=np.full((2, 8, 8, 1), 1e300))
    message = error("verify", bundle, "--data", tmp_path / "far.npz")
    assert "far.npz: samples for the bundle" in message
    assert "expected float32, got float64 from 1e+300 to 1e+300" in message


@pytest.mark.parametrize("phase", ["running the head", "running the tail"])
def test_ctrl_c_ends_all_and_leaves_nothing_behind(bundle: Path, home: Path, tmp_path: Path, phase: str) -> None:
    # As in a terminal: a shell has what it runs in the background ignore the signal.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from cloud_server.cli import main; main()"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", program, "verify", bundle, "--home", home],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert process.stderr is not None
    while phase not in process.stderr.readline():
        assert process.poll() is None
    # A terminal sends it to the whole group.
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert list(scratch.iterdir()) == []
    _wait_until_gone(process.pid)


def _wait_until_gone(group: int) -> None:
    """Wait for the last process of a group to end."""
    for _ in range(600):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"processes of the group {group} are still there")
