"""What CURVE costs: an echo of features through the server's own socket, with and without it, in one run.

    python benchmarks/curve.py [--clients 1,8] [--bytes N] [--seconds S] [--rounds N] [--json PATH]

Closed loop: each client is a process that sends features and asks anew when they are back. The server is a process with
a :class:`cloud_server.router.Router` that decodes and encodes as the real one does and, with CURVE, asks the allow list
for each message; it runs nothing. So this is the worst case: what a tail computes comes on top on both sides of the
ratio. Both ways take turns for N rounds, since the machine is not equally fast all the time; the ratio is the median of
the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from cloud_server.allow_list import AllowList, Holder, Role
from cloud_server.curve import ServerCurve
from cloud_server.guard import Guard
from cloud_server.router import Router
from edge_sdk.dealer import open_dealer
from edge_sdk.keys import CurveKeys, make_key_pair
from edge_sdk.wire import Message, MessageType, Tensor, decode, encode

WARM = 20
PATIENCE_MS = 60_000


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one round; ``cpu_ms`` is CPU time of the server process per request."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float


def serve(pipe: Connection, secret: str | None, allowed: Path) -> None:
    """Tell the endpoint, then echo until told to stop."""
    guard = Guard(AllowList(allowed))
    router = Router("tcp://127.0.0.1:*", curve=None if secret is None else ServerCurve(secret=secret, guard=guard))
    pipe.send(router.endpoint)
    poller = zmq.Poller()
    poller.register(router.socket, zmq.POLLIN)
    poller.register(pipe.fileno(), zmq.POLLIN)
    while not pipe.poll():
        poller.poll()
        while (arrival := router.receive()) is not None:
            if router.guard is not None:
                router.guard.identify(arrival.key)
            asked = decode(arrival.frames)
            answer = Message(type=MessageType.RESULT, request_id=asked.request_id, tensors=asked.tensors)
            router.send(arrival.peer, answer)
    router.close()


def ask(pipe: Connection, endpoint: str, keys: CurveKeys | None, size_bytes: int, seconds: float) -> None:
    """One client: tells the latencies of its requests, and how long all of them took."""
    context = zmq.Context()
    socket = open_dealer(context, 5.0, keys)
    socket.connect(endpoint)
    feature = Tensor(name="feature_0", data=np.ones((1, size_bytes), np.int8), scale=0.1, zero_point=3)

    def once(request_id: int) -> float:
        began = time.perf_counter()
        socket.send_multipart(encode(Message(type=MessageType.INFER, request_id=request_id, tensors=(feature,))))
        if not socket.poll(PATIENCE_MS):
            raise TimeoutError("no echo came")
        decode(socket.recv_multipart())
        return time.perf_counter() - began

    for number in range(WARM):
        once(number)
    pipe.send(None)
    pipe.recv()
    began = time.perf_counter()
    latencies = []
    while time.perf_counter() - began < seconds:
        latencies.append(once(WARM + len(latencies)))
    pipe.send((latencies, time.perf_counter() - began))
    socket.close()
    context.term()


def measure(clients: int, size_bytes: int, seconds: float, *, curve: bool) -> Figures:
    """One round."""
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        public, secret = make_key_pair()
        allow_list = AllowList(Path(folder))
        keys: list[CurveKeys | None] = []
        for number in range(clients):
            own, own_secret = make_key_pair()
            allow_list.allow(Holder(name=f"device-{number}", role=Role.DEVICE, public=own))
            keys.append(CurveKeys(public=own, secret=own_secret, server=public) if curve else None)
        here, there = spawn.Pipe()
        server = spawn.Process(target=serve, args=(there, secret if curve else None, Path(folder)))
        server.start()
        endpoint = here.recv()
        pipes, processes = [], []
        for own_keys in keys:
            mine, its = spawn.Pipe()
            process = spawn.Process(target=ask, args=(its, endpoint, own_keys, size_bytes, seconds))
            process.start()
            pipes.append(mine)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        before = _cpu_s(server.pid)
        for pipe in pipes:
            pipe.send(None)
        results = [pipe.recv() for pipe in pipes]
        cpu_s = _cpu_s(server.pid) - before
        here.send(None)
        for process in (*processes, server):
            process.join()
    latencies = np.sort(np.concatenate([np.asarray(times) for times, _ in results])) * 1000
    return Figures(
        requests_per_s=sum(len(times) / duration for times, duration in results),
        p50_ms=float(np.percentile(latencies, 50)),
        p99_ms=float(np.percentile(latencies, 99)),
        cpu_ms=1000 * cpu_s / len(latencies),
    )


def _cpu_s(pid: int | None) -> float:
    """CPU time of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the table; write the figures where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", default="1,8", help="how many at once, separated by commas")
    parser.add_argument("--bytes", type=int, default=50_000, help="size of the features")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'clients':>8}{'CURVE':>7}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>9}{'ratio':>8}")
    for clients in map(int, options.clients.split(",")):
        rounds: dict[bool, list[Figures]] = {False: [], True: []}
        for number in range(options.rounds):
            # Whoever goes first changes too.
            for curve in (False, True) if number % 2 == 0 else (True, False):
                rounds[curve].append(measure(clients, options.bytes, options.seconds, curve=curve))
        ratio = statistics.median(
            on.requests_per_s / off.requests_per_s for off, on in zip(rounds[False], rounds[True], strict=True)
        )
        for curve, figures in rounds.items():
            middle = {name: statistics.median(getattr(each, name) for each in figures) for name in asdict(figures[0])}
            rows.append({"clients": clients, "curve": curve, **middle, "ratio": ratio if curve else 1.0})
            print(
                f"{clients:>8}{'on' if curve else 'off':>7}{middle['requests_per_s']:>12.0f}{middle['p50_ms']:>9.2f}"
                f"{middle['p99_ms']:>9.2f}{middle['cpu_ms']:>9.3f}{rows[-1]['ratio']:>8.2f}"
            )
    if options.json is not None:
        document = {"bytes": options.bytes, "rounds": options.rounds, "cores": os.cpu_count(), "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
