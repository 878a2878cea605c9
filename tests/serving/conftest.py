"""A server in a thread with engines under the test's control, peers that speak raw frames, and bundles made by hand."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from cloud_server.batches import BatchLimits
from cloud_server.blob_calls import BlobCalls
from cloud_server.curve import ServerCurve
from cloud_server.engines.base import Arrays, TailEngine
from cloud_server.fleet import Fleet
from cloud_server.loop import Loop
from cloud_server.repository import ArtifactRepository
from cloud_server.router import Router
from cloud_server.server import Server
from cloud_server.tails import TailHost
from cloud_server.workers.crew import CrewLimits
from cloud_server.workers.host import Host
from edge_sdk.bundle import Bundle
from edge_sdk.errors import SplitfleetError, from_wire
from edge_sdk.manifest import (
    HEAD_FILE,
    MANIFEST_FILE,
    TAIL_TFLITE_FILE,
    CrossingSpec,
    Cut,
    FileEntry,
    InputSpec,
    Manifest,
    ModelRef,
    OutputSpec,
)
from edge_sdk.protocol import NOTICE_ID, Body, Register, Resources
from edge_sdk.wire import Message, MessageType, Tensor, decode, encode

sys.path.append(str(Path(__file__).parent / "library"))

PATIENCE_MS = 20_000
SPLITFLEET = (sys.executable, "-c", "from cloud_server.cli import main; main()")
FEATURE_SHAPE = (2, 3)


class Peer:
    """A DEALER that sends what it is told and shows what comes back."""

    def __init__(self, endpoint: str, context: zmq.Context) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self._ids = itertools.count(1)
        self.notices: list[SplitfleetError] = []

    def send_frames(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    def send(self, message: Message) -> None:
        self.socket.send_multipart(encode(message))

    def receive(self, timeout_ms: int = PATIENCE_MS) -> Message:
        """The next message that is no notice; notices are kept."""
        while True:
            assert self.socket.poll(timeout_ms), "no message came"
            message = decode(self.socket.recv_multipart())
            if message.request_id != NOTICE_ID:
                return message
            self.notices.append(from_wire(message.body))

    def has_message(self) -> bool:
        return bool(self.socket.poll(0))

    def begin(self, call: Body, *, tensors: tuple[Tensor, ...] = (), budget_s: float | None = None) -> int:
        """Send a CALL; returns its id."""
        request_id = next(self._ids)
        self.send(
            Message(
                type=MessageType.CALL,
                request_id=request_id,
                method=call.method,
                body=call.to_body(),
                tensors=tensors,
                budget_s=budget_s,
            )
        )
        return request_id

    def begin_infer(self, digest: str | None, *tensors: Tensor, budget_s: float | None = None) -> int:
        request_id = next(self._ids)
        self.send(
            Message(type=MessageType.INFER, request_id=request_id, bundle=digest, tensors=tensors, budget_s=budget_s)
        )
        return request_id

    def end_of(self, request_id: int) -> Message:
        """The answer to a request, which is the next message; raises what an ERROR stands for."""
        answer = self.receive()
        assert answer.request_id == request_id
        if answer.type is MessageType.ERROR:
            raise from_wire(answer.body)
        return answer

    def call(self, call: Body, *, tensors: tuple[Tensor, ...] = (), budget_s: float | None = None) -> Message:
        return self.end_of(self.begin(call, tensors=tensors, budget_s=budget_s))

    def infer(self, digest: str | None, *tensors: Tensor, budget_s: float | None = None) -> Message:
        return self.end_of(self.begin_infer(digest, *tensors, budget_s=budget_s))

    def close(self) -> None:
        self.socket.close()


class FakeEngine(TailEngine):
    """Gives each sample's features as floats. While ``gate`` is cleared, a run waits in it."""

    name = "fake"
    reason = "the test wants it"

    def __init__(self) -> None:
        self.runs = 0
        self.samples: list[float] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.error: Exception | None = None
        self.closed = threading.Event()

    @classmethod
    def load(cls, bundle: Bundle) -> FakeEngine:  # noqa: ARG003
        return cls()

    def warm(self, features: Arrays) -> None:
        self.run(features)

    def run(self, features: Arrays) -> dict[str, np.ndarray]:
        self.entered.release()
        assert self.gate.wait(PATIENCE_MS / 1000)
        self.runs += 1
        if self.error is not None:
            raise self.error
        data = features["feature_0"]
        self.samples += [float(sample.flat[0]) for sample in data]
        return {"output_0": data.reshape(len(data), -1).astype(np.float32)}

    def close(self) -> None:
        self.closed.set()


