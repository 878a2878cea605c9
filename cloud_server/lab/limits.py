"""Memory limits of emulated devices: a memory cgroup where one can be made, else ``RLIMIT_DATA``.

Never ``RLIMIT_AS``: the TFLite runtimes reserve far more addresses than they use, and fail to start under it. A cgroup
is removed when its lab ends; those of a lab that was killed are removed by the next one. CPU speed is not limited here:
see :data:`cloud_server.lab.devices.CPU_METHOD`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from edge_sdk.errors import LabError
from edge_sdk.sizes import format_size

REMOVE_TIMEOUT_S = 5.0
FOLDER = "splitfleet"
_labs = itertools.count()


class MemoryLimit(Protocol):
    """The memory of one device. ``label`` says what is emulated and how."""

    @property
    def label(self) -> str: ...

    @property
    def arguments(self) -> list[str]:
        """Options of :mod:`cloud_server.lab.confine`."""
        ...

    def times_exceeded(self) -> int:
        """How many processes the kernel has killed for it; 0 where that cannot be told."""
        ...


class MemoryLimits(Protocol):
    """Makes the limits of one lab, and takes them back."""

    def limit(self, device_id: str, ram_bytes: int) -> MemoryLimit: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class DataLimit:
    """``RLIMIT_DATA``: bounds what a process allocates for itself, whether it is used or not."""

    ram_bytes: int

    @property
    def label(self) -> str:
        return f"{format_size(self.ram_bytes)} by RLIMIT_DATA, not RSS"

    @property
    def arguments(self) -> list[str]:
        return ["--data-bytes", str(self.ram_bytes)]

    def times_exceeded(self) -> int:
        return 0


class DataLimits:
    """Where no cgroup can be made."""

    def limit(self, device_id: str, ram_bytes: int) -> DataLimit:  # noqa: ARG002
        return DataLimit(ram_bytes=ram_bytes)

    def close(self) -> None:
        """Nothing was made that outlives its process."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """One memory cgroup; ``version`` is 1 or 2."""

    path: Path
    version: int
    ram_bytes: int

    @property
    def label(self) -> str:
        return f"{format_size(self.ram_bytes)} by a memory cgroup (v{self.version})"

    @property
    def arguments(self) -> list[str]:
        return ["--join", str(self.path)]

    def times_exceeded(self) -> int:
        events = self.path / ("memory.oom_control" if self.version == 1 else "memory.events")
        for line in events.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0


class Groups:
    """Memory cgroups under ``<mount>/splitfleet/lab-<pid>-<start>-<number>``, one a device."""

    def __init__(self, mount: Path, version: int) -> None:
        self._version = version
        self._root = mount / FOLDER
        self._folder = self._root / f"lab-{os.getpid()}-{_started(os.getpid())}-{next(_labs)}"

    @classmethod
    def open(cls, mount: Path, version: int) -> Self:
        """Remove what killed labs have left, make this lab's folder. Raises ``OSError`` where that is forbidden."""
        groups = cls(mount, version)
        for folder in sorted(groups._root.glob("lab-*-*-*")):
            pid, start = folder.name.split("-")[1:3]
            if _started(int(pid)) != start:
                _remove(folder)
        # Another lab that ends may remove the folder of all labs at any time until ours is in it.
        while True:
            groups._root.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                groups._folder.mkdir()
                break
        try:
            if version == 2:
                for parent in (mount, groups._root, groups._folder):
                    (parent / "cgroup.subtree_control").write_text("+memory")
        except OSError:
            groups.close()
            raise
        return groups

    def limit(self, device_id: str, ram_bytes: int) -> Group:
        """The group of a device, empty yet."""
        # Prefixed, since a device may be called as one of the files that the kernel puts there.
        path = self._folder / f"device-{device_id}"
        path.mkdir()
        limit, swap = {
            1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
            2: ("memory.max", "memory.swap.max"),
        }[self._version]
        (path / limit).write_text(str(ram_bytes))
        # A board without swap must not get the host's. Version 1 counts memory and swap together.
        if (path / swap).exists():
            (path / swap).write_text(str(ram_bytes if self._version == 1 else 0))
        return Group(path=path, version=self._version, ram_bytes=ram_bytes)

    def close(self) -> None:
        """Remove this lab's groups; processes that are still in them are killed."""
        _remove(self._folder)
        # Another lab may be using it.
        with contextlib.suppress(OSError):
            self._root.rmdir()


def open_limits() -> MemoryLimits:
    """The best kind of memory limit that this process may set."""
    for mount, version in _mounts(Path("/proc/self/mounts").read_text()):
        with contextlib.suppress(OSError):
            return Groups.open(mount, version)
    return DataLimits()


def _mounts(table: str) -> Iterator[tuple[Path, int]]:
    """Where memory cgroups are mounted, and of which version."""
    for line in table.splitlines():
        _, folder, kind, options, *_ = line.split()
        mount = Path(folder.replace(r"\040", " "))
        if kind == "cgroup" and "memory" in options.split(","):
            yield mount, 1
        elif kind == "cgroup2":
            with contextlib.suppress(OSError):
                if "memory" in (mount / "cgroup.controllers").read_text().split():
                    yield mount, 2


def _started(pid: int) -> str | None:
    """When a process began, in ticks since boot: a number of a process may come again, not with the same beginning."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def _remove(folder: Path) -> None:
    """Remove a lab's folder of groups; its processes belong to a lab that is gone or going.

    Two labs may clean up the same leftovers at the same time.
    """
    try:
        groups = [path for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    for group in [*groups, folder]:
        while True:
            with contextlib.suppress(OSError):
                for pid in (group / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            try:
                group.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError as error:
                # A killed process stays in its group until its memory is given back.
                if time.monotonic() > deadline:
                    raise LabError(f"{group}: the cgroup cannot be removed ({error.strerror})") from None
            time.sleep(0.01)
