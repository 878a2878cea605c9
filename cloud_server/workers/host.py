"""The tails in a worker: loaded and unloaded as the server says, each with a thread that runs its batches.

That thread waits for features on the tail's own line, so that there is nobody to hand them on, and a tail that is slow
or hangs holds up no other.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from time import perf_counter
from typing import Any

import numpy as np

from cloud_server.engines.base import TailEngine
from cloud_server.tail_signature import TailSignature
from cloud_server.workers.frames import HEAD, HEAD_BYTES, Kind, error_body, pack, unpack
from cloud_server.workers.memory import give_back, rss_of
from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, SplitfleetError, TailFailedError

# Features begin at a multiple of it: computing with them is faster.
_ALIGNED = 64
# The kernel takes no more at once (IOV_MAX).
_MOST_BUFFERS = 1024

LoadEngine = Callable[[Bundle], TailEngine]


class Host:
    """Does what comes over ``control``; a batch has up to ``max_batch`` samples as a rule."""

    def __init__(
        self,
        control: socket.socket,
        *,
        load_engine: LoadEngine,
        max_batch: int,
        rss_bytes: Callable[[], int | None] = lambda: rss_of(os.getpid()),
    ) -> None:
        self._rss_bytes = rss_bytes
        self._control = control
        self._load_engine = load_engine
        self._max_batch = max_batch
        self._tails: dict[int, HostedTail] = {}

    @property
    def tails(self) -> tuple[HostedTail, ...]:
        """The tails that are loaded."""
        return tuple(self._tails.values())

    def serve(self) -> None:
        """Serve until the server closes the connection."""
        with suppress(OSError):
            self._control.sendall(pack(Kind.HELLO, {}))
            while (frame := self._receive()) is not None:
                kind, body, line = frame
                answer = self._load(body, line) if kind == Kind.LOAD else self._unload(body)
                self._control.sendall(answer)

    def _receive(self) -> tuple[int, dict[str, Any], socket.socket | None] | None:
        # What comes along comes with the first byte.
        head, descriptors, _, _ = socket.recv_fds(self._control, HEAD_BYTES, 1)
        head += self._control.recv(HEAD_BYTES - len(head), socket.MSG_WAITALL) if head else b""
        if len(head) < HEAD_BYTES:
            return None
        kind, _, size, _ = HEAD.unpack(head)
        payload = self._control.recv(size, socket.MSG_WAITALL)
        if len(payload) < size:
            return None
        return kind, unpack(payload), socket.socket(fileno=descriptors[0]) if descriptors else None

    def _load(self, body: dict[str, Any], line: socket.socket | None) -> bytes:
        assert line is not None
        answer = {"tail": body["tail"]}
        try:
            bundle = Bundle.open(body["path"])
            tail = HostedTail(bundle, self._load_engine(bundle), line)
            try:
                tail.warm(self._max_batch)
            except BaseException:
                tail.engine.close()
                raise
        except Exception as error:
            line.close()
            give_back()
            return pack(Kind.LOADED, answer | {"error": error_body(error), "rss_bytes": self._rss_bytes()})
        self._tails[body["tail"]] = tail
        tail.thread.start()
        engine = {"engine": tail.engine.name, "reason": tail.engine.reason}
        return pack(Kind.LOADED, answer | engine | {"rss_bytes": self._rss_bytes()})

    def _unload(self, body: dict[str, Any]) -> bytes:
        tail = self._tails.pop(body["tail"])
        # The server closed its end when nothing was under way any more.
        tail.thread.join()
        try:
            tail.engine.close()
        except Exception:
            traceback.print_exc()
        del tail
        give_back()
        return pack(Kind.UNLOADED, {"tail": body["tail"], "rss_bytes": self._rss_bytes()})


class HostedTail:
    """One loaded tail and its line."""

    def __init__(self, bundle: Bundle, engine: TailEngine, line: socket.socket) -> None:
        self.engine = engine
        self._signature = TailSignature(bundle.manifest, bundle.digest)
        self.line = line
        self._room = memoryview(bytearray())
        # A daemon: a tail that never returns must not keep the process from ending.
        self.thread = Thread(target=self._work, name=f"tail {bundle.digest[:12]}", daemon=True)

    def warm(self, max_batch: int) -> None:
        """Make the first request as fast as any, and the first batch nearly so.

        Not with the largest batch: that would hold up the other tails here for as long as it takes, several times, and
        what an engine prepares once for batches of any size it prepares for two samples, too.

        Raises :class:`BundleError` when the tail is not what it should be.
        """
        digest = self._signature.digest
        try:
            for samples in sorted({1, min(2, max_batch)}):
                zeros = self._signature.zeros(samples)
                self.engine.warm(zeros)
                self._signature.outputs(samples, self.engine.run(zeros))
        except Exception as error:
            reason = error.message if isinstance(error, SplitfleetError) else str(error).partition("\n")[0][:500]
            raise BundleError(f"bundle {digest}: its tail cannot be run: {reason}") from error
        self._room = self._make_room(max_batch * self._signature.feature_bytes)

    def _work(self) -> None:
        line = self.line
        head = memoryview(bytearray(HEAD_BYTES))
        with suppress(OSError), line:
            while _fill(line, head):
                _, samples, size, _ = HEAD.unpack(head)
                room = self._room if size <= self._room.nbytes else self._make_room(size)
                if not _fill(line, room[:size]):
                    return
                _send_all(line, self._run(samples, room))

    def _run(self, samples: int, data: memoryview) -> list[Any]:
        """The frame that answers a batch."""
        began = perf_counter()
        try:
            outputs = self.engine.run(self._signature.features(samples, data))
            buffers = self._signature.outputs(samples, outputs)
        except Exception as error:
            return [pack(Kind.FAILED, error_body(self._failure(error)))]
        size = samples * self._signature.output_bytes
        return [HEAD.pack(Kind.OUTPUTS, samples, size, perf_counter() - began), *buffers]

    def _failure(self, error: Exception) -> TailFailedError:
        if isinstance(error, TailFailedError):
            return error
        reason = str(error).partition("\n")[0][:500]
        failure = TailFailedError(f"the tail of bundle {self._signature.digest[:12]} failed: {reason}")
        failure.__cause__ = error
        return failure

    @staticmethod
    def _make_room(size: int) -> memoryview:
        room = np.empty(size + _ALIGNED, np.uint8)
        start = -room.ctypes.data % _ALIGNED
        return room.data[start : start + size]


def _fill(line: socket.socket, room: memoryview) -> bool:
    """Receive as much as fits into ``room``; ``False``: the line ended before."""
    while room.nbytes:
        count = line.recv_into(room, 0, socket.MSG_WAITALL)
        if not count:
            return False
        room = room[count:]
    return True


def _send_all(line: socket.socket, buffers: Sequence[Any]) -> None:
    total = sum(memoryview(buffer).nbytes for buffer in buffers)
    sent = line.sendmsg(buffers[:_MOST_BUFFERS])
    if sent < total:
        # Rare: what the kernel does not take at once goes in one piece.
        line.sendall(memoryview(b"".join(bytes(buffer) for buffer in buffers))[sent:])
