"""Which runtime runs a head, and what is said when none can."""

import subprocess
import sys

import numpy as np
import pytest

from edge_sdk import runtime as module
from edge_sdk.errors import BundleError, RuntimeUnavailableError
from edge_sdk.runtime import RUNTIMES, Interpreter, choose_runtime, usable_runtimes


@pytest.fixture
def installed(monkeypatch):
    """Pretend that these versions of the runtimes are installed, beside a version of numpy."""

    def pretend(numpy_version, **versions):
        names = {name.replace("-", "_"): name for name in RUNTIMES}
        by_name = {names[key]: version for key, version in versions.items()}
        monkeypatch.setattr(module, "_version", by_name.get)
        monkeypatch.setattr(np, "__version__", numpy_version)
        monkeypatch.delenv("SPLITFLEET_RUNTIME", raising=False)

    return pretend


def test_litert_comes_first(installed):
    installed("1.26.4", litert="2.3.0", tflite_runtime="2.14.0")
    assert list(usable_runtimes()) == ["litert", "tflite-runtime"]
    assert choose_runtime() == "litert"
    assert choose_runtime("tflite-runtime") == "tflite-runtime"


def test_the_environment_can_name_one(installed, monkeypatch):
    installed("1.26.4", litert="2.3.0", tflite_runtime="2.14.0")
    monkeypatch.setenv("SPLITFLEET_RUNTIME", "tflite-runtime")
    assert choose_runtime() == "tflite-runtime"
    assert choose_runtime("litert") == "litert"


def test_tflite_runtime_beside_numpy_2_is_not_usable(installed):
    installed("2.4.0", tflite_runtime="2.14.0")
    assert usable_runtimes() == {}
    for name in (None, "tflite-runtime"):
        with pytest.raises(
            RuntimeUnavailableError, match=r"needs numpy 1, numpy 2\.4\.0 is installed: pip install 'numpy<2'"
        ):
            choose_runtime(name)


def test_none_installed(installed):
    installed("2.4.0")
    with pytest.raises(RuntimeUnavailableError, match="pip install ai-edge-litert"):
        choose_runtime()
    with pytest.raises(RuntimeUnavailableError, match=r"pip install 'splitfleet\[tflite-runtime\]'"):
        choose_runtime("tflite-runtime")


def test_an_unknown_name(installed):
    installed("2.4.0", litert="2.3.0")
    with pytest.raises(
        RuntimeUnavailableError, match="'torch' is no TFLite runtime; expected one of litert, tflite-runtime"
    ):
        choose_runtime("torch")


def test_listing_runtimes_imports_none():
    code = (
        "import sys; from edge_sdk.runtime import usable_runtimes; assert usable_runtimes();"
        "assert not [m for m in sys.modules if m.startswith(('ai_edge_litert', 'tflite_runtime'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_signature_maps_keys_to_tensors(prebuilt_bundles):
    interpreter = Interpreter(prebuilt_bundles / "split" / "head.tflite")
    assert interpreter.runtime == choose_runtime()
    assert {key: info.shape for key, info in interpreter.inputs.items()} == {"input_0": (1, 8, 8, 1)}
    assert {key: info.shape for key, info in interpreter.outputs.items()} == {
        "feature_0": (1, 4, 4, 4),
        "output_1": (1, 3),
    }
    assert all(info.scale and info.zero_point is not None for info in interpreter.inputs.values())


def test_a_wrong_array_is_told_by_the_interpreter(prebuilt_bundles):
    interpreter = Interpreter(prebuilt_bundles / "split" / "head.tflite")
    with pytest.raises(RuntimeUnavailableError, match="failed to run it"):
        interpreter.run({"input_0": np.zeros((1, 8, 8, 1), np.float32)})


def test_a_missing_file(tmp_path):
    with pytest.raises(RuntimeUnavailableError, match="cannot load it"):
        Interpreter(tmp_path / "none.tflite")


# The runtimes' own Delegate object complains when it is taken down half made.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_missing_delegate(prebuilt_bundles):
    with pytest.raises(RuntimeUnavailableError, match=r"cannot load it.*libnone"):
        Interpreter(prebuilt_bundles / "split" / "head.tflite", delegate="libnone.so")


def test_a_head_without_the_signature(prebuilt_bundles, monkeypatch):
    monkeypatch.setattr(module, "SIGNATURE", "another")
    with pytest.raises(BundleError, match="no signature 'another'"):
        Interpreter(prebuilt_bundles / "split" / "head.tflite")


def test_nothing_is_announced_and_nothing_else_is_lost(prebuilt_bundles):
    """The runtime writes a line about itself to stderr, past Python, with the first file that it loads."""
    code = (
        "import os, sys; from pathlib import Path; from edge_sdk import runtime\n"
        "allocate = runtime.Interpreter._allocate\n"
        "def talkative(self):\n    allocate(self)\n    os.write(2, b'ERROR: of another\\n')\n"
        "runtime.Interpreter._allocate = talkative\n"
        "for _ in range(2):\n    runtime.Interpreter(Path(sys.argv[1]))\n"
        "print('after', file=sys.stderr)"
    )
    path = prebuilt_bundles / "split" / "head.tflite"
    ended = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert ended.stderr.splitlines() == ["ERROR: of another", "ERROR: of another", "after"]


def test_a_process_without_stderr_loads_all_the_same(prebuilt_bundles):
    code = (
        "import os, sys; from pathlib import Path; from edge_sdk.runtime import Interpreter\n"
        "os.close(2); Interpreter(Path(sys.argv[1])); print('loaded')"
    )
    path = prebuilt_bundles / "split" / "head.tflite"
    ended = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert ended.stdout == "loaded\n"
