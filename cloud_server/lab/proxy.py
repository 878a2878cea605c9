"""A link as a TCP proxy: rate and delay of each way, and faults: cut, half-open, a byte corrupted.

One :class:`LinkProxy` is one device's link: all connections through it share its rate. It knows nothing of what they
carry. The rate is that of the payload; the headers of TCP and IP are not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from cloud_server.lab.connection import Connection, Direction, Lane, Target
from device_profiles import Link
from edge_sdk.errors import ConfigError

Result = TypeVar("Result")

ACCEPT_AGAIN_S = 0.01


class LinkProxy:
    """Forwards connections on :attr:`endpoint` to ``target`` (``tcp://host:port``), in a thread of its own.

    Without a ``link`` there is neither rate nor delay, only faults. All methods may be called from any thread.
    """

    def __init__(self, target: str, link: Link | None = None) -> None:
        self._target = Target.parse(target)
        delay_s = 0.0 if link is None else link.rtt_ms / 2000.0
        self._lanes: dict[Direction, Lane] = {
            "up": Lane(None if link is None else link.uplink_mbit_s, delay_s),
            "down": Lane(None if link is None else link.downlink_mbit_s, delay_s),
        }
        self._connections: set[Connection] = set()
        self._swallowing = False
        self._address: tuple[str, int] | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def endpoint(self) -> str:
        """Where to connect to, once started."""
        if self._address is None:
            raise ConfigError("the link proxy is not started")
        return f"tcp://{self._address[0]}:{self._address[1]}"

    def start(self) -> Self:
        """Listen on a free loopback port. The target need not be there yet."""
        # The timeouts of select are in microseconds, those of epoll in milliseconds: too coarse for a fast link.
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._thread = threading.Thread(target=self._loop.run_forever, name="link-proxy", daemon=True)
        self._thread.start()
        self._run(self._listen())
        return self

    def stop(self) -> None:
        """Close all connections and end the thread."""
        if self._loop is None or self._thread is None:
            return
        self._run(self._cut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def cut(self) -> None:
        """Reset all connections and refuse new ones until :meth:`restore`."""
        self._run(self._cut())

    def half_open(self) -> None:
        """Swallow what is sent either way, connections stay open, as when a network goes silent."""
        self._run(self._half_open())

    def restore(self) -> None:
        """End :meth:`cut` and :meth:`half_open`. A connection that has lost bytes meanwhile is reset."""
        self._run(self._restore())

    def corrupt(self, direction: Direction, *, after_bytes: int = 0) -> None:
        """Invert one byte: the one that comes ``after_bytes`` bytes from now."""
        lane = self._lanes[direction]

        async def arm() -> None:
            lane.corrupt_at = lane.passed_bytes + after_bytes

        self._run(arm())

    def passed_bytes(self, direction: Direction) -> int:
        """How many bytes went that way so far."""
        return self._lanes[direction].passed_bytes

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._loop is None:
            work.close()
            raise ConfigError("the link proxy is not started")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(self._address or ("127.0.0.1", 0))
        listener.listen(64)
        listener.setblocking(False)
        self._address = listener.getsockname()
        self._accepting = asyncio.ensure_future(self._accept(listener))

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    near, _ = await loop.sock_accept(listener)
                except OSError:
                    # The peer was gone again, or there are no descriptors left for now.
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                connection = Connection(near, self._target, self._lanes)
                connection.swallow(self._swallowing)
                self._connections.add(connection)
                connection.start(self._connections.discard)

    async def _cut(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
            self._accepting = None
        for connection in list(self._connections):
            await connection.abort()

    async def _half_open(self) -> None:
        self._swallowing = True
        for connection in self._connections:
            connection.swallow(True)

    async def _restore(self) -> None:
        self._swallowing = False
        for connection in list(self._connections):
            connection.swallow(False)
            if connection.lost_bytes:
                await connection.abort()
        if self._accepting is None:
            await self._listen()
