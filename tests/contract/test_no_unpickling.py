"""Nothing that comes over the wire is ever unpickled, or run: by what the code says, and by trying."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from edge_sdk.channel import Channel
from edge_sdk.errors import BundleError, InvalidInputError, SplitfleetError
from edge_sdk.evaluation_run import open_inputs
from edge_sdk.manifest import CrossingSpec, Cut, FileEntry, InputSpec, Manifest, ModelRef, OutputSpec
from edge_sdk.protocol import ListDevices, LoadTail, PutBlob, Run
from edge_sdk.wire import MAGIC, Message, MessageType, Tensor, encode

PATIENCE_S = 60.0
# By which module a process on the wire path begins.
PATHS = {
    "server": ("cloud_server.cli.serve", "cloud_server.server", "cloud_server.tails", "cloud_server.workers.launch"),
    "server with CURVE and HTTP": ("cloud_server.curve", "cloud_server.monitor", "cloud_server.supervisor"),
    "worker": ("cloud_server.workers.process", "cloud_server.workers.host", "cloud_server.engines.choice"),
    "device": ("edge_sdk.agent", "edge_sdk.client", "edge_sdk.repository_client", "edge_sdk.cli"),
}
# Each can make objects of bytes, or run them. (A multiprocessing connection unpickles what it receives.)
FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "multiprocessing",
    "code",
}
FORBIDDEN_NAMES = {
    *("eval", "exec", "compile", "__import__", "recv_pyobj", "send_pyobj", "recv_serialized"),
    *("ext_hook", "object_hook", "object_pairs_hook", "list_hook", "unsafe_load", "full_load"),
}


def modules_of(path: str) -> list[str]:
    """Our own modules that such a process imports, on the way to its work."""
    program = (
        f"import sys, {', '.join(PATHS[path])}\n"
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in ('cloud_server', 'edge_sdk')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def faults_in(source: str) -> list[str]:
    """What in a module could unpickle, or run text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0], *(alias.name for alias in node.names)]
        forbidden = [name for name in names if name in FORBIDDEN_MODULES]
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            forbidden.append(node.id)
        # Of a module or an object: re.compile is another compile.
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_NAMES - {"compile"}:
            forbidden.append(node.attr)
        if isinstance(node, ast.keyword) and node.arg in FORBIDDEN_NAMES:
            forbidden.append(node.arg)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            allowed = not isinstance(node.value, ast.Constant) or node.value.value is not False
            forbidden += ["allow_pickle"] if allowed else []
        found += [f"line {getattr(node, 'lineno', '?')}: {name}" for name in forbidden]
    return found


@pytest.mark.parametrize("path", PATHS)
def test_no_module_on_the_wire_path_can_unpickle(path: str) -> None:
    modules = modules_of(path)
    assert set(PATHS[path]) <= set(modules)
    faults = {}
    for name in modules:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        if found := faults_in(Path(spec.origin).read_text()):
            faults[name] = found
    assert faults == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import marshal as m",
        "from multiprocessing.connection import Client",
        "socket.recv_pyobj()",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=trusted)",
        "msgpack.unpackb(data, ext_hook=f)",
        "json.loads(text, object_hook=f)",
        "eval(text)",
        "yaml.unsafe_load(text)",
    ],
)
def test_the_check_sees_what_it_looks_for(source: str) -> None:
    assert faults_in(source)


def test_the_check_lets_pass_what_is_harmless() -> None:
    assert faults_in("import re, json\nre.compile(x)\nnp.load(p, allow_pickle=False)\nmsgpack.unpackb(d)") == []


