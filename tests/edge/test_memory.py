"""Measured memory of a head: plausible, honest under limits, and no process left behind."""

import subprocess
import sys
import threading

import pytest

from edge_sdk import memory
from edge_sdk.errors import DeadlineExceededError, DoesNotFitError, RuntimeUnavailableError
from edge_sdk.memory import measure
from edge_sdk.runtime import choose_runtime

MIB = 2**20


@pytest.fixture
def head(prebuilt_bundles):
    return prebuilt_bundles / "split" / "head.tflite"


def test_the_growth_of_a_fresh_process(head):
    measured = measure(head, runtime=choose_runtime())
    assert measured.runtime == choose_runtime()
    # Python, numpy and a runtime; a head of some kilobytes still wakes code and buffers of the runtime.
    assert 20 * MIB < measured.base_bytes < 120 * MIB
    assert 0 < measured.load_peak_bytes <= measured.first_invoke_peak_bytes <= measured.tenth_invoke_peak_bytes
    assert measured.peak_bytes == measured.tenth_invoke_peak_bytes < 30 * MIB


def test_a_passing_peak_is_seen(head, monkeypatch, tmp_path):
    """What a head takes while it loads counts, even where it gives it back."""
    program = tmp_path / "greedy.py"
    program.write_text(
        "import sys, edge_sdk.memory as memory, edge_sdk.runtime as runtime\n"
        "load = runtime.Interpreter.__init__\n"
        "def greedy(self, *args, **kwargs):\n"
        f"    data = bytearray({64 * MIB})\n"
        "    data[::4096] = b'x' * len(data[::4096])\n"
        "    del data\n"
        "    load(self, *args, **kwargs)\n"
        "runtime.Interpreter.__init__ = greedy\n"
        "memory._main()\n"
    )
    popen = subprocess.Popen

    def run_greedy(command, **options):
        return popen([sys.executable, str(program), *command[3:]], **options)

    monkeypatch.setattr(subprocess, "Popen", run_greedy)
    measured = measure(head, runtime=choose_runtime())
    assert measured.exact
    assert measured.load_peak_bytes > 60 * MIB


def test_a_head_that_is_refused(tmp_path):
    (tmp_path / "x.tflite").write_bytes(b"nonsense")
    with pytest.raises(RuntimeUnavailableError, match="cannot load it"):
        measure(tmp_path / "x.tflite", runtime=choose_runtime())


def test_too_little_memory_is_told(head):
    """Under a data limit that not even the imports respect, the process fails, and the reason is plain."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from edge_sdk.memory import measure\n"
        "from edge_sdk.errors import DoesNotFitError\n"
        "import subprocess; popen = subprocess.Popen\n"
        "limit = lambda: resource.setrlimit(resource.RLIMIT_DATA, (8 << 20, 8 << 20))\n"
        "subprocess.Popen = lambda *args, **kwargs: popen(*args, preexec_fn=limit, **kwargs)\n"
        "try:\n"
        "    measure(Path(sys.argv[1]), runtime=sys.argv[2])\n"
        "except DoesNotFitError as error:\n"
        "    print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, head, choose_runtime()], capture_output=True, text=True, check=True
    )
    assert "too little memory" in done.stdout, done.stderr


def test_a_killed_process_means_that_it_does_not_fit(head, monkeypatch):
    popen = subprocess.Popen

    def killed(command, **options):  # noqa: ARG001
        return popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], **options)

    monkeypatch.setattr(subprocess, "Popen", killed)
    with pytest.raises(DoesNotFitError, match="too little memory"):
        measure(head, runtime=choose_runtime())


def test_the_kernel_is_to_end_the_measurement_before_the_agent(tmp_path):
    code = (
        "import sys; from edge_sdk import memory\n"
        "def report(*_): raise SystemExit(open('/proc/self/oom_score_adj').read())\n"
        "memory._measure_here = report; memory._main()"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path, "x"], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "1000"


def test_it_can_be_stopped_and_has_a_limit(head, monkeypatch):
    popen = subprocess.Popen
    processes = []

    def endless(command, **options):  # noqa: ARG001
        processes.append(popen([sys.executable, "-c", "import threading; threading.Event().wait()"], **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", endless)
    stop = threading.Event()
    stop.set()
    with pytest.raises(DeadlineExceededError, match="shuts down"):
        measure(head, runtime=choose_runtime(), stop=stop)
    with pytest.raises(DeadlineExceededError, match="longer than"):
        measure(head, runtime=choose_runtime(), timeout_s=memory.POLL_S)
    assert [process.poll() for process in processes] == [-9, -9]


def test_without_a_resettable_peak_it_says_so(head, monkeypatch):
    monkeypatch.setattr(memory, "_reset_peak", lambda: False)
    measured = memory._measure_here(head, choose_runtime())
    assert not measured.exact
    assert measured.peak_bytes >= 0
