"""Starting worker processes, and knowing how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import zmq

from cloud_server.loop import Loop
from cloud_server.workers.memory import rss_of
from cloud_server.workers.pulse import Pulse, PulseLimits
from converters.scratch import Scratch

if TYPE_CHECKING:
    from cloud_server.engines.choice import EngineChoice

_LAST_LINES = 20
_READ_BYTES = 1 << 16


class Running(Protocol):
    """A worker that was started. :attr:`descriptor` is ready for reading once it has ended."""

    descriptor: int

    def ending(self) -> str | None:
        """How it ended, in words that follow "the worker"; ``None`` while it runs."""

    def rss_bytes(self) -> int | None:
        """What it has of the memory right now, where that can be told. May be asked from any thread."""

    def kill(self) -> None:
        """Have it end at once."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it ends within ``timeout_s``."""

    def close(self) -> None:
        """Let go of what was needed to watch it; it has ended."""


# The worker's number, its end of the control connection, and whom to tell when it makes no heartbeat.
Launch = Callable[[int, socket.socket, Callable[[], None]], Running]


class Launcher:
    """Starts worker processes; as a context manager it has what they share, from entering until leaving."""

    def __init__(
        self,
        loop: Loop,
        *,
        max_batch: int,
        engine: EngineChoice,
        results: Path,
        pulse: PulseLimits | None = None,
    ) -> None:
        """``max_batch``: the largest batch as a rule; ``results``: where it is remembered which engine won."""
        self._loop = loop
        self._options = ["--engine", engine, "--results", str(results), "--max-batch", str(max_batch)]
        self._limits = pulse or PulseLimits()
        self._scratch = Scratch()
        self._context = zmq.Context()
        self._started = count(1)

    def __call__(self, number: int, control: socket.socket, on_silence: Callable[[], None]) -> Running:
        endpoint = f"ipc://{self._scratch.path / f'{number}-{next(self._started)}'}"
        pulse = Pulse(self._loop, self._context, endpoint, self._limits, on_silence=on_silence)
        return _Process(self._loop, control, pulse, [*self._options, "--pulse", endpoint])

    def close(self) -> None:
        """To be called when all of its processes have ended."""
        self._context.destroy(0)
        self._scratch.remove()


class _Process:
    """One worker process, whose end, output and pulse are watched."""

    def __init__(self, loop: Loop, control: socket.socket, pulse: Pulse, options: Sequence[str]) -> None:
        self._loop = loop
        self._pulse = pulse
        # Nobody else may have its other end: the process lives as long as that is open.
        lifeline, self._lifeline = os.pipe()
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        descriptors = {"--control": control.fileno(), "--lifeline": lifeline}
        # Not from the working directory: whatever lies there is no module of ours.
        command = [sys.executable, "-P", "-m", "cloud_server.workers.process", *options]
        try:
            self._process = subprocess.Popen(
                [*command, *(str(each) for option in descriptors.items() for each in option)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=tuple(descriptors.values()),
            )
        finally:
            os.close(lifeline)
            os.close(output)
        self.descriptor = os.pidfd_open(self._process.pid)
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._partial = b""
        loop.watch(self._output, lambda _: self._read())

    def ending(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        self._read()
        if code >= 0:
            words = f"ended with exit code {code}"
        else:
            words = f"was ended by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                words += ", as happens when memory runs out (then lower --worker-memory, or --workers)"
        last = [line for line in self._lines if line.strip()][-1:]
        return words + "".join(f"; its last words: {line.strip()}" for line in last)

    def rss_bytes(self) -> int | None:
        return rss_of(self._process.pid)

    def kill(self) -> None:
        # Of one that was waited for nothing is sent.
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        self._pulse.close()
        self._loop.unwatch(self._output)
        for descriptor in (self._output, self._lifeline, self.descriptor):
            os.close(descriptor)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._output, _READ_BYTES):
                *lines, self._partial = (self._partial + data).split(b"\n")
                self._partial = self._partial[-_READ_BYTES:]
                self._lines.extend(line.decode(errors="replace") for line in lines)
            self._loop.unwatch(self._output)
            self._lines.append(self._partial.decode(errors="replace"))