@dataclass
class FakeRegistry:
    """Remembers what it was told."""

    active: list[str] = field(default_factory=list)
    recorded: list[Register] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    error: Exception | None = None

    def record_device(self, register: Register, *, now: Any) -> None:
        assert now.tzinfo is not None
        if self.error is not None:
            raise self.error
        self.recorded.append(register)

    def mark_seen(self, device_id: str, now: Any) -> None:  # noqa: ARG002
        self.seen.append(device_id)

    def active_bundles(self) -> list[str]:
        if self.error is not None:
            raise self.error
        return self.active


class ThreadWorker:
    """A worker that is a thread of this process, behind real sockets; it can be killed, too."""

    def __init__(self, control: socket.socket, load_engine: Callable[[Bundle], TailEngine], max_batch: int) -> None:
        # The server closes what it passes on.
        self._control = control.dup()
        # Each tail takes 100 bytes, as it says.
        self.host = Host(
            self._control,
            load_engine=load_engine,
            max_batch=max_batch,
            rss_bytes=lambda: 100 * len(self.host.tails),
        )
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        self.how: str | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        self.host.serve()
        self.end("ended with exit code 0")

    def end(self, how: str) -> None:
        """Die, as far as the server can see."""
        with self._lock:
            if self.how is not None:
                return
            self.how = how
        for end in (*(tail.line for tail in self.host.tails), self._control):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        os.eventfd_write(self.descriptor, 1)
        self._ended.set()

    def ending(self) -> str | None:
        return self.how

    def rss_bytes(self) -> int | None:
        return None

    def kill(self) -> None:
        self.end("was ended by SIGKILL")

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        assert self._ended.wait(PATIENCE_MS / 1000)
        os.close(self.descriptor)


class RunningServer:
    """A server in a thread of its own, and all of its parts; so are its workers."""

    def __init__(
        self,
        folder: Path,
        *,
        load_engine: Callable[[Bundle], TailEngine] | None = None,
        limits: BatchLimits | None = None,
        offline_after_s: float = 0.3,
        registry: FakeRegistry | None = None,
        curve: ServerCurve | None = None,
        grace_s: float = 5.0,
        crew: CrewLimits | None = None,
        launcher: Callable[..., Any] | None = None,
    ) -> None:
        self.folder = folder
        self.engines: list[FakeEngine] = []
        self.registry = registry or FakeRegistry()
        self.repository = ArtifactRepository(folder / "repository")
        self.workers: list[ThreadWorker] = []
        self._load_engine = load_engine or self._load
        self._max_batch = (limits or BatchLimits()).max_batch
        self.loop = Loop()
        # Real processes, where a test says so.
        self._launcher = None if launcher is None else launcher(self.loop, max_batch=self._max_batch)
        launch = self._launcher or self._launch
        self.tails = TailHost(
            self.repository, folder / "tails", loop=self.loop, launch=launch, limits=limits, crew=crew
        )
        self.server = Server(
            Router("tcp://127.0.0.1:*", curve=curve),
            loop=self.loop,
            fleet=Fleet(offline_after_s=offline_after_s),
            tails=self.tails,
            blobs=BlobCalls(self.repository),
            registry=self.registry,
            grace_s=grace_s,
        )
        self.ended: bool | None = None
        self._context = zmq.Context()
        self._peers: list[Peer] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _launch(self, number: int, control: socket.socket, on_silence: Callable[[], None]) -> ThreadWorker:  # noqa: ARG002
        self.workers.append(ThreadWorker(control, self._load_engine, self._max_batch))
        return self.workers[-1]

    def in_loop(self, call: Callable[[], Any]) -> Any:
        """What ``call`` gives in the I/O thread."""
        outcome: Future[Any] = Future()

        def run() -> None:
            try:
                outcome.set_result(call())
            except Exception as error:
                outcome.set_exception(error)

        self.loop.mailbox.post(run)
        return outcome.result(PATIENCE_MS / 1000)

    def under_way(self) -> int:
        """How many requests the server has not ended."""
        return self.in_loop(lambda: self.server.under_way)

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """The I/O thread does nothing meanwhile."""
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            go_on.wait(PATIENCE_MS / 1000)

        self.loop.mailbox.post(hold)
        assert held.wait(PATIENCE_MS / 1000)
        try:
            yield
        finally:
            go_on.set()

    def _load(self, bundle: Bundle) -> TailEngine:
        self.engines.append(FakeEngine.load(bundle))
        return self.engines[-1]

    def _run(self) -> None:
        self.ended = self.server.run()

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    def peer(self) -> Peer:
        self._peers.append(Peer(self.endpoint, self._context))
        return self._peers[-1]

    def ready(self, bundle: Bundle) -> FakeEngine:
        """Load a bundle's tail; returns its engine, with the runs of warming it forgotten."""
        self.repository.add_bundle(bundle)
        self.tails.load(bundle.digest)
        engine = self.engines[-1]
        engine.runs = 0
        engine.samples.clear()
        engine.entered = threading.Semaphore(0)
        return engine

    def stop(self) -> None:
        self.server.stop()

    def join(self) -> None:
        self._thread.join(PATIENCE_MS / 1000)
        assert not self._thread.is_alive()

    def close(self) -> None:
        for engine in self.engines:
            engine.gate.set()
        self.stop()
        self.join()
        if self._launcher is not None:
            self._launcher.close()
        for peer in self._peers:
            peer.close()
        self._context.term()


