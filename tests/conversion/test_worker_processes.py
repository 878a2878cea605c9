"""Worker processes: where their temporary files are, that they end with their parent, and what a full disk is."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import worker_jobs

from converters.scratch import Scratch
from converters.worker import Worker
from edge_sdk.errors import ConversionError, StorageError


@pytest.fixture
def worker(tmp_path):
    worker = Worker(1, tmp_path / "work")
    yield worker
    worker.stop()


def test_temporary_files_are_gone_with_the_process(worker, tmp_path):
    left = Path(worker.run(worker_jobs.leave_files))
    assert left.is_relative_to(tmp_path / "work")
    assert left.exists()
    with pytest.raises(ConversionError, match="exit code 7"):
        worker.run(worker_jobs.die_and_leave_files)
    assert list((tmp_path / "work").iterdir()) == []
    worker.run(worker_jobs.leave_files)
    worker.stop()
    assert list((tmp_path / "work").iterdir()) == []


def test_one_whose_parent_is_killed_ends_at_once_whatever_it_is_at_and_its_files_are_swept(tmp_path):
    script = (
        "import sys; from pathlib import Path; sys.path.append(sys.argv[2])\n"
        "if __name__ == '__main__':\n"
        "    import threading, worker_jobs; from converters.worker import Worker\n"
        "    worker = Worker(1, Path(sys.argv[1]) / 'work')\n"
        "    told = sys.argv[1] + '/pid'\n"
        # From a thread, as a workshop does.
        "    threading.Thread(target=worker.run, args=(worker_jobs.hang_with_the_interpreter, told)).start()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(Path(worker_jobs.__file__).parent)],
        cwd=Path(__file__).parents[2],
    )
    try:
        while not (told := tmp_path / "pid").exists() or not told.read_text():
            assert parent.poll() is None
        process = os.pidfd_open(int(told.read_text()))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    try:
        assert select.select([process], [], [], 60)[0]
    finally:
        os.close(process)
    (left,) = (tmp_path / "work").iterdir()
    scratch = Scratch(tmp_path / "work")
    assert not left.exists()
    scratch.remove()


def test_a_sweep_leaves_what_is_in_use(tmp_path):
    first, second = Scratch(tmp_path), Scratch(tmp_path)
    assert first.path.exists()
    second.remove()
    first.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("job", [worker_jobs.full_disk, worker_jobs.full_disk_as_tensorflow_tells_it])
def test_a_full_disk_says_nothing_of_the_model(worker, job):
    with pytest.raises(StorageError, match=r"tail/variables.*|No space left on device"):
        worker.run(job)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="no folder for temporary files"):
        Worker(1, tmp_path / "file" / "work").run(worker_jobs.leave_files)
