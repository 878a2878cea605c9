"""The server's end of a stream socket: frames in and out, without ever waiting for the other side."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

import numpy as np

from cloud_server.loop import READ, WRITE, Loop
from cloud_server.workers.frames import HEAD, HEAD_BYTES

# One call takes most frames whole.
_RECEIVED_AT_ONCE = 1 << 16
# The kernel takes no more at once (IOV_MAX).
_MOST_BUFFERS = 1024
# What the kernel allows is less, as a rule.
_KERNEL_BUFFER_BYTES = 1 << 20

# Kind, samples, payload, seconds.
OnFrame = Callable[[int, int, memoryview, float], None]


def stream_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a stream, with room in the kernel for a batch."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER_BYTES)
    return ends


class _Leaving(NamedTuple):
    view: memoryview
    descriptor: int | None = None


class Stream:
    """Frames over ``end``, which is closed with it. ``on_frame`` gets each frame that came; ``on_lost`` is called once
    when the other side is gone.
    """

    def __init__(self, loop: Loop, end: socket.socket, *, on_frame: OnFrame, on_lost: Callable[[], None]) -> None:
        end.setblocking(False)
        self._loop = loop
        self._end = end
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._open = True
        self._leaving: deque[_Leaving] = deque()
        # Of the frame that comes: its beginning while that is no whole head; then all of it, and how much came.
        self._begun = b""
        self._coming: memoryview | None = None
        self._came = 0
        loop.watch(end.fileno(), self._ready)

    def send(self, *buffers: Any, size: int = -1, descriptor: int | None = None) -> None:
        """Send buffers one after another; they must not change until they left. A copy of ``descriptor`` goes along.

        ``size`` is their bytes together, where the caller knows them.
        """
        if not self._open:
            return
        sent = 0
        if not self._leaving and descriptor is None:
            # The usual case, in one call.
            try:
                sent = self._end.sendmsg(buffers[:_MOST_BUFFERS])
                if sent == size:
                    return
            except BlockingIOError:
                pass
            except OSError:
                self._lose()
                return
        views = deque(_Leaving(view) for view in _after(buffers, sent))
        if descriptor is not None:
            views[0] = _Leaving(views[0].view, os.dup(descriptor))
        if views:
            if not self._leaving:
                self._loop.change(self._end.fileno(), READ | WRITE)
            self._leaving.extend(views)

    def close(self) -> None:
        """Forget what has not left; nothing is called any more."""
        if not self._open:
            return
        self._open = False
        self._loop.unwatch(self._end.fileno())
        self._end.close()
        for each in self._leaving:
            if each.descriptor is not None:
                os.close(each.descriptor)
        self._leaving.clear()

    def _ready(self, events: int) -> None:
        try:
            if events & WRITE:
                self._write()
            if events & ~WRITE:
                self._read()
        except BlockingIOError:
            pass
        except OSError:
            self._lose()

    def _lose(self) -> None:
        if self._open:
            self.close()
            self._on_lost()

    def _write(self) -> None:
        while self._leaving:
            first = self._leaving[0]
            if first.descriptor is not None:
                sent = socket.send_fds(self._end, [first.view], [first.descriptor])
                os.close(first.descriptor)
                self._leaving[0] = _Leaving(first.view)
            else:
                bare = takewhile(lambda each: each.descriptor is None, self._leaving)
                sent = self._end.sendmsg([each.view for each in islice(bare, _MOST_BUFFERS)])
            while self._leaving and sent >= self._leaving[0].view.nbytes:
                sent -= self._leaving.popleft().view.nbytes
            if sent:
                self._leaving[0] = _Leaving(self._leaving[0].view[sent:])
        self._loop.change(self._end.fileno(), READ)

    def _read(self) -> None:
        if self._coming is not None:
            count = self._end.recv_into(self._coming[self._came :])
            if not count:
                self._lose()
                return
            self._came += count
            if self._came == self._coming.nbytes:
                whole, self._coming = self._coming, None
                self._take(whole)
            return
        data = self._end.recv(_RECEIVED_AT_ONCE)
        if not data:
            self._lose()
            return
        self._take(memoryview(self._begun + data if self._begun else data))

    def _take(self, data: memoryview) -> None:
        """Hand on the whole frames in ``data``, and keep the beginning of the one after them."""
        self._begun = b""
        while self._open and data.nbytes >= HEAD_BYTES:
            kind, samples, payload_bytes, seconds = HEAD.unpack_from(data)
            size = HEAD_BYTES + payload_bytes
            if data.nbytes < size:
                self._coming = np.empty(size, np.uint8).data
                self._coming[: data.nbytes] = data
                self._came = data.nbytes
                return
            self._on_frame(kind, samples, data[HEAD_BYTES:size], seconds)
            data = data[size:]
        self._begun = bytes(data)


def _after(buffers: Sequence[Any], sent: int) -> list[memoryview]:
    """What is left of ``buffers`` after ``sent`` bytes of them."""
    left = []
    for buffer in buffers:
        size = memoryview(buffer).nbytes
        if sent >= size:
            sent -= size
            continue
        left.append(memoryview(buffer).cast("B")[sent:])
        sent = 0
    return left
