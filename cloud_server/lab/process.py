"""A child process of the lab: it dies with its parent, logs to a file, and is stopped in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

CONFINE = Path(__file__).with_name("confine.py")
LOG_LINES = 12


class Child:
    """One process. Start it from a thread that lives as long as it should: it dies with the *thread* that made it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path | None,
        confine: Sequence[str] = (),
        parent_death_signal: signal.Signals = signal.SIGKILL,
    ) -> None:
        """Start ``command``. ``confine``: more options of :mod:`cloud_server.lab.confine`.

        Its output goes to ``log_path``, else to our stderr.
        """
        self.log_path = log_path
        wrapped = [sys.executable, "-I", "-S", str(CONFINE), "--parent", str(os.getpid())]
        wrapped += ["--signal", str(int(parent_death_signal)), *confine, "--", *command]
        output = (
            sys.stderr.fileno() if log_path is None else os.open(log_path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        )
        try:
            # A session of its own: Ctrl-C in the terminal reaches the lab alone, which stops its devices in order.
            self._process = subprocess.Popen(
                wrapped, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        finally:
            if log_path is not None:
                os.close(output)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> str | None:
        """How it ended, in words; ``None`` while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def last_lines(self) -> str:
        """The end of its log."""
        if self.log_path is None:
            return ""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ends within ``timeout_s``."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def stop_all(children: Iterable[Child], *, grace_s: float) -> list[Child]:
    """SIGTERM to all, and SIGKILL to those that still run after ``grace_s``; these are returned."""
    children = list(children)
    for child in children:
        child.send(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    late = [child for child in children if not child.wait(max(deadline - time.monotonic(), 0.0))]
    for child in late:
        child.send(signal.SIGKILL)
    for child in late:
        child.wait(grace_s)
    return late
