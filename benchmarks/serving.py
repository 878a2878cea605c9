"""How fast the server serves a tail, beside what this machine could do at best, in one run.

    python benchmarks/serving.py [--clients 1,4,8] [--seconds S] [--rounds N] [--max-batch N] [--batch-delay-ms D]
                                 [--json PATH]

Closed loop: each client is a process that asks anew when its answer is there. Three ways to serve the same SavedModel
(14×14×64 int8 → two convolutions → 100 logits: little to compute, so that what is around it shows):

- ``splitfleet``: ``splitfleet serve`` as it is, and clients that speak its wire format over a plain DEALER;
- ``bare loop``: a ROUTER in a loop of a few lines: takes what waits, up to the same largest batch, and runs it. No
  checks, no deadlines, no bounds, no threads, no metrics;
- ``ceiling``: no network at all; one process runs the tail on batches as large as there are clients.

They take turns for N rounds, since the machine is not equally fast all the time; each figure is the median of rounds.
``echo`` is the bare loop without a tail: one lone request should take little more than that and the computation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import zmq

SHAPE = (14, 14, 64)
LOGITS = 100
PATIENCE_MS = 60_000
WARM = 20


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one round. ``cpu_ms`` is CPU time of the serving process per request."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float | None = None


def make_bundle(folder: Path) -> Path:
    """A bundle around the tail; its head is never run here."""
    import hashlib

    from cloud_server.engines.tensorflow_engine import import_tensorflow
    from edge_sdk.manifest import CrossingSpec, Cut, FileEntry, InputSpec, Manifest, ModelRef, OutputSpec

    tf = import_tensorflow()
    draw = np.random.default_rng(0).normal

    class Tail(tf.Module):
        def __init__(self) -> None:
            self.first = tf.Variable(draw(size=(3, 3, 64, 64), scale=0.05).astype(np.float32))
            self.second = tf.Variable(draw(size=(3, 3, 64, 64), scale=0.05).astype(np.float32))
            self.dense = tf.Variable(draw(size=(64, LOGITS), scale=0.1).astype(np.float32))

        @tf.function
        def __call__(self, feature_0: Any) -> dict[str, Any]:
            x = 0.05 * (tf.cast(feature_0, tf.float32) - 3.0)
            x = tf.nn.relu(tf.nn.conv2d(x, self.first, 1, "SAME"))
            x = tf.nn.relu(tf.nn.conv2d(x, self.second, 1, "SAME"))
            return {"output_0": tf.reduce_mean(x, (1, 2)) @ self.dense}

    tail = Tail()
    spec = tf.TensorSpec((None, *SHAPE), tf.int8, name="feature_0")
    (folder / "head.tflite").write_bytes(b"never run")
    tf.saved_model.save(
        tail, str(folder / "tail"), signatures={"serving_default": tail.__call__.get_concrete_function(spec)}
    )
    files = [
        FileEntry(
            path=str(path.relative_to(folder)),
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            size_bytes=path.stat().st_size,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    manifest = Manifest(
        task="benchmark",
        model=ModelRef(name="tiny", sha256="0" * 64),
        cut=Cut(k=1, n=4, name="layer"),
        precision="int8",
        inputs=(InputSpec(name="image", shape=(28, 28, 1), dtype="float32", scale=0.5, zero_point=0),),
        crossing=(CrossingSpec(name="feature_0", source="layer", shape=SHAPE, dtype="int8", scale=0.05, zero_point=3),),
        outputs=(OutputSpec(name="logits", side="tail", shape=(LOGITS,), dtype="float32"),),
        files=tuple(files),
        self_check=None,
        cumulative_bytes=1,
    )
    (folder / "manifest.json").write_bytes(manifest.canonical())
    return folder


def load_engine(folder: Path) -> Any:
    from cloud_server.engines.tensorflow_engine import TensorFlowEngine
    from edge_sdk.bundle import Bundle

    return TensorFlowEngine.load(Bundle.open(folder))


def features(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-128, 128, (1, *SHAPE)).astype(np.int8)


def client(endpoint: str, digest: str, seed: int, seconds: float, ready: Any, go: Any, results: Any) -> None:
    """Ask over and over; with a digest in splitfleet's wire format, else with the raw feature."""
    from edge_sdk.wire import Message, MessageType, Tensor, decode, encode

    # For all ways alike: one core's worth of clients must not spread over the threads of some library.
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    data = features(seed)

    def ask(number: int) -> np.ndarray[Any, Any]:
        if digest:
            tensor = Tensor(name="feature_0", data=data, scale=0.05, zero_point=3)
            message = Message(
                type=MessageType.INFER, request_id=number, bundle=digest, budget_s=60.0, tensors=(tensor,)
            )
            socket.send_multipart(encode(message), copy=False)
        else:
            socket.send(data, copy=False)
        assert socket.poll(PATIENCE_MS), "no answer"
        if not digest:
            return np.frombuffer(socket.recv(), np.float32)
        answer = decode(socket.recv_multipart())
        assert answer.type is MessageType.RESULT, answer.body
        return answer.tensors[0].data[0]

    for number in range(WARM):
        output = ask(number)
    ready.release()
    go.wait()
    latencies = []
    end = time.perf_counter() + seconds
    number = WARM
    while (began := time.perf_counter()) < end:
        ask(number)
        latencies.append(time.perf_counter() - began)
        number += 1
    results.put((seed, latencies, output.tolist()))
    socket.close()
    context.term()


