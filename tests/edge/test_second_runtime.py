"""The SDK's tests once more under tflite-runtime, which needs numpy 1 and so a venv of its own.

The venv is kept outside the tree, keyed by what is in it, and used again. It has no TensorFlow: the bundles come from
this run.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REQUIREMENTS = [
    "tflite-runtime==2.14.0",
    "numpy<2",
    "click>=8.5",
    "msgpack>=1.0.8",
    "pyzmq>=26",
    "pytest>=8.2",
    "pytest-timeout>=2.3",
]
TESTS = [
    "test_quantization.py",
    "test_runtime.py",
    "test_head.py",
    "test_client.py",
    "test_agent.py",
    "test_memory.py",
]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def _python_of_the_venv() -> Path:
    key = hashlib.sha256(repr((sys.version_info[:3], sys.base_prefix, REQUIREMENTS)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "splitfleet-tests"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"tflite-runtime-{key}"
    complete = folder / "complete"
    # Several test runs may come here at once.
    with (cache / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            venv.create(folder, clear=True, with_pip=True)
            install = [folder / "bin/python", "-m", "pip", "install", "--quiet", *REQUIREMENTS]
            done = subprocess.run(install, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            complete.touch()
    return folder / "bin/python"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="tflite-runtime has wheels up to Python 3.11 only")
@pytest.mark.timeout(600)
def test_the_sdk_under_tflite_runtime(prebuilt_bundles, tmp_path):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "SPLITFLEET_RUNTIME", "VIRTUAL_ENV")
    }
    command = [
        *(_python_of_the_venv(), "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("--basetemp", tmp_path / "basetemp", "-c", ROOT / "pyproject.toml"),
        *(HERE / name for name in TESTS),
    ]
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "SPLITFLEET_TEST_BUNDLES": str(prebuilt_bundles)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary
