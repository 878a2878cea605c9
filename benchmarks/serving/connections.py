"""One client's connection to a system: sends its request, and takes the answer when it is there.

Each has one request under way at a time and tells a file descriptor to poll. Nothing here waits or makes threads. What
does not change from one request to the next is made once: the clients are to cost as little as they can.
"""

from __future__ import annotations

import select
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zmq

from edge_sdk.keys import CurveKeys
from edge_sdk.wire import Message, MessageType, Tensor, decode, encode

BUDGET_S = 60.0
_RECEIVE_BYTES = 1 << 18

Array = npt.NDArray[np.generic]
Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where and how a system is asked; ``kind`` is ``splitfleet``, ``raw`` (ZeroMQ) or ``http``.

    ``keys`` and all that follows is splitfleet's. Clients take turns with the keys.
    """

    kind: str
    endpoint: str
    path: str = "/"
    keys: tuple[CurveKeys, ...] = ()
    bundle: str = ""
    scale: float | None = None
    zero_point: int | None = None


class AskError(Exception):
    """The answer is an error, whose code or status is the text."""


class Connection(ABC):
    """``sent_bytes`` and ``received_bytes`` count what went over it, framing included."""

    sent_bytes = 0
    received_bytes = 0
    events = select.EPOLLIN | select.EPOLLET

    @abstractmethod
    def fileno(self) -> int:
        """To be polled for ``events``; :meth:`receive` is to be tried after each :meth:`send` and for each event."""

    @abstractmethod
    def send(self) -> None: ...

    @abstractmethod
    def receive(self) -> bytes | memoryview | None:
        """The bytes of the output, or ``None`` when it is not there yet. Raises :class:`AskError`."""

    @abstractmethod
    def close(self) -> None: ...


def connect(target: Target, feature: Array, context: Context, number: int = 0) -> Connection:
    """A connection of the client of that number, which has ``feature`` (*shape) to ask about."""
    if target.kind == "http":
        return HttpConnection(target, feature)
    if target.kind == "raw":
        return RawConnection(target, feature, context)
    return SplitfleetConnection(target, feature, context, number)


class RawConnection(Connection):
    """A DEALER that sends the feature as it is, and gets the output as it is."""

    def __init__(self, target: Target, feature: Array, context: Context, keys: CurveKeys | None = None) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
        self._socket.connect(target.endpoint)
        self._body = feature.tobytes()
        self._fileno = int(self._socket.getsockopt(zmq.FD))

    def fileno(self) -> int:
        return self._fileno

    def send(self) -> None:
        self._send([self._body])

    def _send(self, frames: list[bytes | bytearray | memoryview]) -> None:
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        self.sent_bytes += sum(map(_framed, frames))

    def receive(self) -> bytes | memoryview | None:
        frames = self._receive()
        return None if frames is None else frames[0]

    def _receive(self) -> list[bytes] | None:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self.received_bytes += sum(map(_framed, frames))
        return frames

    def close(self) -> None:
        self._socket.close()


def _framed(frame: bytes | bytearray | memoryview) -> int:
    """Bytes of a frame as ZMTP sends it (without CURVE's)."""
    return len(frame) + (2 if len(frame) < 256 else 9)


class SplitfleetConnection(RawConnection):
    """The wire format of splitfleet, encoded and decoded anew each time."""

    def __init__(self, target: Target, feature: Array, context: Context, number: int) -> None:
        super().__init__(target, feature, context, target.keys[number % len(target.keys)] if target.keys else None)
        self._bundle = target.bundle
        self._tensors = (
            Tensor(name="feature_0", data=feature[None], scale=target.scale, zero_point=target.zero_point),
        )
        self._number = 0

    def send(self) -> None:
        self._number += 1
        message = Message(
            type=MessageType.INFER,
            request_id=self._number,
            bundle=self._bundle,
            budget_s=BUDGET_S,
            tensors=self._tensors,
        )
        self._send(encode(message))

    def receive(self) -> bytes | memoryview | None:
        frames = self._receive()
        if frames is None:
            return None
        answer = decode(frames)
        if answer.request_id != self._number:
            raise AskError("answer to another request")
        if answer.type is not MessageType.RESULT:
            raise AskError(str(answer.body.get("code", answer.type.name)))
        return answer.tensors[0].data.data.cast("B")


class HttpConnection(Connection):
    """HTTP/1.1 over a connection that is kept; the body of either side is the bytes of the array."""

    # A request that does not fit into the socket's buffer goes on when there is room.
    events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET

    def __init__(self, target: Target, feature: Array) -> None:
        host, _, port = target.endpoint.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        body = feature.tobytes()
        head = (
            f"POST {target.path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/octet-stream\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._unsent = memoryview(b"")
        self._answer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self) -> None:
        self._unsent = memoryview(self._request)
        self.sent_bytes += len(self._request)
        self._push()

    def _push(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return

    def receive(self) -> bytes | memoryview | None:
        if self._unsent:
            self._push()
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionError("the server closed the connection")
        self.received_bytes += len(data)
        self._answer += data
        head, gap, body = self._answer.partition(b"\r\n\r\n")
        if not gap:
            return None
        status, *lines = head.split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line[:15].lower() == b"content-length:"), None)
        if length is None:
            raise ConnectionError(f"an answer without content-length: {head.decode(errors='replace')}")
        if len(body) < length:
            return None
        self._answer.clear()
        code = status.split()[1].decode()
        if code != "200":
            raise AskError(f"HTTP {code}")
        return bytes(body)

    def close(self) -> None:
        self._socket.close()
