"""What this machine has for a device to use: RAM, cores, architecture, runtimes, as limits leave it.

A limit of a memory cgroup (version 1 or 2), of ``RLIMIT_DATA`` or of a cpu quota counts as if the machine had no more.
Linux only; nothing is imported that is slow.
"""

from __future__ import annotations

import math
import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_sdk.protocol import Resources


def detect() -> Resources:
    """The resources of this machine, live."""
    # Whoever asks for the machine alone needs no numpy.
    from edge_sdk.runtime import usable_runtimes

    machine = Machine()
    return Resources(
        ram_bytes=machine.ram_bytes(),
        ram_available_bytes=machine.ram_available_bytes(),
        cores=machine.cores(),
        architecture=platform.machine(),
        runtimes=usable_runtimes(),
        python=platform.python_version(),
    )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the kernel tells of this machine, read below ``root``."""

    root: Path = Path("/")

    def ram_bytes(self) -> int:
        """RAM in all, or the smallest limit on it."""
        limits = [self._meminfo()["MemTotal"], *(limit for limit, _ in self._memory_groups())]
        data_limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        if data_limit != resource.RLIM_INFINITY:
            limits.append(data_limit)
        return min(limits)

    def ram_available_bytes(self) -> int:
        """RAM that can still be had without swapping, below every limit."""
        rooms = [self._meminfo()["MemAvailable"], *(limit - used for limit, used in self._memory_groups())]
        data_limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        if data_limit != resource.RLIM_INFINITY:
            rooms.append(data_limit - self._table("proc/self/status").get("VmData", 0))
        return max(min(rooms), 0)

    def cores(self) -> int:
        """Cores that this process may keep busy, at least 1."""
        quotas = [quota for group in self._groups("cpu") if (quota := _cpu_quota(group)) is not None]
        return max(1, math.ceil(min([len(os.sched_getaffinity(0)), *quotas])))

    def _memory_groups(self) -> Iterator[tuple[int, int]]:
        """(limit, use that cannot be reclaimed) of each memory cgroup around us that has a limit, in bytes."""
        for group in self._groups("memory"):
            for limit_name, usage_name, cache_name in (
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
                ("memory.max", "memory.current", "inactive_file"),
            ):
                limit = _number(group / limit_name)
                usage = _number(group / usage_name)
                # Version 1 says "no limit" with a number near 2⁶³.
                if limit is not None and usage is not None and limit < 2**60:
                    yield limit, max(usage - _statistic(group / "memory.stat", cache_name), 0)

    def _groups(self, controller: str) -> Iterator[Path]:
        """Folders of the cgroups that we are in for ``controller``, from ours up to the outermost one visible."""
        mounts = self._mounts()
        for line in _lines(self.root / "proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            for mount_root, mount_point, kind, options in mounts:
                fits = controller in options if kind == "cgroup" else controllers == ""
                if not fits or (kind == "cgroup") != (controllers != ""):
                    continue
                if kind == "cgroup" and controller not in controllers.split(","):
                    continue
                # Within a container the mount shows only a part of the tree, from mount_root on.
                below = path.removeprefix(mount_root.rstrip("/")) if path.startswith(mount_root) else "/"
                top = self.root / mount_point.lstrip("/")
                folder = top / below.lstrip("/")
                while folder != top and top in folder.parents:
                    yield folder
                    folder = folder.parent
                yield top

    def _mounts(self) -> list[tuple[str, str, str, list[str]]]:
        """(root, mount point, "cgroup" or "cgroup2", options) of each cgroup mount."""
        found = []
        for line in _lines(self.root / "proc/self/mountinfo"):
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            if kind in ("cgroup", "cgroup2"):
                fields = before.split(" ")
                found.append((fields[3], fields[4], kind, options.split(",")))
        return found

    def _meminfo(self) -> dict[str, int]:
        return self._table("proc/meminfo")

    def _table(self, name: str) -> dict[str, int]:
        """The lines ``Name:  123 kB`` of a file, in bytes."""
        table = {}
        for line in _lines(self.root / name):
            key, _, value = line.partition(":")
            fields = value.split()
            if len(fields) == 2 and fields[1] == "kB":
                table[key] = int(fields[0]) * 1024
        return table


def _cpu_quota(group: Path) -> float | None:
    quota = _number(group / "cpu.cfs_quota_us")
    period = _number(group / "cpu.cfs_period_us")
    if quota is None or period is None:
        text = next(iter(_lines(group / "cpu.max")), "max").split()
        if text[0] == "max" or len(text) != 2:
            return None
        quota, period = int(text[0]), int(text[1])
    return quota / period if quota > 0 and period > 0 else None


def _statistic(path: Path, name: str) -> int:
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "")
    return int(text) if text.lstrip("-").isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
