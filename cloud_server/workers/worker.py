"""One worker as the server knows it: started, told to load and unload, watched, and started again when it dies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from cloud_server.loop import Loop
from cloud_server.tail_signature import TailSignature
from cloud_server.workers.frames import Kind, error_of, pack, unpack
from cloud_server.workers.launch import Launch, Running
from cloud_server.workers.line import Line
from cloud_server.workers.stream import Stream, stream_pair
from edge_sdk.errors import SplitfleetError, TailFailedError

_LOG = logging.getLogger(__name__)
_ENDS_WITHIN_S = 0.5
# With the race of its engines, and TensorFlow's start before, on a machine that is busy.
_LOADS_WITHIN_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """A worker that died is started again after ``first_s``, and each time it dies after twice as long, up to
    ``most_s``; one that lived for ``stable_s`` begins anew.
    """

    first_s: float = 0.1
    most_s: float = 10.0
    stable_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A tail that a worker has loaded, warm: its id there, the name of its engine and why it is this one, and the line
    to it.
    """

    id: int
    engine: str
    reason: str
    line: Line


def death(who: object, ending: str, amid: str) -> TailFailedError:
    """What becomes of that which a worker was at when it died; ``details["died"]`` tells it from other failures."""
    return TailFailedError(f"{who} {ending}; it {amid}", died=True)


