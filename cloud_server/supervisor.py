"""The process over the server's: it starts it anew when it dies, caps its memory, and passes signals on.

Whatever a peer can do to the process that owns the ROUTER, such as a message that never ends and that libzmq gathers
unseen, ends at most that process: it comes back where it was, and peers connect to it again. The supervisor itself
talks to nobody. It forks, so it must have no threads and have imported nothing that makes some.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from edge_sdk.errors import ConfigError, SplitfleetError
from edge_sdk.sizes import format_size

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 15.0
# A server that ran for so long has nothing to do with why the one before it died.
STABLE_AFTER_S = 60.0
# After a second signal, for a process that is stuck where no handler runs.
LEAVE_WITHIN_S = 2.0
# A peer on the same machine sends a few hundred MB meanwhile.
LOOK_EVERY_S = 0.1
_PR_SET_PDEATHSIG = 1
_STOPPING = frozenset((signal.SIGTERM, signal.SIGINT))
_HEEDED = _STOPPING | {signal.SIGCHLD}

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a server keeps when its process is another one: where it listens, also over HTTP, and whether the allocation
    beside it has ended.
    """

    endpoint: str
    http: str | None = None
    allocated: bool = False


class Post:
    """What the server's process has from its supervisor: the ``standing`` of the one before it, ``None`` for the first.

    Its own is to be told by :meth:`tell`, once it serves and when it changes; until then the server counts as not
    started. ``pid`` is whom to send signals to.
    """

    def __init__(self, standing: Standing | None, pid: int, descriptor: int) -> None:
        self.standing = standing
        self.pid = pid
        self._descriptor = descriptor

    def tell(self, standing: Standing) -> None:
        """May be called from any thread."""
        self.standing = standing
        os.write(self._descriptor, json.dumps(asdict(standing)).encode() + b"\n")

    def tell_allocated(self) -> None:
        """The allocation beside the server has ended: another process need not begin it again."""
        if self.standing is not None:
            self.tell(replace(self.standing, allocated=True))


class Supervisor:
    """Runs ``serve`` in a child process, again and again, until it ends as it was told to.

    ``memory_cap_bytes``: of memory of its own (resident or swapped out) that the process may use, without its children.
    """

    def __init__(self, serve: Callable[[Post], None], *, memory_cap_bytes: int) -> None:
        self._serve = serve
        self._cap_bytes = memory_cap_bytes
        self._standing: Standing | None = None
        self._signals: list[int] = []
        self._kill_at: float | None = None

    def run(self) -> int:
        """The exit code of the command, once the server has stopped. A start that fails is final, a server that dies
        later is started again.

        Returns in the child process, too, when ``serve`` has; what that raises goes up there. Raises
        :class:`SplitfleetError` for a server that was killed before it served.
        """
        # Whoever started us may have had it ignored, and then nobody can be waited for.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEEDED)
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                child = _Child(self._standing)
                if child.pid == 0:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    self._serve(child.become())
                    return 0
                began_at = time.monotonic()
                excess_bytes = self._watch(child)
                code = child.exit_code
                self._standing = child.standing
                if self._kill_at is not None and code == -signal.SIGKILL:
                    return 128 + self._signals[-1]
                if self._signals or code == 0:
                    return code if code >= 0 else 128 - code
                if self._standing is None:
                    if code > 0:
                        return code
                    raise self._not_started(code, excess_bytes)
                if time.monotonic() - began_at >= STABLE_AFTER_S:
                    pause_s = FIRST_PAUSE_S
                _LOG.error("%s; it is started again in %g s", self._cause(code, excess_bytes), pause_s)
                if self._pause(pause_s):
                    return 0
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _watch(self, child: _Child) -> int | None:
        """Wait for the end; what it used when that was more than it may, in bytes."""
        excess_bytes: int | None = None
        while not child.has_ended():
            got = signal.sigtimedwait(_HEEDED, LOOK_EVERY_S)
            if got is not None and got.si_signo in _STOPPING:
                self._signals.append(got.si_signo)
                child.send(got.si_signo)
                if len(self._signals) == 2:
                    self._kill_at = time.monotonic() + LEAVE_WITHIN_S
            used_bytes = child.own_memory_bytes()
            if used_bytes > self._cap_bytes and excess_bytes is None:
                excess_bytes = used_bytes
                child.send(signal.SIGKILL)
            elif self._kill_at is not None and time.monotonic() >= self._kill_at:
                child.send(signal.SIGKILL)
        return excess_bytes

    def _pause(self, pause_s: float) -> bool:
        """Whether it is told to stop meanwhile."""
        return signal.sigtimedwait(_STOPPING, pause_s) is not None

    def _cause(self, code: int, excess_bytes: int | None) -> str:
        if excess_bytes is not None:
            return (
                f"the server used {format_size(excess_bytes)} of memory, more than --memory-cap "
                f"{format_size(self._cap_bytes)}, and was killed: a peer may have sent a message without end"
            )
        if code < 0:
            return f"the server was killed by {signal.Signals(-code).name}"
        return f"the server ended with exit code {code}"

    def _not_started(self, code: int, excess_bytes: int | None) -> SplitfleetError:
        if excess_bytes is not None:
            return ConfigError(
                f"the server needs more than --memory-cap {format_size(self._cap_bytes)} to start: it used "
                f"{format_size(excess_bytes)}"
            )
        return SplitfleetError(f"{self._cause(code, None)} before it served")


class _Child:
    """A process of the server, seen from both sides: ``pid`` is 0 in the process itself."""

    def __init__(self, standing: Standing | None) -> None:
        self.standing = standing
        self.exit_code = 0
        self._told = b""
        self._supervisor = os.getpid()
        self._reading, self._writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            os.close(self._writing)
            os.set_blocking(self._reading, False)
            self._status = Path(f"/proc/{self.pid}/status")

    def become(self) -> Post:
        """In the process itself: be tied to the supervisor, and to nothing else of it."""
        os.close(self._reading)
        # Else Ctrl-C reaches it from the terminal and from the supervisor, and two signals mean something else.
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._supervisor:
            os._exit(1)
        return Post(self.standing, self._supervisor, self._writing)

    def has_ended(self) -> bool:
        """Whether it has, which leaves ``exit_code``, negative for a signal; takes in what it tells."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        self._take_in()
        if pid:
            self.exit_code = os.waitstatus_to_exitcode(status)
            os.close(self._reading)
        return bool(pid)

    def send(self, number: int) -> None:
        """To be called only while it has not ended: its number is its own as long as nobody waited for it."""
        os.kill(self.pid, number)

    def own_memory_bytes(self) -> int:
        """Memory that is in use and no file's, swapped out or not."""
        own = 0
        for line in self._status.read_bytes().splitlines():
            if line.startswith((b"RssAnon:", b"VmSwap:")):
                own += 1024 * int(line.split()[1])
        return own

    def _take_in(self) -> None:
        try:
            while data := os.read(self._reading, 64 * 1024):
                self._told += data
        except BlockingIOError:
            pass
        *lines, self._told = self._told.split(b"\n")
        if lines:
            self.standing = Standing(**json.loads(lines[-1]))
