"""Bundles whose heads are real int8 TFLite files, and a scripted peer behind a real ROUTER socket.

Nothing here imports TensorFlow: the heads are made in a process of their own, once per run. In the second runtime's
venv, where there is no TensorFlow, ``$SPLITFLEET_TEST_BUNDLES`` names the folder that the first run made.
"""

import hashlib
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import zmq

from edge_sdk import manifest as m
from edge_sdk.errors import SplitfleetError, UnknownBlobError, UnknownMethodError, to_wire
from edge_sdk.runtime import Interpreter
from edge_sdk.self_check import observe, self_check_inputs
from edge_sdk.wire import Message, MessageType, Tensor, decode, encode

sys.path.append(str(Path(__file__).parent / "library"))

SEED = 7


def _bundle(folder, cut, inputs, crossing, outputs, head=None):
    """Write a bundle around the head file ``head``; its quantization is read from the file."""
    folder.mkdir()
    contents = {}
    self_check = None
    scales = {}
    if head is not None:
        contents[m.HEAD_FILE] = head.read_bytes()
        interpreter = Interpreter(head)
        scales = {
            key: {"scale": info.scale, "zero_point": info.zero_point}
            for key, info in (interpreter.inputs | interpreter.outputs).items()
            if info.scale is not None
        }
    input_specs = tuple(
        m.InputSpec(name=name, shape=shape, dtype=dtype, **scales.get(f"input_{number}", {}))
        for number, (name, shape, dtype) in enumerate(inputs)
    )
    if head is not None:
        made = self_check_inputs(input_specs, SEED)
        self_check = m.SelfCheck(seed=SEED, expected=observe(interpreter.run(made)))
    if any(side == "tail" for _, side, _ in outputs):
        contents["tail/saved_model.pb"] = b"not a real tail: the tests' peer is one"
    files = []
    for name, data in contents.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        files.append(m.FileEntry(path=name, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data)))
    document = m.Manifest(
        task="test",
        model=m.ModelRef(name="tiny", sha256="0" * 64),
        cut=m.Cut(k=cut[0], n=cut[1], name="layer"),
        precision="int8",
        inputs=input_specs,
        crossing=tuple(
            m.CrossingSpec(name=f"feature_{number}", source="layer", shape=shape, dtype="int8", **quantization)
            for number, (shape, quantization) in enumerate(
                (shape, quantization or scales[f"feature_{number}"])
                for number, (shape, quantization) in enumerate(crossing)
            )
        ),
        outputs=tuple(
            m.OutputSpec(
                name=name,
                side=side,
                shape=shape,
                dtype="float32",
                **(scales.get(f"output_{number}", {}) if side == "head" else {}),
            )
            for number, (name, side, shape) in enumerate(outputs)
        ),
        files=tuple(files),
        self_check=self_check,
        cumulative_bytes=1000,
    )
    (folder / m.MANIFEST_FILE).write_bytes(document.canonical())


def _make_bundles(folder, heads):
    image = ("image", (8, 8, 1), "float32")
    _bundle(
        folder / "split",
        (1, 3),
        [image],
        [((4, 4, 4), None)],
        [("scores", "tail", (3,)), ("early", "head", (3,))],
        heads / "split.tflite",
    )
    _bundle(folder / "whole", (3, 3), [image], [], [("scores", "head", (3,))], heads / "whole.tflite")
    _bundle(
        folder / "pair",
        (2, 2),
        [("vector", (4,), "float32"), ("index", (1,), "int32")],
        [],
        [("mix", "head", (3,))],
        heads / "pair.tflite",
    )
    _bundle(
        folder / "raw", (0, 3), [image], [((8, 8, 1), {"scale": 1.0, "zero_point": -128})], [("scores", "tail", (3,))]
    )