class Worker:
    """Worker ``number``. ``on_up`` is called when it can load, ``on_down`` with the reason when it died."""

    def __init__(
        self,
        number: int,
        *,
        loop: Loop,
        launch: Launch,
        backoff: Backoff,
        on_up: Callable[[Worker], None],
        on_down: Callable[[Worker, str], None],
    ) -> None:
        self.number = number
        self.up = False
        # Why it is not, once it died.
        self.ailment: str | None = None
        self.restarts = 0
        # As it said when it loaded or unloaded something last.
        self.reported_bytes = 0
        self._loop = loop
        self._launch = launch
        self._backoff = backoff
        self._backoff_s = backoff.first_s
        self._on_up = on_up
        self._on_down = on_down
        self._running: Running | None = None
        self._control: Stream | None = None
        self._started_at = 0.0
        self._kill_reason: str | None = None
        self._warned = False
        self._ids = count(1)
        self._lines: dict[int, Line] = {}
        self._loading: dict[int, Callable[[Loaded | SplitfleetError], None]] = {}
        self._unloading: dict[int, Callable[[], None]] = {}
        self._closed = False

    def __str__(self) -> str:
        return f"worker {self.number}"

    def rss_bytes(self) -> int:
        """Its memory right now, else as it said last. May be asked from any thread."""
        running = self._running
        now = None if running is None else running.rss_bytes()
        return self.reported_bytes if now is None else now

    def start(self) -> None:
        """Start its process."""
        if self._closed:
            return
        ours, theirs = stream_pair()
        self._kill_reason = None
        self._warned = False
        self.reported_bytes = 0
        self._started_at = self._loop.clock()
        try:
            with theirs:
                self._running = self._launch(self.number, theirs, lambda: self.kill("made no heartbeat"))
        except OSError as error:
            ours.close()
            self.ailment = f"cannot be started ({error.strerror})"
            self._start_again()
            return
        self._control = Stream(
            self._loop, ours, on_frame=self._came, on_lost=lambda: self._end_is_near("closed its connection")
        )
        self._loop.watch(self._running.descriptor, self._look)

    @property
    def unloading(self) -> bool:
        """Whether a tail is about to give its memory back."""
        return bool(self._unloading)

    def load(self, path: Path, signature: TailSignature, done: Callable[[Loaded | SplitfleetError], None]) -> None:
        """Have one that is up load the tail of the bundle in ``path``; ``done`` gets it, or why there is none."""
        assert self._control is not None
        tail = next(self._ids)
        ours, theirs = stream_pair()
        self._lines[tail] = Line(self._loop, ours, signature, on_lost=lambda: self._line_lost(tail))
        timer = self._loop.call_later(
            _LOADS_WITHIN_S, lambda: self.kill(f"was loading a tail for {_LOADS_WITHIN_S:g} s and more")
        )

        def loaded(outcome: Loaded | SplitfleetError) -> None:
            timer.cancel()
            done(outcome)

        self._loading[tail] = loaded
        with theirs:
            self._control.send(pack(Kind.LOAD, {"tail": tail, "path": str(path)}), descriptor=theirs.fileno())

    def unload(self, tail: int, done: Callable[[], None]) -> None:
        """Unload a tail, of which nothing is under way; ``done`` is called when its memory was given back."""
        assert self._control is not None
        self._lines.pop(tail).close()
        self._unloading[tail] = done
        self._control.send(pack(Kind.UNLOAD, {"tail": tail}))

    def kill(self, reason: str) -> None:
        """Have it end at once, since it ``reason``; what follows is as if it had died."""
        if self._running is not None and self._kill_reason is None:
            self._kill_reason = reason
            self._running.kill()

    def warn_once(self, of: str) -> None:
        """Log what it does, unless it was warned of already since it was started."""
        if not self._warned:
            self._warned = True
            _LOG.warning("%s %s", self, of)

    def close(self) -> None:
        """Have it end, and not be started again; :meth:`join` waits for that."""
        self._closed = True
        self.up = False
        for line in self._lines.values():
            line.close()
        if self._control is not None:
            self._control.close()

    def join(self, timeout_s: float) -> None:
        """Wait for its end after :meth:`close`; it is killed when its time is over."""
        running, self._running = self._running, None
        if running is None:
            return
        if not running.wait(timeout_s):
            running.kill()
            running.wait(timeout_s)
        self._loop.unwatch(running.descriptor)
        running.close()

    def _line_lost(self, tail: int) -> None:
        # What it cannot load it lets go, and says why.
        if tail not in self._loading:
            self._end_is_near("closed the line of a tail")

    def _end_is_near(self, reason: str) -> None:
        # The sockets of a process that dies are closed before it has ended, and why it did is told only then.
        running = self._running

        def kill() -> None:
            if self._running is running:
                self.kill(reason)

        self._loop.call_later(_ENDS_WITHIN_S, kill)

    def _came(self, kind: int, _: int, payload: memoryview, __: float) -> None:
        body = unpack(payload)
        self.reported_bytes = body.get("rss_bytes") or self.reported_bytes
        if kind == Kind.HELLO:
            self.up = True
            self.ailment = None
            self._on_up(self)
        elif kind == Kind.LOADED:
            tail = body["tail"]
            done = self._loading.pop(tail)
            if "error" in body:
                self._lines.pop(tail).close()
                if "traceback" in body["error"]:
                    _LOG.warning("%s could not load a tail:\n%s", self, body["error"]["traceback"])
                done(error_of(body["error"]))
            else:
                done(Loaded(id=tail, engine=body["engine"], reason=body["reason"], line=self._lines[tail]))
        elif kind == Kind.UNLOADED:
            self._unloading.pop(body["tail"])()

    def _look(self, _: int) -> None:
        running = self._running
        ending = None if running is None else running.ending()
        if running is None or ending is None:
            return
        if self._kill_reason is not None:
            ending = f"{self._kill_reason}, so it was ended"
        self._running = None
        self.up = False
        self.ailment = ending
        self._loop.unwatch(running.descriptor)
        running.close()
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        if self._control is not None:
            self._control.close()
        self._start_again()
        loading, self._loading = self._loading, {}
        unloading, self._unloading = self._unloading, {}
        self._on_down(self, ending)
        for failed in loading.values():
            failed(death(self, ending, "was loading this tail"))
        for unloaded in unloading.values():
            unloaded()

    def _start_again(self) -> None:
        if self._loop.clock() - self._started_at >= self._backoff.stable_s:
            self._backoff_s = self._backoff.first_s
        _LOG.error("%s %s; it is started again in %.1f s", self, self.ailment, self._backoff_s)
        self.restarts += 1
        self._loop.call_later(self._backoff_s, self.start)
        self._backoff_s = min(2 * self._backoff_s, self._backoff.most_s)