@pytest.fixture
def connect() -> Iterator[Callable[[str], Peer]]:
    """Connect a peer to a server that is not :class:`RunningServer`."""
    context = zmq.Context()
    peers: list[Peer] = []

    def make(endpoint: str) -> Peer:
        peers.append(Peer(endpoint, context))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()
    context.term()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Start a server; it is stopped after the test."""
    numbers = itertools.count()
    with ExitStack() as stack:

        def begin(*, folder_of: RunningServer | None = None, **options: Any) -> RunningServer:
            folder = tmp_path / f"server{next(numbers)}" if folder_of is None else folder_of.folder
            running = RunningServer(folder, **options)
            stack.callback(running.close)
            return running

        yield begin


@pytest.fixture
def running(start: Callable[..., RunningServer]) -> RunningServer:
    return start()


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[..., Bundle]:
    """Make a bundle whose files hold what the test says; without a tail when ``tail`` is empty."""

    def make(
        name: str = "bundle",
        *,
        tail: dict[str, bytes] | None = None,
        tail_tflite: bytes | None = None,
        tail_tflite_reason: str = "",
        shape: tuple[int, ...] = FEATURE_SHAPE,
        features: int = 1,
        dtype: str = "int8",
        output_shape: tuple[int, ...] | None = None,
    ) -> Bundle:
        tail = {"saved_model.pb": name.encode()} if tail is None else tail
        contents = {HEAD_FILE: b"head of " + name.encode()} | {f"tail/{path}": data for path, data in tail.items()}
        contents |= {} if tail_tflite is None else {TAIL_TFLITE_FILE: tail_tflite}
        folder = tmp_path / "bundles" / name
        for path, data in contents.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        manifest = Manifest(
            task="test",
            model=ModelRef(name=name, sha256=hashlib.sha256(name.encode()).hexdigest()),
            cut=Cut(k=3 if tail else 7, n=7, name="layer"),
            precision="int8",
            inputs=(InputSpec(name="image", shape=(4, 4), dtype="float32", scale=0.5, zero_point=0),),
            crossing=tuple(
                CrossingSpec(name=f"feature_{i}", source="layer", shape=shape, dtype=dtype, scale=0.1, zero_point=3)
                for i in range(features if tail else 0)
            ),
            outputs=(
                OutputSpec(
                    name="label",
                    side="tail" if tail else "head",
                    shape=(int(np.prod(shape)),) if output_shape is None else output_shape,
                    dtype="float32",
                ),
            ),
            files=tuple(
                FileEntry(path=path, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
                for path, data in contents.items()
            ),
            self_check=None,
            cumulative_bytes=1,
            tail_tflite_reason=tail_tflite_reason,
        )
        (folder / MANIFEST_FILE).write_bytes(manifest.canonical())
        return Bundle.open(folder)

    return make


@pytest.fixture
def make_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def feature() -> Callable[..., Tensor]:
    """A feature tensor of one sample that is filled with a number."""

    def make(value: int = 1, *, batch: int = 1, shape: tuple[int, ...] = FEATURE_SHAPE, **changes: Any) -> Tensor:
        data = np.full((batch, *shape), value, changes.pop("dtype", np.int8))
        return Tensor(name=changes.pop("name", "feature_0"), data=data, **changes)

    return make


@pytest.fixture
def registration() -> Callable[..., Register]:
    def make(device_id: str = "cam-1", **changes: Any) -> Register:
        resources = Resources(
            ram_bytes=2**30, ram_available_bytes=2**29, cores=4, architecture="aarch64", runtimes={"litert": "2.3"}
        )
        return Register(**{"device_id": device_id, "resources": resources, "model_ram_bytes": 8_000_000} | changes)

    return make


@pytest.fixture
def raises_wire() -> Callable[..., Any]:
    """``pytest.raises`` for an error whose text holds all of the given pieces."""

    def expect(kind: type[SplitfleetError], *pieces: str) -> Any:
        return pytest.raises(kind, match="".join(f"(?=.*{piece})" for piece in pieces) or None)

    return expect


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Files of small SavedModels by what is right or wrong with them. ``good``: ``output_0 = 0.1 (x - 3)``, flat;
    ``endless`` does not end for features above 0, and is quick for zeros.
    """
    from cloud_server.engines.tensorflow_engine import import_tensorflow

    tf = import_tensorflow()

    class Tail(tf.Module):
        def __init__(self) -> None:
            self.scale = tf.Variable(0.1)

        @tf.function
        def __call__(self, feature_0: Any) -> dict[str, Any]:
            real = self.scale * (tf.cast(feature_0, tf.float32) - 3.0)
            return {"output_0": tf.reshape(real, (-1, 6))}

        @tf.function
        def endless(self, feature_0: Any) -> dict[str, Any]:
            turns = 1_000_000_000 * tf.cast(tf.reduce_max(feature_0), tf.int32)
            _, x = tf.while_loop(lambda i, _: i < turns, lambda i, x: (i + 1, tf.sin(x)), (0, 1.0))
            return {"output_0": tf.reshape(tf.cast(feature_0, tf.float32), (-1, 6)) + x}

    tail = Tail()
    good = tail.__call__.get_concrete_function(tf.TensorSpec((None, *FEATURE_SHAPE), tf.int8, name="feature_0"))
    other = tail.__call__.get_concrete_function(tf.TensorSpec((None, *FEATURE_SHAPE), tf.int8, name="image"))
    endless = tail.endless.get_concrete_function(tf.TensorSpec((None, *FEATURE_SHAPE), tf.int8, name="feature_0"))
    signatures = {
        "good": {"serving_default": good},
        "other_input": {"serving_default": other},
        "unsigned": {"x": good},
        "endless": {"serving_default": endless},
    }
    found = {}
    for name, signature in signatures.items():
        folder = tmp_path_factory.mktemp(name)
        tf.saved_model.save(tail, str(folder), signatures=signature)
        found[name] = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return found


