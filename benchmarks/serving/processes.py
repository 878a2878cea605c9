"""A server with all processes that it starts: bound to cores, stopped while others are measured, accounted together.

They are known by a mark in their environment, which children inherit however they are started. A process that is
started, and one that detached itself, counts alike.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

MARK = "SPLITFLEET_BENCHMARK_SYSTEM"
_END_S = 15.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """In bytes. ``rss`` counts a page for each process that has it, ``pss`` once."""

    rss: int
    pss: int


class Processes:
    """What ``command`` starts. A context manager: nothing is left at its end."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        cores: frozenset[int],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.cores = cores
        self.log = log
        self._name = " ".join(map(str, command))
        self._mark = f"{MARK}={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **(environment or {}), name: value},
                # Its children are made by it, and so bound as it is.
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
                start_new_session=True,
            )

    def require_alive(self) -> None:
        """Raises :class:`RuntimeError` with the end of the log when it ended."""
        if self.process.poll() is not None:
            text = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{self._name} ended with {self.process.returncode}:\n{text}")

    def pids(self) -> list[int]:
        """Of all processes that are there, oldest first."""
        mark = self._mark.encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                # It may have ended, or be about to.
                with suppress(OSError):
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return sorted(found)

    def require_bound(self) -> None:
        """Raises :class:`RuntimeError` when any thread may run on other cores than it was told to."""
        for pid in self.pids():
            for thread in _threads(pid):
                with suppress(ProcessLookupError):
                    if not os.sched_getaffinity(thread) <= self.cores:
                        raise RuntimeError(
                            f"{self._name}: thread {thread} of process {pid} may run on cores "
                            f"{sorted(os.sched_getaffinity(thread))}, not only on {sorted(self.cores)}"
                        )

    def cpu_s(self) -> float:
        """CPU time so far, with that of children which ended."""
        total = 0
        for pid in self.pids():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                # utime, stime, and those of children that were waited for.
                total += sum(int(field) for field in fields[11:15])
        return total / _TICKS_PER_S

    def memory(self) -> Memory:
        rss = pss = 0
        for pid in self.pids():
            with suppress(OSError):
                rss += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        pss += int(line.split()[1]) * 1024
        return Memory(rss=rss, pss=pss)

    def stop(self) -> None:
        """No process runs on until :meth:`go_on`."""
        self._signal(signal.SIGSTOP, self.pids())

    def go_on(self) -> None:
        # Children first: else a parent could miss a sign of life that a child had no chance to give.
        self._signal(signal.SIGCONT, reversed(self.pids()))

    def _signal(self, number: signal.Signals, pids: Iterator[int] | Sequence[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """Ask it to end, and make those end that do not."""
        self.go_on()
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        end = time.monotonic() + 3.0
        while (pids := self.pids()) and time.monotonic() < end:
            time.sleep(0.05)
        while pids:
            self._signal(signal.SIGKILL, pids)
            time.sleep(0.05)
            pids = self.pids()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def machine_cpu_s() -> float:
    """CPU time that all processes of this machine together have taken so far."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / _TICKS_PER_S


def _threads(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    return []
