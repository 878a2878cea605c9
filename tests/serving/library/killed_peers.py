"""``python killed_peers.py ENDPOINT COUNT [KEY SERVER_KEY]``: peers that are killed, one after another, at their worst.

Each is a forked process that connects, says something, and is ended by SIGKILL. This process itself has no connection,
no thread, and no ZeroMQ context, so a fork is a whole process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgpack
import zmq
from raw_zmtp import COMMAND, GREETING, MORE, RawPeer, frame, message

from edge_sdk.channel import Channel
from edge_sdk.keys import CurveKeys
from edge_sdk.protocol import CallDevice, ListDevices, Register, Resources
from edge_sdk.wire import MAGIC, Message, MessageType, encode

Ready = Callable[[], object]
RESOURCES = Resources(ram_bytes=2**30, ram_available_bytes=2**29, cores=1, architecture="x", runtimes={})


class Victim:
    """What a peer does until it is ready to be killed, and after."""

    def __init__(self, endpoint: str, keys: CurveKeys | None, number: int, ready: Ready) -> None:
        self.endpoint = endpoint
        self.keys = keys
        self.number = number
        self.ready = ready
        # A device's key is for the device of its name.
        self.device_id = "cam-1" if keys is None else keys.name

    def connected(self) -> None:
        Channel(self.endpoint, keys=self.keys)
        self.ready()

    def registered(self) -> None:
        channel = Channel(self.endpoint, keys=self.keys)
        register = Register(
            device_id=self.device_id, resources=RESOURCES, model_ram_bytes=10**6, instance=str(self.number)
        )
        while True:
            try:
                channel.call(register, timeout_s=20)
                break
            except Exception:
                # The one before it, whose death has not come through.
                time.sleep(0.05)
        self.ready()

    def asking(self) -> None:
        channel = Channel(self.endpoint, keys=self.keys)
        call = CallDevice(device_id=self.device_id, device_method="m", params={}, stall_timeout_s=3600.0)
        for _ in range(5):
            channel.begin_call(call, timeout_s=3600)
        self.ready()
        while True:
            channel.begin_call(ListDevices(), timeout_s=3600)
            time.sleep(0.001)

    def amid_a_message(self) -> None:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        if self.keys is not None:
            dealer.curve_publickey = self.keys.public.encode()
            dealer.curve_secretkey = self.keys.secret.encode()
            dealer.curve_serverkey = self.keys.server.encode()
        dealer.connect(self.endpoint)
        dealer.send_multipart(encode(Message(type=MessageType.CALL, request_id=1, method=ListDevices.method)))
        dealer.recv_multipart()
        self.ready()
        while True:
            dealer.send(bytes(100_000), zmq.SNDMORE)

    def amid_a_frame(self) -> None:
        peer = RawPeer(self.endpoint)
        peer.send(GREETING if self.keys is None else GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:])
        if self.keys is None:
            peer.close()
            peer = RawPeer(self.endpoint)
            peer.shake_hands()
            peer.send(frame(MAGIC + bytes((1, 4, 0, 0)), flags=MORE) + b"\x00\x50" + msgpack.packb({"id": 1}))
        self.ready()

    def amid_the_handshake(self) -> None:
        peer = RawPeer(self.endpoint)
        peer.send(GREETING[: self.number % len(GREETING)])
        self.ready()

    def talking_nonsense(self) -> None:
        peer = RawPeer(self.endpoint)
        peer.send(GREETING + frame(b"\x05HELLO" + bytes(200), flags=COMMAND) + message(b"x" * 1000))
        self.ready()


KINDS = (
    Victim.connected,
    Victim.registered,
    Victim.asking,
    Victim.amid_a_message,
    Victim.amid_a_frame,
    Victim.amid_the_handshake,
    Victim.talking_nonsense,
)


def kill_one(endpoint: str, keys: CurveKeys | None, number: int) -> None:
    """Fork, let it come to where it is ready, and kill it."""
    act = KINDS[number % len(KINDS)]
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act(Victim(endpoint, keys, number, lambda: os.write(writing, b"x")))
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(writing)
    was_ready = os.read(reading, 1) == b"x"
    os.close(reading)
    if number % 3:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not was_ready:
        sys.exit(f"{act.__name__} {number} did not come to be killed")


def main() -> None:
    endpoint, count, *files = sys.argv[1:]
    keys = CurveKeys.load(*map(Path, files)) if files else None
    for number in range(int(count)):
        kill_one(endpoint, keys, number)


if __name__ == "__main__":
    main()
