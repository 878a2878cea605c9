"""One connection through a link: two sockets, and a pipe each way that brings bytes over when the link would have.

The link itself, its listener and its faults are :mod:`cloud_server.lab.proxy`'s.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

from edge_sdk.errors import ConfigError

Direction = Literal["up", "down"]

SEGMENT_BYTES = 1460
MAX_CHUNK_BYTES = 64 * 1024
# The pieces that are held back one by one: finer ones would be shorter than a sleep can be.
CHUNK_S = 0.0005
# How much the sender may be ahead of the link, as the queue of a modem would hold it.
QUEUE_S = 0.05
MIN_QUEUE_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a link leads to."""

    family: socket.AddressFamily
    address: Any

    @classmethod
    def parse(cls, endpoint: str) -> Self:
        """The target of ``tcp://host:port``. Raises :class:`ConfigError` for anything else."""
        match = re.fullmatch(r"tcp://(\[[^]]+\]|[^:/]+):(\d{1,5})", endpoint)
        if match is None or not 0 < int(match[2]) < 65536:
            raise ConfigError(
                f"{endpoint!r} is not an endpoint: expected tcp://host:port, such as tcp://127.0.0.1:5555"
            )
        try:
            found = socket.getaddrinfo(match[1].strip("[]"), int(match[2]), type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"{endpoint}: the host is not known ({error.strerror})") from None
        return cls(family=found[0][0], address=found[0][4])


class Lane:
    """One way of the link. ``free_at``: when it will have sent all that it was given, in the loop's time."""

    def __init__(self, mbit_s: float | None, delay_s: float) -> None:
        self.bytes_per_s = None if mbit_s is None else mbit_s * 1e6 / 8
        self.delay_s = delay_s
        self.free_at = 0.0
        self.passed_bytes = 0
        self.corrupt_at: int | None = None

    @property
    def chunk_bytes(self) -> int:
        if self.bytes_per_s is None:
            return MAX_CHUNK_BYTES
        return max(SEGMENT_BYTES, min(MAX_CHUNK_BYTES, int(self.bytes_per_s * CHUNK_S)))

    @property
    def queue_bytes(self) -> int:
        return max(MIN_QUEUE_BYTES, int((self.bytes_per_s or 0) * (self.delay_s + QUEUE_S)))

    def release_at(self, size_bytes: int, now: float) -> float:
        """When the last of ``size_bytes`` more comes out at the other end.

        The sum is kept in the link's own time, so a late wake-up delays one piece and does not slow the next ones.
        """
        if self.bytes_per_s is not None:
            self.free_at = max(self.free_at, now) + size_bytes / self.bytes_per_s
        return max(self.free_at, now) + self.delay_s

    def passed(self, data: bytes) -> bytes:
        """Count ``data``, and corrupt it where that was asked for."""
        first, self.passed_bytes = self.passed_bytes, self.passed_bytes + len(data)
        if self.corrupt_at is not None and first <= self.corrupt_at < self.passed_bytes:
            changed = bytearray(data)
            changed[self.corrupt_at - first] ^= 0xFF
            data, self.corrupt_at = bytes(changed), None
        return data


class Pipe:
    """One way of one connection: reads ahead of the link, writes when the link has brought it over."""

    def __init__(self, source: socket.socket, sink: socket.socket, lane: Lane) -> None:
        self.swallowing = False
        self.lost_bytes = False
        self._source = source
        self._sink = sink
        self._lane = lane
        self._queue: deque[tuple[float, bytes]] = deque()
        self._queued_bytes = 0
        self._arrived = asyncio.Event()
        self._left = asyncio.Event()

    async def read(self) -> None:
        """Take from the source until it ends."""
        loop, lane = asyncio.get_running_loop(), self._lane
        while True:
            data = await loop.sock_recv(self._source, lane.chunk_bytes)
            if self.swallowing:
                self.lost_bytes = True
                if not data:
                    return
                continue
            self._queue.append((lane.release_at(len(data), loop.time()), lane.passed(data)))
            self._queued_bytes += len(data)
            self._arrived.set()
            if not data:
                return
            ahead_s = lane.free_at - loop.time() - QUEUE_S
            if ahead_s > 0:
                await asyncio.sleep(ahead_s)
            # A sink that does not read must slow the source down too.
            while self._queued_bytes > lane.queue_bytes:
                self._left.clear()
                await self._left.wait()

    async def write(self) -> None:
        """Give to the sink, each piece at its time, and end it after the last."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            release_at, data = self._queue.popleft()
            wait_s = release_at - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if not data:
                self._sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self._sink, data)
            self._queued_bytes -= len(data)
            self._left.set()


class Connection:
    """One connection through the proxy: two sockets and a pipe each way."""

    def __init__(self, near: socket.socket, target: Target, lanes: dict[Direction, Lane]) -> None:
        self._near = near
        self._far = socket.socket(target.family, socket.SOCK_STREAM)
        self._target = target
        self._pipes = (Pipe(self._near, self._far, lanes["up"]), Pipe(self._far, self._near, lanes["down"]))
        self._task: asyncio.Task[None] | None = None

    @property
    def lost_bytes(self) -> bool:
        return any(pipe.lost_bytes for pipe in self._pipes)

    def swallow(self, swallowing: bool) -> None:
        """Swallow from now on, or no more."""
        for pipe in self._pipes:
            pipe.swallowing = swallowing

    def start(self, ended: Callable[[Connection], None]) -> None:
        """Run until an end closes or breaks; then ``ended(self)`` is called."""
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(lambda _: ended(self))

    async def abort(self) -> None:
        """Reset both ends at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        orderly = False
        work: list[asyncio.Task[None]] = []
        try:
            for end in (self._near, self._far):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(self._far, self._target.address)
            work = [asyncio.ensure_future(half) for pipe in self._pipes for half in (pipe.read(), pipe.write())]
            await asyncio.gather(*work)
            orderly = True
        except (OSError, asyncio.CancelledError):
            # Both peers see a reset, which tells them as much as there is to tell.
            pass
        finally:
            for task in work:
                task.cancel()
            if work:
                await asyncio.wait(work)
            for end in (self._near, self._far):
                if not orderly:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.close()