def manifest_of(sha256: str, size_bytes: int) -> Manifest:
    """Of a bundle each of whose files is the same."""
    names = ("head.tflite", "tail/saved_model.pb", "tail/variables/variables.index", "tail.tflite")
    return Manifest(
        task="test",
        model=ModelRef(name="m", sha256="0" * 64),
        cut=Cut(k=1, n=2, name="layer"),
        precision="int8",
        inputs=(InputSpec(name="x", shape=(), dtype="float32"),),
        crossing=(CrossingSpec(name="feature_0", source="layer", shape=(2,), dtype="int8", scale=0.1, zero_point=3),),
        outputs=(OutputSpec(name="label", side="tail", shape=(2,), dtype="float32"),),
        files=tuple(FileEntry(path=name, sha256=sha256, size_bytes=size_bytes) for name in names),
        self_check=None,
        cumulative_bytes=1,
    )


class Bombs:
    """Pickles that leave a mark when anybody opens them, and what of them was opened."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "opened"
        self.opened = folder / "find_class.log"
        command = f"touch {self.mark}".encode()
        # Protocol 0 in its text form, and protocol 4.
        by_text = b"cos\nsystem\n(S'" + command + b"'\ntR."
        by_number = b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes((len(command),)) + command + b"\x85R."
        self.all = (by_text, by_number)

    def check(self) -> None:
        """Nobody opened one."""
        assert not self.mark.exists()
        if self.opened.exists():
            assert "system" not in self.opened.read_text()


@pytest.fixture
def bombs(tmp_path: Path) -> Bombs:
    return Bombs(tmp_path)


def test_the_bombs_are_sharp(bombs: Bombs) -> None:
    for bomb in bombs.all:
        subprocess.run(
            [sys.executable, "-c", "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"], input=bomb, check=True
        )
        assert bombs.mark.exists()
        bombs.mark.unlink()


def messages_with(bomb: bytes) -> list[list[bytes]]:
    """Messages that hold ``bomb`` in each frame and each field."""
    text = bomb.decode("latin-1")
    call = {"id": 5, "method": ListDevices.method, "body": ListDevices().to_body()}
    spec = ["chunk", "uint8", [len(bomb)], None, None, "raw"]
    put = {"id": 6, "method": PutBlob.method, "body": PutBlob(sha256="0" * 64, size=9**9, offset=0).to_body()}
    headers: list[dict[str, Any]] = [
        call | {key: value}
        for key in ("id", "method", "bundle", "budget", "body", "tensors", "x")
        for value in (bomb, text)
    ]
    headers += [put | {"body": put["body"] | {key: value}} for key in put["body"] for value in (bomb, text)]
    headers += [call | {"body": {"x": {"y": [value]}}} for value in (bomb, text)]
    headers += [call | {text: 1}, {"id": 7, "method": "fleet.call", "body": {"params": {text: bomb}}}]
    # An extension of msgpack, which a hook could take for an object.
    headers += [call | {"x": msgpack.ExtType(number, bomb)} for number in (0, 42, 127)]
    found = [[MAGIC + bytes((1, kind, 0, 0)), msgpack.packb(header)] for header in headers for kind in (1, 2, 3, 4, 5)]
    for place in range(6):
        for dtype in ("uint8", "object", "O"):
            changed: list[Any] = [*spec]
            changed[1] = dtype
            if place != 1:
                changed[place] = text
            header = put | {"tensors": [changed]}
            found.append([MAGIC + bytes((1, 4, 0, 1)), msgpack.packb(header), bomb])
    tensor = Tensor(name="chunk", data=np.frombuffer(bomb, np.uint8))
    whole = [
        Message(type=MessageType.CALL, request_id=8, method=PutBlob.method, body=put["body"], tensors=(tensor,)),
        Message(type=MessageType.INFER, request_id=9, bundle="0" * 64, tensors=(tensor,)),
    ]
    found += [[bytes(frame) for frame in encode(message)] for message in whole]
    found += [[bomb], [bomb, bomb], [bomb] * 5, [MAGIC + bytes((1, 1, 0, 1)), bomb, bomb]]
    return found


# Python imports this first in every process that has its folder on the path: so each tells what it unpickles.
WATCH = """
import os, sys