def bare_loop(folder: Path | None, max_batch: int, endpoint: Any) -> None:
    """A ROUTER that runs what waits; without a folder it echoes zeros."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind("tcp://127.0.0.1:*")
    if folder is None:
        endpoint.put((socket.getsockopt_string(zmq.LAST_ENDPOINT), os.getpid()))
        answer = np.zeros(LOGITS, np.float32)
        while True:
            peer, _ = socket.recv_multipart()
            socket.send_multipart([peer, answer])
    engine = load_engine(folder)
    for batch in (1, max_batch):
        engine.warm({"feature_0": np.zeros((batch, *SHAPE), np.int8)})
    endpoint.put((socket.getsockopt_string(zmq.LAST_ENDPOINT), os.getpid()))
    while True:
        waiting = [socket.recv_multipart()]
        while len(waiting) < max_batch:
            try:
                waiting.append(socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        batch = np.concatenate([np.frombuffer(data, np.int8).reshape(1, *SHAPE) for _, data in waiting])
        outputs = engine.run({"feature_0": batch})["output_0"]
        for (peer, _), output in zip(waiting, outputs, strict=True):
            socket.send_multipart([peer, output], copy=False)


@contextmanager
def running_bare_loop(folder: Path | None, max_batch: int) -> Iterator[tuple[str, int]]:
    context = get_context("spawn")
    endpoint = context.Queue()
    process = context.Process(target=bare_loop, args=(folder, max_batch, endpoint), daemon=True)
    process.start()
    try:
        yield endpoint.get(timeout=120)
    finally:
        process.terminate()
        process.join()


@contextmanager
def running_server(folder: Path, options: list[str], digest: str) -> Iterator[tuple[str, int]]:
    from edge_sdk.bundle import Bundle
    from edge_sdk.channel import Channel
    from edge_sdk.protocol import LoadTail
    from edge_sdk.repository_client import RepositoryClient

    home = folder.parent / "home"
    ready = folder.parent / "ready.json"
    command = [sys.executable, "-c", "from cloud_server.cli import main; main()", "serve"]
    command += ["--bind", "tcp://127.0.0.1:*", "--home", str(home), "--ready-file", str(ready), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while not ready.exists():
            if process.poll() is not None:
                raise RuntimeError(process.stderr.read())
            time.sleep(0.02)
        endpoint = json.loads(ready.read_text())["endpoint"]
        with Channel(endpoint, connect_timeout_s=60.0) as channel:
            RepositoryClient(channel).put_bundle(Bundle.open(folder))
            channel.call(LoadTail(bundle=digest), timeout_s=120.0)
        yield endpoint, process.pid
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def closed_loop(
    endpoint: str, pid: int, digest: str, clients: int, seconds: float, expected: dict[int, Any] | None
) -> Figures:
    context = get_context("spawn")
    ready, go, results = context.Semaphore(0), context.Event(), context.Queue()
    processes = [
        context.Process(target=client, args=(endpoint, digest, seed, seconds, ready, go, results))
        for seed in range(clients)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        if not ready.acquire(timeout=PATIENCE_MS / 1000):
            raise RuntimeError("a client did not start")
    cpu_s = cpu_seconds(pid)
    go.set()
    found = [results.get(timeout=seconds + PATIENCE_MS / 1000) for _ in processes]
    cpu_s = cpu_seconds(pid) - cpu_s
    for process in processes:
        process.join()
    for seed, _, output in found:
        if expected is not None:
            np.testing.assert_allclose(output, expected[seed], rtol=1e-3, atol=1e-4)
    return figures([each for _, latencies, _ in found for each in latencies], seconds, cpu_s)


def ceiling(engine: Any, clients: int, seconds: float) -> Figures:
    batch = np.concatenate([features(seed) for seed in range(clients)])
    latencies: list[float] = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        engine.run({"feature_0": batch})
        latencies += [time.perf_counter() - began] * clients
    return figures(latencies, seconds, None)


def figures(latencies: list[float], seconds: float, cpu_s: float | None) -> Figures:
    ordered = sorted(latencies)
    return Figures(
        requests_per_s=len(ordered) / seconds,
        p50_ms=1000 * ordered[len(ordered) // 2],
        p99_ms=1000 * ordered[int(len(ordered) * 0.99)],
        cpu_ms=None if cpu_s is None else 1000 * cpu_s / len(ordered),
    )


def median(rounds: list[Figures]) -> Figures:
    def of(name: str) -> Any:
        values = [getattr(each, name) for each in rounds if getattr(each, name) is not None]
        return statistics.median(values) if values else None

    return Figures(**{name: of(name) for name in Figures.__dataclass_fields__})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", default="1,4,8", help="how many at once, one after another")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one round of one way")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--batch-delay-ms", type=float, help="as of 'splitfleet serve', whose default it is")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    seconds = arguments.seconds
    counts = [int(each) for each in arguments.clients.split(",")]
    options = ["--max-batch", str(arguments.max_batch)]
    if arguments.batch_delay_ms is not None:
        options += ["--batch-delay-ms", str(arguments.batch_delay_ms)]

    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        (Path(temporary) / "bundle").mkdir()
        folder = make_bundle(Path(temporary) / "bundle")
        from edge_sdk.bundle import Bundle

        digest = Bundle.open(folder).digest
        engine = load_engine(folder)
        engine.warm({"feature_0": np.zeros((max(counts), *SHAPE), np.int8)})
        expected = {seed: engine.run({"feature_0": features(seed)})["output_0"][0] for seed in range(max(counts))}
        served = stack.enter_context(running_server(folder, options, digest))
        bare = stack.enter_context(running_bare_loop(folder, arguments.max_batch))
        echo = stack.enter_context(running_bare_loop(None, 1))
        rounds: dict[tuple[str, int], list[Figures]] = {}
        for _ in range(arguments.rounds):
            for clients in counts:
                ways: dict[str, Callable[[], Figures]] = {
                    "ceiling": partial(ceiling, engine, clients, seconds),
                    "bare loop": partial(closed_loop, *bare, "", clients, seconds, expected),
                    "splitfleet": partial(closed_loop, *served, digest, clients, seconds, expected),
                    "echo": partial(closed_loop, *echo, "", clients, seconds, None),
                }
                for way, measure in ways.items():
                    result = measure()
                    rounds.setdefault((way, clients), []).append(result)
                    print(f"  {way} ×{clients}: {result.requests_per_s:.0f}/s", file=sys.stderr)
    report(rounds, counts, arguments)


def report(rounds: dict[tuple[str, int], list[Figures]], counts: list[int], arguments: argparse.Namespace) -> None:
    medians = {key: median(each) for key, each in rounds.items()}
    print(f"{'clients':>7}  {'way':12}{'req/s':>8}{'p50 ms':>9}{'p99 ms':>9}{'cpu ms':>8}{'× bare':>8}")
    for clients in counts:
        bare = medians["bare loop", clients]
        for way in ("ceiling", "bare loop", "splitfleet", "echo"):
            it = medians[way, clients]
            cpu = "" if it.cpu_ms is None else f"{it.cpu_ms:.2f}"
            ratio = it.requests_per_s / bare.requests_per_s
            print(f"{clients:7}  {way:12}{it.requests_per_s:8.0f}{it.p50_ms:9.2f}{it.p99_ms:9.2f}{cpu:>8}{ratio:8.2f}")
    if 1 in counts:
        alone = medians["splitfleet", 1].p50_ms - medians["echo", 1].p50_ms - medians["ceiling", 1].p50_ms
        print(f"one request alone: p50 is {alone:+.2f} ms beyond raw echo and computation")
    if arguments.json:
        document = {
            "cores": len(os.sched_getaffinity(0)),
            "max_batch": arguments.max_batch,
            "batch_delay_ms": arguments.batch_delay_ms,
            "seconds": arguments.seconds,
            "rounds": arguments.rounds,
            "figures": [{"way": way, "clients": clients, **asdict(medians[way, clients])} for way, clients in medians],
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