@pytest.fixture(scope="session")
def prebuilt_bundles(tmp_path_factory):
    """Folder with the bundles ``split``, ``whole``, ``pair`` and ``raw``. Tests must not change it."""
    if made_before := os.environ.get("SPLITFLEET_TEST_BUNDLES"):
        return Path(made_before)
    folder = tmp_path_factory.mktemp("bundles")
    heads = tmp_path_factory.mktemp("heads")
    script = Path(__file__).with_name("make_heads.py")
    process = subprocess.run([sys.executable, script, heads], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    _make_bundles(folder, heads)
    return folder


@pytest.fixture
def bundles(prebuilt_bundles, tmp_path):
    """The same, a copy for one test to break."""
    return Path(shutil.copytree(prebuilt_bundles, tmp_path / "bundles"))


class Peer:
    """A ROUTER that answers each message with ``handler(message, peer)``: a message, several, or ``None`` for silence.

    An error that the handler raises becomes an ERROR.
    """

    def __init__(self, handler, endpoint="tcp://127.0.0.1:*"):
        self.handler = handler
        self.received = []
        self.identities = []
        self._outgoing = queue.Queue()
        self._stopping = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def send(self, message, identity=None):
        """Send on one's own account, to whoever wrote last."""
        self.send_frames(encode(message), identity)

    def send_frames(self, frames, identity=None):
        self._outgoing.put([identity or self.identities[-1], *frames])

    def stop(self):
        self._stopping = True
        self._thread.join()
        self._context.term()

    def _serve(self):
        while not self._stopping:
            while not self._outgoing.empty():
                self._socket.send_multipart(self._outgoing.get())
            if not self._socket.poll(10):
                continue
            identity, *frames = self._socket.recv_multipart()
            message = decode(frames)
            self.identities.append(identity)
            self.received.append(message)
            try:
                answers = self.handler(message, self)
            except SplitfleetError as error:
                answers = Message(type=MessageType.ERROR, request_id=message.request_id, body=to_wire(error))
            if answers is not None:
                for answer in answers if isinstance(answers, list) else [answers]:
                    self._socket.send_multipart([identity, *encode(answer)])
        self._socket.close()


@pytest.fixture
def start_peer():
    """Start peers; they are stopped after the test."""
    peers = []

    def start(handler, endpoint="tcp://127.0.0.1:*"):
        peers.append(Peer(handler, endpoint))
        return peers[-1]

    yield start
    for peer in peers:
        peer.stop()


def reply(message, body=None, tensors=()):
    return Message(type=MessageType.REPLY, request_id=message.request_id, body=body or {}, tensors=tuple(tensors))


def tail(message, peer):  # noqa: ARG001
    """A tail for the bundles ``split`` and ``raw``: three means of the dequantized feature."""
    assert message.type is MessageType.INFER
    (feature,) = message.tensors
    real = (feature.data.astype(np.float32) - feature.zero_point) * feature.scale
    scores = np.stack([real.mean(), real.max(), real.min()])[np.newaxis].astype(np.float32)
    return Message(
        type=MessageType.RESULT,
        request_id=message.request_id,
        bundle=message.bundle,
        body={"cloud_s": 0.0},
        tensors=(Tensor(name="output_0", data=scores),),
    )


class BlobHandler:
    """Answers ``blob.*`` from ``blobs`` (by SHA-256), and passes on what else comes."""

    def __init__(self, otherwise=None):
        self.blobs = {}
        self.fetched = []
        self._otherwise = otherwise
        self._incoming = {}

    def add(self, data):
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    def add_bundle(self, folder):
        for path in folder.rglob("*"):
            if path.is_file():
                self.add(path.read_bytes())
        return hashlib.sha256((folder / m.MANIFEST_FILE).read_bytes()).hexdigest()

    def __call__(self, message, peer):
        body = message.body
        if message.method == "blob.stat":
            blob = self.blobs.get(body["sha256"])
            return reply(message, {"size": None if blob is None else len(blob)})
        if message.method == "blob.fetch":
            if body["sha256"] not in self.blobs:
                raise UnknownBlobError(body["sha256"])
            self.fetched.append((body["sha256"], body["offset"]))
            piece = self.blobs[body["sha256"]][body["offset"] :][: body["length"]]
            return reply(message, tensors=[Tensor(name="chunk", data=np.frombuffer(piece, np.uint8))])
        if message.method == "blob.put":
            data = self._incoming.get(body["sha256"], b"") + message.arrays()["chunk"].tobytes()
            self._incoming[body["sha256"]] = data
            if len(data) == body["size"]:
                self.add(data)
            return reply(message, {"received": len(data)})
        if self._otherwise is not None:
            return self._otherwise(message, peer)
        raise UnknownMethodError(f"no {message.method}")


@pytest.fixture
def tail_handler():
    return tail


@pytest.fixture
def blob_handler():
    return BlobHandler


@pytest.fixture
def make_reply():
    return reply


@pytest.fixture
def image():
    return np.random.default_rng(3).random((8, 8, 1)).astype(np.float32)


@pytest.fixture
def wait_until():
    """Wait for a condition that another thread or process brings about; fails after half a minute."""

    def wait(condition, what="the condition"):
        changed = threading.Event()
        for _ in range(3000):
            if value := condition():
                return value
            changed.wait(0.01)
        raise AssertionError(f"waited in vain for {what}")

    return wait


@pytest.fixture
def free_endpoint():
    """An endpoint where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
