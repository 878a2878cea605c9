"""Memory limits: they hold, they are labelled, and they are taken back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloud_server.lab.limits import DataLimits, Groups, MemoryLimit, _mounts, open_limits
from cloud_server.lab.process import CONFINE

pytestmark = pytest.mark.usefixtures("no_group_is_left")

Until = Callable[[Callable[[], object]], None]
IsRunning = Callable[[int], bool]
GroupsOfLabs = Callable[[], list[Path]]
EAT = "data = bytearray(200_000_000); print('ate')"
NIBBLE = "data = bytearray(5_000_000); print('ate')"


def confined(limit: MemoryLimit, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", str(CONFINE), "--parent", str(os.getpid()), *limit.arguments]
    return subprocess.run([*command, "--", sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def can_make_groups() -> bool:
    limits = open_limits()
    limits.close()
    return isinstance(limits, Groups)


def test_the_best_limit_of_this_machine_stops_an_over_eater() -> None:
    limits = open_limits()
    try:
        limit = limits.limit("eater", 64_000_000)
        eaten = confined(limit, EAT)
        assert "ate" not in eaten.stdout
        if isinstance(limits, Groups):
            assert eaten.returncode == -signal.SIGKILL
            assert limit.times_exceeded() == 1
            assert limit.label.startswith("64 MB by a memory cgroup (v")
        else:
            assert "MemoryError" in eaten.stderr
        assert confined(limits.limit("nibbler", 64_000_000), NIBBLE).stdout == "ate\n"
    finally:
        limits.close()


def test_data_limit_refuses_memory_and_says_what_it_is() -> None:
    limits = DataLimits()
    limit = limits.limit("eater", 64_000_000)
    assert limit.label == "64 MB by RLIMIT_DATA, not RSS"
    eaten = confined(limit, EAT)
    assert (eaten.returncode, eaten.stdout) == (1, "")
    assert "MemoryError" in eaten.stderr
    assert limit.times_exceeded() == 0
    assert confined(limit, NIBBLE).stdout == "ate\n"
    limits.close()


def test_without_a_cgroup_it_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloud_server.lab.limits._mounts", lambda _: iter([(Path("/proc"), 1), (Path("/none"), 2)]))
    assert isinstance(open_limits(), DataLimits)


def test_mounts_are_found_in_the_kernels_table(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "hybrid").mkdir()
    (tmp_path / "hybrid" / "cgroup.controllers").write_text("hugetlb\n")
    table = (
        "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n"
        "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
        "cgroup /sys/fs/cgroup/a\\040memory cgroup rw,memory 0 0\n"
        f"cgroup2 {tmp_path}/hybrid cgroup2 rw 0 0\n"
        f"cgroup2 {tmp_path}/two cgroup2 rw 0 0\n"
    )
    assert list(_mounts(table)) == [(Path("/sys/fs/cgroup/a memory"), 1), (tmp_path / "two", 2)]


@pytest.fixture
def second_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plain folder in the place of a cgroup2 mount: there the files of a group go when its folder goes."""
    rmdir = Path.rmdir

    def remove_with_files(folder: Path) -> None:
        for file in folder.iterdir():
            if file.is_file():
                file.unlink()
        rmdir(folder)

    monkeypatch.setattr(Path, "rmdir", remove_with_files)
    return tmp_path


def test_second_version_of_cgroups(second_version: Path) -> None:
    limits = Groups.open(second_version, 2)
    assert (second_version / "cgroup.subtree_control").read_text() == "+memory"
    limit = limits.limit("board", 1_000_000)
    folder = next(second_version.glob("splitfleet/lab-*/device-board"))
    assert (folder / "memory.max").read_text() == "1000000"
    # A kernel without swap accounting has no such file.
    assert not (folder / "memory.swap.max").exists()
    (folder / "memory.events").write_text("low 0\nmax 7\noom 1\noom_kill 1\noom_group_kill 0\n")
    assert limit.times_exceeded() == 1
    assert limit.label == "1 MB by a memory cgroup (v2)"
    limits.close()
    assert not (second_version / "splitfleet").exists()


def test_what_a_killed_lab_left_is_removed_by_the_next_one(
    until: Until, is_running: IsRunning, groups_of_labs: GroupsOfLabs
) -> None:
    if not can_make_groups():
        # Then there is nothing that could be left.
        assert isinstance(open_limits(), DataLimits)
        return
    code = (
        "import os, subprocess, sys\n"
        "from cloud_server.lab.limits import open_limits\n"
        "limit = open_limits().limit('orphan', 64_000_000)\n"
        "child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "(limit.path / 'cgroup.procs').write_text(str(child.pid))\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    orphan = int(killed.stdout)
    try:
        assert killed.returncode == -signal.SIGKILL
        assert len(groups_of_labs()) == 1
        assert is_running(orphan)
        open_limits().close()
        assert groups_of_labs() == []
        until(lambda: not is_running(orphan))
    finally:
        if is_running(orphan):
            os.kill(orphan, signal.SIGKILL)


def test_two_labs_do_not_touch_each_other() -> None:
    first, second = open_limits(), open_limits()
    limit = first.limit("same", 64_000_000)
    second.limit("same", 64_000_000)
    second.close()
    assert confined(limit, NIBBLE).stdout == "ate\n"
    first.close()


def test_a_command_whose_lab_is_gone_does_not_start() -> None:
    command = [sys.executable, "-I", "-S", str(CONFINE), "--parent", "1", "--", "echo", "started"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "the lab is gone\n")


def test_labs_that_start_at_once_clean_up_the_same_leftovers(tmp_path: Path) -> None:
    """Whoever comes second finds groups gone that it has just seen, or the folder of all labs."""
    for _ in range(30):
        for number in range(4):
            (tmp_path / "splitfleet" / f"lab-{2**22 + number}-1-0" / "device-a").mkdir(parents=True)
        with ThreadPoolExecutor(4) as pool:
            labs = list(pool.map(lambda _: Groups.open(tmp_path, 1), range(4)))
            assert [path.name for path in (tmp_path / "splitfleet").glob(f"lab-{2**22}*")] == []
            list(pool.map(Groups.close, labs))
    assert not (tmp_path / "splitfleet").exists()


def test_a_device_may_be_called_as_a_file_of_the_kernel(tmp_path: Path) -> None:
    limits = Groups.open(tmp_path, 1)
    (limits._folder / "cgroup.procs").touch()
    assert limits.limit("cgroup.procs", 10**6).path.is_dir()
