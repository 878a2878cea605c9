"""A peer that speaks ZMTP 3 by hand, over a plain TCP socket: for what no well-behaved library would send."""

from __future__ import annotations

import socket
import struct
from types import TracebackType
from typing import Self

PATIENCE_S = 20.0
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
MORE, LONG, COMMAND = 1, 2, 4


def frame(data: bytes, *, flags: int = 0) -> bytes:
    """One frame as it travels."""
    if len(data) < 256 and not flags & LONG:
        return struct.pack("BB", flags, len(data)) + data
    return struct.pack(">BQ", flags | LONG, len(data)) + data


def message(*frames: bytes) -> bytes:
    """A whole message as it travels."""
    return b"".join(frame(data, flags=MORE) for data in frames[:-1]) + frame(frames[-1])


def ready(identity: bytes = b"", *, kind: str = "DEALER") -> bytes:
    """The command that ends a handshake without encryption."""
    properties = b"".join(
        bytes((len(name),)) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", kind.encode()), (b"Identity", identity))
    )
    return frame(b"\x05READY" + properties, flags=COMMAND)


class RawPeer:
    """A connection to ``endpoint`` that has said nothing yet."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)

    def send(self, data: bytes) -> bool:
        """Whether the peer took it; ``False`` when it has hung up."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def shake_hands(self, identity: bytes = b"") -> None:
        """Come as far as a DEALER whose messages are taken."""
        self.send(GREETING)
        self._receive(len(GREETING))
        self.send(ready(identity))
        # What is not read when the socket is closed would reset the connection.
        self._receive(self._receive(2)[1])

    def _receive(self, size_bytes: int) -> bytes:
        data = b""
        while len(data) < size_bytes:
            piece = self.socket.recv(size_bytes - len(data))
            assert piece, "the peer hung up"
            data += piece
        return data

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