def watch(event, arguments):
    if event == "pickle.find_class":
        with open({log!r}, "a") as file:
            file.write(f"{{os.getpid()}} {{arguments}}\\n")

sys.addaudithook(watch)
"""


@pytest.fixture
def server(tmp_path: Path, bombs: Bombs) -> Any:
    """A real server that is watched, with all of its processes; gives its endpoint."""
    watching = tmp_path / "watching"
    watching.mkdir()
    (watching / "sitecustomize.py").write_text(WATCH.format(log=str(bombs.opened)))
    ready = tmp_path / "ready.json"
    path = os.pathsep.join((str(watching), os.environ.get("PYTHONPATH", "")))
    arguments = ["serve", "--bind", "tcp://127.0.0.1:*", "--home", str(tmp_path / "home"), "--ready-file", str(ready)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "from cloud_server.cli import main; main()", *arguments],
            env=os.environ | {"PYTHONPATH": path},
            stderr=log,
        )
    deadline = time.monotonic() + PATIENCE_S
    while not ready.exists():
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield json.loads(ready.read_text())["endpoint"]
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_server_opens_no_pickle_in_any_frame_or_field(server: str, bombs: Bombs) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, -1)
        dealer.connect(server)
        for bomb in bombs.all:
            for frames in messages_with(bomb):
                dealer.send_multipart(frames)
        with Channel(server) as channel:
            assert channel.call(ListDevices(), timeout_s=PATIENCE_S).body["devices"] == []
        dealer.send_multipart(encode(Message(type=MessageType.CALL, request_id=999, method=ListDevices.method)))
        while b"\xcd\x03\xe7" not in dealer.recv_multipart()[1]:
            pass
    bombs.check()


@pytest.mark.exhaustive
def test_neither_server_nor_worker_opens_a_pickle_in_a_file_of_a_bundle(server: str, bombs: Bombs) -> None:
    """In each file of a tail, and in the manifest."""
    with Channel(server) as channel:
        for bomb in bombs.all:
            sha256 = put(channel, bomb)
            for digest in (put(channel, manifest_of(sha256, len(bomb)).canonical()), sha256):
                with pytest.raises(BundleError):
                    channel.call(LoadTail(bundle=digest), timeout_s=PATIENCE_S)
    bombs.check()


def put(channel: Channel, data: bytes) -> str:
    sha256 = hashlib.sha256(data).hexdigest()
    tensor = Tensor(name="chunk", data=np.frombuffer(data, np.uint8))
    channel.call(PutBlob(sha256=sha256, size=len(data), offset=0), tensors=(tensor,), timeout_s=PATIENCE_S)
    return sha256


def test_a_client_opens_no_pickle_in_an_answer(bombs: Bombs) -> None:
    """From a server that sends nothing else."""
    stopping = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            while not stopping.is_set():
                if router.poll(20):
                    peer, preamble, *_ = router.recv_multipart()
                    # Not to what is said to such an answer.
                    for bomb in bombs.all if preamble[5] == MessageType.CALL else ():
                        for frames in messages_with(bomb):
                            router.send_multipart([peer, *frames])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with Channel(f"tcp://127.0.0.1:{port}") as channel:
                for _ in range(3):
                    with pytest.raises(SplitfleetError):
                        channel.call(ListDevices(), timeout_s=0.3)
                assert not channel.ended
        finally:
            stopping.set()
            thread.join()
    bombs.check()


def test_a_device_opens_no_pickle_in_its_inputs(bombs: Bombs, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {bombs.mark}",)

    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
    run = Run(bundle="0" * 64, inputs={"x": "0" * 64}, first=0, count=1)
    for data in (buffer.getvalue(), *bombs.all):
        path = tmp_path / "input.npy"
        path.write_bytes(data)
        with pytest.raises(InvalidInputError, match=r"is no \.npy file"):
            open_inputs(run, manifest_of("0" * 64, 1), {"x": path})
    bombs.check()