class Served:
    """``splitfleet serve`` as a process that is ready."""

    def __init__(self, home: Path, *options: str) -> None:
        self.ready_file = home.parent / f"{home.name}.json"
        self.process = subprocess.Popen(
            [*SPLITFLEET, "serve", "--home", str(home), "--ready-file", str(self.ready_file), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []
        self.await_line("splitfleet serves at ")
        self.ready: dict[str, Any] = json.loads(self.ready_file.read_text())

    def await_line(self, piece: str) -> str:
        """Read stderr up to a line with ``piece`` in it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if piece in line:
                return line
        raise AssertionError("".join(self.said))

    @property
    def server(self) -> psutil.Process:
        """The process that owns the socket, under the supervisor."""
        (server,) = psutil.Process(self.process.pid).children()
        return server

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Signal it; returns exit code, stdout and all of stderr."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=3 * PATIENCE_MS / 1000)
        return self.process.returncode, out, "".join(self.said) + err


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Run ``splitfleet serve``; it is ended after the test."""
    started: list[Served] = []

    def start(*options: str, home: Path = tmp_path / "home") -> Served:
        started.append(Served(home, *(options or ("--bind", "tcp://127.0.0.1:*"))))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()


@pytest.fixture(scope="session")
def tail_tflites() -> dict[str, bytes]:
    """TensorFlow Lite models beside ``saved_models``: ``good`` computes the same, ``wrong`` twice as much, the others
    take something else.
    """
    from cloud_server.engines.tensorflow_engine import import_tensorflow

    tf = import_tensorflow()

    def made(scale: float, name: str = "feature_0", dtype: Any = None) -> bytes:
        module = tf.Module()
        spec = tf.TensorSpec((None, *FEATURE_SHAPE), dtype or tf.int8, name=name)
        module.run = tf.function(
            lambda x: {"output_0": tf.reshape(scale * (tf.cast(x, tf.float32) - 3.0), (-1, 6))}, [spec]
        )
        converter = tf.lite.TFLiteConverter.from_concrete_functions([module.run.get_concrete_function()], module)
        data: bytes = converter.convert()
        return data

    return {
        "good": made(0.1),
        "wrong": made(0.2),
        "other_input": made(0.1, name="image"),
        "other_dtype": made(0.1, dtype=tf.float32),
    }
