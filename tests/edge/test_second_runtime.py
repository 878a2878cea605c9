"""The SDK's tests once more under tflite-runtime, which needs numpy 1 and so a venv of its own.

The venv has no TensorFlow: the bundles come from this run.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from tflite_runtime_venv import ROOT, environment_of_the_venv, python_of_the_venv

TESTS = [
    "test_quantization.py",
    "test_runtime.py",
    "test_head.py",
    "test_client.py",
    "test_agent.py",
    "test_memory.py",
]
HERE = Path(__file__).parent


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="tflite-runtime has wheels up to Python 3.11 only")
@pytest.mark.timeout(600)
def test_the_sdk_under_tflite_runtime(prebuilt_bundles, tmp_path):
    command = [
        *(python_of_the_venv(), "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("--basetemp", tmp_path / "basetemp", "-c", ROOT / "pyproject.toml"),
        *(HERE / name for name in TESTS),
    ]
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=environment_of_the_venv() | {"SPLITFLEET_TEST_BUNDLES": str(prebuilt_bundles)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary
