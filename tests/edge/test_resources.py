"""What a machine has, as limits leave it: read from made-up /proc and /sys trees, and under a real rlimit."""

import json
import os
import platform
import resource
import subprocess
import sys

import pytest

from edge_sdk.resources import Machine, detect

MIB = 2**20
MEMINFO = "MemTotal:        1048576 kB\nMemFree:          100000 kB\nMemAvailable:     524288 kB\n"
V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
)


@pytest.fixture
def machine(tmp_path):
    """Build a machine of 1 GiB, 512 MiB of it available, with these further files."""

    def build(files):
        for name, text in {"proc/meminfo": MEMINFO, "proc/self/status": "VmData:\t  1024 kB\n", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Machine(root=tmp_path)

    return build


def test_without_limits_it_is_the_machine(machine):
    bare = machine({})
    assert bare.ram_bytes() == 1024 * MIB
    assert bare.ram_available_bytes() == 512 * MIB
    assert bare.cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("place", ["device", ""])
def test_version_2(machine, place):
    folder = f"sys/fs/cgroup/lab/{place}"
    limited = machine(
        {
            "proc/self/cgroup": "0::/lab/device\n",
            "proc/self/mountinfo": V2_MOUNT,
            f"{folder}/memory.max": f"{256 * MIB}\n",
            f"{folder}/memory.current": f"{100 * MIB}\n",
            f"{folder}/memory.stat": f"anon 5\ninactive_file {30 * MIB}\n",
            f"{folder}/cpu.max": "50000 100000\n",
        }
    )
    assert limited.ram_bytes() == 256 * MIB
    assert limited.ram_available_bytes() == 186 * MIB
    assert limited.cores() == 1


def test_version_2_without_limits(machine):
    free = machine(
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/memory.current": "1000\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
        }
    )
    assert free.ram_bytes() == 1024 * MIB
    assert free.cores() == len(os.sched_getaffinity(0))


def test_version_1(machine):
    limited = machine(
        {
            "proc/self/cgroup": "4:memory:/lab/device\n2:cpu,cpuacct:/lab\n1:name=systemd:/\n0::/\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
            "sys/fs/cgroup/memory/lab/device/memory.limit_in_bytes": f"{128 * MIB}\n",
            "sys/fs/cgroup/memory/lab/device/memory.usage_in_bytes": f"{40 * MIB}\n",
            "sys/fs/cgroup/memory/lab/device/memory.stat": f"cache 7\ntotal_inactive_file {8 * MIB}\n",
            "sys/fs/cgroup/cpu,cpuacct/lab/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/lab/cpu.cfs_period_us": "100000\n",
        }
    )
    assert limited.ram_bytes() == 128 * MIB
    assert limited.ram_available_bytes() == 96 * MIB
    assert limited.cores() == 1


def test_within_a_container_only_a_part_of_the_tree_is_mounted(machine):
    inside = machine(
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n",
            "proc/self/mountinfo": V1_MOUNTS.replace(" / /sys", " /docker/abc /sys"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{64 * MIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{60 * MIB}\n",
        }
    )
    assert inside.ram_bytes() == 64 * MIB
    assert inside.ram_available_bytes() == 4 * MIB


def test_a_limit_that_is_used_up_leaves_nothing(machine):
    full = machine(
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": "1000\n",
            "sys/fs/cgroup/memory.current": "2000\n",
        }
    )
    assert full.ram_available_bytes() == 0


def _detect_in(code):
    script = (
        f"import json, resource, os; {code}; from edge_sdk.resources import detect; print(json.dumps(vars(detect())))"
    )
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    return json.loads(output)


def test_rlimit_data_counts_as_ram():
    limit = 200 * MIB
    found = _detect_in(f"resource.setrlimit(resource.RLIMIT_DATA, ({limit}, {limit}))")
    assert found["ram_bytes"] == limit
    assert 0 < found["ram_available_bytes"] < limit


def test_affinity_counts_as_cores():
    found = _detect_in("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})")
    assert found["cores"] == 1


def test_this_machine():
    found = detect()
    assert found.ram_bytes >= found.ram_available_bytes > 0
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.architecture == platform.machine()
    assert found.python == platform.python_version()
    assert found.runtimes
    data_limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    assert data_limit in (resource.RLIM_INFINITY, max(data_limit, found.ram_bytes))
