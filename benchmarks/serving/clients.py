"""The clients of one measurement: a closed or an open loop over many connections, in one thread.

The loop is edge-triggered, as ZeroMQ's descriptors are: an answer is tried for when an event comes, and after each
request, since nothing tells again what was there before.
"""

from __future__ import annotations

import random
import resource
import select
import struct
import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import zmq

from benchmarks.serving.connections import AskError, Connection, connect
from benchmarks.serving.load import PATIENCE_S, Load, Outcome

# Alone, then together.
WARM_ROUNDS = 3
WARM_S = 0.5
# As many at once while nothing is measured, so that no server refuses them.
TOGETHER = 8
# How long after the last request of an open loop was due its answers count as such.
GRACE_S = 2.0
# epoll waits for whole milliseconds, and a little longer; less is slept through in steps.
_POLL_S = 0.0015
_LEAST_S = 0.0005
_STEP_S = 0.0002
_FLOAT = struct.Struct("<f")

Answer = bytes | memoryview
# Client, answer, or what is wrong.
Take = Callable[[int, Answer | None, str | None], None]


class Clients:
    """All connections of a process, and the loops over them."""

    def __init__(self, load: Load) -> None:
        self._load = load
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, load.clients + 16)
        self._epoll = select.epoll()
        self._early: deque[tuple[int, Answer | None, str | None]] = deque()
        self._busy: set[int] = set()
        self._connections: list[Connection] = []
        self._by_fileno: dict[int, int] = {}
        for number in range(load.clients):
            connection = connect(load.target, load.features[number % len(load.features)], context, number)
            self._connections.append(connection)
            self._by_fileno[connection.fileno()] = number
            self._epoll.register(connection.fileno(), connection.events)
        # Of each answer one number is compared: where those expected differ most.
        self._place = int(load.expected.std(axis=0).argmax())
        self._probe = [float(load.expected[number % len(load.expected)][self._place]) for number in range(load.clients)]
        self._size_bytes = load.expected[0].nbytes

    def warm(self) -> None:
        """Raises ``RuntimeError`` for a wrong answer."""
        for _ in range(WARM_ROUNDS):
            if wrong := self.check_all():
                raise RuntimeError(f"while warming up: {dict(wrong)}")
        self._closed_loop(min(TOGETHER, self._load.clients), WARM_S)

    def check_all(self) -> Counter[str]:
        """Each client that waits for nothing asks once, and its whole answer is compared: what was wrong, how often."""
        wrong: Counter[str] = Counter()

        def take(number: int, answer: Answer | None, error: str | None) -> None:
            if error is None and answer is not None:
                expected = self._load.expected[number % len(self._load.expected)]
                got = np.frombuffer(answer, np.float32)
                if got.size != expected.size or not np.allclose(got, expected, rtol=0, atol=self._load.tolerance):
                    error = "wrong answer"
            if error is not None:
                wrong[error] += 1

        free = [number for number in range(len(self._connections)) if number not in self._busy]
        for first in range(0, len(free), TOGETHER):
            for number in free[first : first + TOGETHER]:
                self._send(number)
            self._wait_for_all(take)
            wrong["no answer"] += sum(number in self._busy for number in free[first : first + TOGETHER])
        return +wrong

    def measure(self) -> Outcome:
        """The loop of the load."""
        for connection in self._connections:
            connection.sent_bytes = connection.received_bytes = 0
        cpu_s = time.process_time()
        load = self._load
        if load.rate_per_s is None:
            outcome = self._closed_loop(load.clients, load.seconds)
        else:
            outcome = self._open_loop(load.rate_per_s)
        outcome.client_cpu_s = time.process_time() - cpu_s
        outcome.sent_bytes = sum(each.sent_bytes for each in self._connections)
        outcome.received_bytes = sum(each.received_bytes for each in self._connections)
        return outcome

    def _closed_loop(self, clients: int, seconds: float) -> Outcome:
        """What is under way at the end is waited for and not counted."""
        outcome = Outcome(seconds=seconds)
        clock = time.perf_counter
        began = [0.0] * clients
        end = clock() + seconds

        def ask(number: int) -> None:
            outcome.sent += 1
            began[number] = clock()
            self._send(number)

        def take(number: int, answer: Answer | None, error: str | None) -> None:
            now = clock()
            if now < end:
                error = error or self._wrong(number, answer)
                if error is None:
                    outcome.latencies_s.append(now - began[number])
                else:
                    outcome.errors[error] += 1
                ask(number)

        for number in range(clients):
            ask(number)
        while clock() < end:
            self._poll(end - clock(), take)
        self._wait_for_all(take)
        if self._busy:
            outcome.errors["no answer"] += len(self._busy)
        return outcome

    def _open_loop(self, rate_per_s: float) -> Outcome:
        """The times are the same for all systems."""
        outcome = Outcome(seconds=self._load.seconds)
        draw = random.Random(self._load.seed)
        due: deque[float] = deque()
        at = draw.expovariate(rate_per_s)
        while at < self._load.seconds:
            due.append(at)
            at += draw.expovariate(rate_per_s)
        total = len(due)
        due_at = [0.0] * len(self._connections)
        free = deque(range(len(self._connections)))
        late: list[float] = []
        held_up = False
        start = time.perf_counter()
        end = self._load.seconds + GRACE_S

        def clock() -> float:
            return time.perf_counter() - start

        def take(number: int, answer: Answer | None, error: str | None) -> None:
            error = error or self._wrong(number, answer)
            if error is None:
                outcome.latencies_s.append(clock() - due_at[number])
            else:
                outcome.errors[error] += 1
            free.append(number)

        while (now := clock()) < end and (due or self._busy or self._early):
            while due and free and due[0] <= now:
                number = free.popleft()
                due_at[number] = due.popleft()
                if not held_up:
                    late.append(now - due_at[number])
                outcome.sent += 1
                self._send(number)
                now = clock()
            # Who finds no free connection is late because of the server, not of us.
            held_up = bool(due) and not free
            self._poll_until((due[0] if due and free else end) - now, take)
        outcome.errors["unanswered"] += total - len(outcome.latencies_s) - outcome.errors.total()
        outcome.errors = +outcome.errors
        outcome.late_ms = 1000 * float(np.percentile(late, 99)) if late else None
        return outcome

    def _wrong(self, number: int, answer: Answer | None) -> str | None:
        if answer is None or len(answer) != self._size_bytes:
            return "wrong size"
        (value,) = _FLOAT.unpack_from(answer, _FLOAT.size * self._place)
        return None if abs(value - self._probe[number]) <= self._load.tolerance else "wrong answer"

    def _send(self, number: int) -> None:
        self._busy.add(number)
        self._connections[number].send()
        self._try(number, lambda *answer: self._early.append(answer))

    def _try(self, number: int, take: Take) -> None:
        try:
            answer = self._connections[number].receive()
        except AskError as error:
            self._busy.discard(number)
            take(number, None, str(error))
            return
        if answer is not None:
            self._busy.discard(number)
            take(number, answer, None)

    def _poll(self, timeout_s: float, take: Take) -> None:
        if self._early:
            timeout_s = 0.0
            for _ in range(len(self._early)):
                take(*self._early.popleft())
        for fileno, _ in self._epoll.poll(max(timeout_s, 0.0)):
            self._try(self._by_fileno[fileno], take)

    def _poll_until(self, until_s: float, take: Take) -> None:
        if until_s > _POLL_S:
            self._poll(int((until_s - _LEAST_S) * 1000) / 1000, take)
            return
        self._poll(0.0, take)
        if until_s > 0:
            time.sleep(min(until_s, _STEP_S))

    def _wait_for_all(self, take: Take) -> None:
        end = time.perf_counter() + PATIENCE_S
        while (self._busy or self._early) and time.perf_counter() < end:
            self._poll(1.0, take)
