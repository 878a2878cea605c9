"""A process of many devices that are connected and idle: each registers, and sends its heartbeats on time.

It says what a device says, without the device's own threads: else a thousand of them would not fit on this machine.
"""

from __future__ import annotations

import heapq
import os
import random
import resource
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe

import zmq

from edge_sdk.dealer import open_dealer
from edge_sdk.protocol import HEARTBEAT_S, Heartbeat, Register, Resources
from edge_sdk.wire import Message, MessageType, decode, encode

CONNECT_S = 120.0
# Who measures is not to wait for these.
_NICE = 10
_REGISTRATION = 1


@dataclass(kw_only=True)
class Beats:
    """Heartbeats since :meth:`IdleDevices.begin`. ``answers_s`` is how long each took from when it was due; ``missing``
    ones have no answer yet after a whole interval, ``refused`` ones have another answer than that the device is known.
    """

    answers_s: list[float] = field(default_factory=list)
    missing: int = 0
    refused: int = 0


class IdleDevices:
    """Devices that are registered."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def begin(self) -> None:
        """Forget what was until now."""
        self._pipe.send(None)

    def beats(self) -> Beats:
        """What was since then. Raises ``RuntimeError``."""
        self._pipe.send("tell")
        if not self._pipe.poll(CONNECT_S):
            raise RuntimeError("the idle devices do not answer")
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Beats)
        return found


@contextmanager
def idle_devices(endpoint: str, count: int, cores: frozenset[int]) -> Iterator[IdleDevices]:
    """``count`` of them on these cores, until the end of the context. Raises ``RuntimeError`` when not all register."""
    spawn = get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_work, args=(there, endpoint, count, cores), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(CONNECT_S):
            raise RuntimeError(f"{count} idle devices were not registered within {CONNECT_S:g} s")
        if isinstance(error := here.recv(), Exception):
            raise error
        yield IdleDevices(here)
    finally:
        process.terminate()
        process.join()


def _work(pipe: Pipe, endpoint: str, count: int, cores: frozenset[int]) -> None:
    os.sched_setaffinity(0, cores)
    os.nice(_NICE)
    try:
        devices = _Devices(endpoint, count)
        devices.register()
        pipe.send(None)
        devices.live(pipe)
    except EOFError:
        return
    except Exception as error:
        pipe.send(RuntimeError(f"the idle devices failed: {type(error).__name__}: {error}"))


class _Devices:
    def __init__(self, endpoint: str, count: int) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, count + 16)
        self._epoll = select.epoll()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._by_fileno: dict[int, int] = {}
        for number in range(count):
            socket = open_dealer(context, CONNECT_S)
            socket.connect(endpoint)
            self._sockets.append(socket)
            fileno = int(socket.getsockopt(zmq.FD))
            self._by_fileno[fileno] = number
            self._epoll.register(fileno, select.EPOLLIN | select.EPOLLET)
        self._due: dict[int, float] = {}
        self._beats = Beats()
        self._request_id = _REGISTRATION
        self._unregistered = set(range(count))

    def register(self) -> None:
        resources = Resources(
            ram_bytes=2**30, ram_available_bytes=2**29, cores=4, architecture="aarch64", runtimes={"litert": "2.0"}
        )
        waiting = set(self._unregistered)
        end = time.perf_counter() + CONNECT_S
        while self._unregistered and time.perf_counter() < end:
            for number in list(waiting):
                request = Register(
                    device_id=f"idle-{number}", resources=resources, model_ram_bytes=2**28, instance=f"{number:032x}"
                )
                # It can send once it is connected.
                if self._send(number, request, _REGISTRATION):
                    waiting.discard(number)
            self._poll(0.01)
        if self._unregistered:
            raise RuntimeError(f"{len(self._unregistered)} devices got no answer to their registration")

    def live(self, pipe: Pipe) -> None:
        """Heartbeats, spread over the interval; until the pipe is closed."""
        now = time.perf_counter()
        schedule = [(now + random.random() * HEARTBEAT_S, number) for number in range(len(self._sockets))]
        heapq.heapify(schedule)
        while True:
            if pipe.poll():
                if pipe.recv() is None:
                    self._beats = Beats()
                else:
                    pipe.send(self._beats)
            while schedule[0][0] <= (now := time.perf_counter()):
                due, number = schedule[0]
                heapq.heapreplace(schedule, (due + HEARTBEAT_S, number))
                self._beat(number, due)
            self._poll(max(schedule[0][0] - now, 0.001))

    def _beat(self, number: int, due: float) -> None:
        if number in self._due:
            self._beats.missing += 1
        self._request_id += 1
        self._due[number] = due
        if not self._send(number, Heartbeat(device_id=f"idle-{number}", progress=0), self._request_id):
            del self._due[number]
            self._beats.missing += 1

    def _send(self, number: int, request: Register | Heartbeat, request_id: int) -> bool:
        message = Message(
            type=MessageType.CALL, request_id=request_id, method=request.method, body=request.to_body(), budget_s=60.0
        )
        try:
            self._sockets[number].send_multipart(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._receive(number)
        return True

    def _poll(self, timeout_s: float) -> None:
        for fileno, _ in self._epoll.poll(timeout_s):
            self._receive(self._by_fileno[fileno])

    def _receive(self, number: int) -> None:
        # Until nothing is there: else a descriptor that is triggered by edges tells nothing more.
        while True:
            try:
                answer = decode(self._sockets[number].recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if number in self._unregistered:
                if answer.type is not MessageType.REPLY:
                    raise RuntimeError(f"a registration was answered by {answer.body}")
                self._unregistered.discard(number)
                continue
            due = self._due.pop(number, None)
            if due is None:
                continue
            if answer.type is MessageType.REPLY and answer.body.get("known"):
                self._beats.answers_s.append(time.perf_counter() - due)
            else:
                self._beats.refused += 1
