"""The systems that are compared: how each is started for a tail, and how its clients reach it."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zmq

from benchmarks.peers import make_venvs
from benchmarks.serving.cli import SPLITFLEET
from benchmarks.serving.connections import AskError, Target, connect
from benchmarks.serving.processes import Processes
from benchmarks.serving.tails import Tail
from edge_sdk.channel import Channel
from edge_sdk.keys import CurveKeys, make_key_pair
from edge_sdk.protocol import LoadTail
from edge_sdk.repository_client import RepositoryClient

START_S = 180.0
CURVE_KEYS = 8
_SCRIPTS = Path(make_venvs.__file__).parent
_ROUTES = {"mosec": "/inference", "litserve": "/predict", "ray": "/predict"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a system is started for. ``cache`` holds the peers' environments, ``work`` is for the system's own files."""

    tail: Tail
    cores: frozenset[int]
    max_batch: int
    delay_ms: float
    cache: Path
    work: Path


@dataclass(frozen=True, kw_only=True)
class Running:
    """A system that answers; ``engine`` is what it runs the tail with."""

    target: Target
    processes: Processes
    engine: str = "tensorflow"


Start = Callable[[Setting], AbstractContextManager[Running]]


@contextmanager
def splitfleet(setting: Setting, *, engine: str = "tensorflow", curve: bool = False) -> Iterator[Running]:
    """``splitfleet serve``, with the bundle put and its tail loaded as ``splitfleet allocate`` does.

    What ``auto`` chooses is remembered from a run before, as on any machine that has served the tail once: the process
    that engines race in is not in the figures.
    """
    home = setting.work / "home"
    options: list[str | Path] = ["--home", home, "--engine", engine]
    options += ["--max-batch", str(setting.max_batch), "--batch-delay-ms", str(setting.delay_ms)]
    operator: CurveKeys | None = None
    devices: tuple[CurveKeys, ...] = ()
    if curve:
        options += ["--key", home / "keys" / "server.key"]
        operator, devices = _make_keys(home)
    if engine == "auto":
        with _served(setting, options, operator):
            pass
    crossing = setting.tail.crossing
    with _served(setting, options, operator) as (processes, endpoint, chosen):
        target = Target(
            kind="splitfleet",
            endpoint=endpoint,
            keys=devices,
            bundle=setting.tail.bundle.digest,
            scale=crossing.scale,
            zero_point=crossing.zero_point,
        )
        yield Running(target=target, processes=processes, engine=chosen)


@contextmanager
def _served(
    setting: Setting, options: list[str | Path], operator: CurveKeys | None
) -> Iterator[tuple[Processes, str, str]]:
    """The server's processes, its endpoint, and the engine that it runs the tail with."""
    ready = setting.work / "ready.json"
    ready.unlink(missing_ok=True)
    command: list[str | Path] = [*SPLITFLEET, "serve", "--bind", "tcp://127.0.0.1:*", "--ready-file", ready, *options]
    with Processes(command, cores=setting.cores, log=setting.work / "log") as processes:
        while not ready.exists():
            processes.require_alive()
            time.sleep(0.02)
        endpoint: str = json.loads(ready.read_text())["endpoint"]
        bundle = setting.tail.bundle
        with Channel(endpoint, connect_timeout_s=60.0, keys=operator) as channel:
            RepositoryClient(channel).put_bundle(bundle)
            loaded = channel.call(LoadTail(bundle=bundle.digest), timeout_s=START_S).body
        yield processes, endpoint, str(loaded["engine"])


def _make_keys(home: Path) -> tuple[CurveKeys, tuple[CurveKeys, ...]]:
    """A key of the server in its home, and allowed ones: an operator's, and of as many devices as there are clients."""
    from cloud_server.allow_list import AllowList, Holder, Role
    from cloud_server.home import Home
    from edge_sdk.keys import write_key_pair

    server = write_key_pair(Home.at(home).keys, "server", role="server")
    allowed = AllowList(Home.at(home).allowed_keys)

    def allow(name: str, role: Role) -> CurveKeys:
        public, secret = make_key_pair()
        allowed.allow(Holder(name=name, role=role, public=public))
        return CurveKeys(public=public, secret=secret, server=server.public, name=name)

    devices = tuple(allow(f"device-{number}", Role.DEVICE) for number in range(CURVE_KEYS))
    return allow("operator", Role.OPERATOR), devices


@contextmanager
def bare(setting: Setting, *, echo: bool = False) -> Iterator[Running]:
    """The bare loop; with ``echo`` it runs nothing."""
    what = ["--echo-bytes", str(setting.tail.expected[0].nbytes)] if echo else ["--tail", setting.tail.bundle.tail_path]
    command: list[str | Path] = [
        sys.executable,
        _SCRIPTS / "bare_loop.py",
        *what,
        "--max-batch",
        str(setting.max_batch),
    ]
    port = _free_port()
    with Processes([*command, "--port", str(port)], cores=setting.cores, log=setting.work / "log") as processes:
        target = Target(kind="raw", endpoint=f"tcp://127.0.0.1:{port}")
        _wait_for(target, setting, processes)
        yield Running(target=target, processes=processes)


@contextmanager
def peer(setting: Setting, *, name: str) -> Iterator[Running]:
    """A server over HTTP, in its own environment. Raises ``RuntimeError`` when there is none."""
    python = make_venvs.python_of(name, setting.cache)
    if python is None:
        raise RuntimeError(f"there is no environment of {name} yet: run python benchmarks/peers/make_venvs.py")
    port = _free_port()
    command: list[str | Path] = [
        python,
        _SCRIPTS / f"{name}_server.py",
        "--tail",
        setting.tail.bundle.tail_path,
        "--port",
        str(port),
    ]
    command += ["--max-batch", str(setting.max_batch), "--delay-ms", str(setting.delay_ms)]
    # What the tree under test holds is none of theirs.
    environment = {"PYTHONPATH": ""}
    with Processes(command, cores=setting.cores, log=setting.work / "log", environment=environment) as processes:
        target = Target(kind="http", endpoint=f"127.0.0.1:{port}", path=_ROUTES[name])
        _wait_for(target, setting, processes)
        yield Running(target=target, processes=processes)


SYSTEMS: dict[str, Start] = {
    "bare": bare,
    "splitfleet": splitfleet,
    "splitfleet-auto": partial(splitfleet, engine="auto"),
    "splitfleet-curve": partial(splitfleet, curve=True),
    "mosec": partial(peer, name="mosec"),
    "litserve": partial(peer, name="litserve"),
    "ray": partial(peer, name="ray"),
    "echo": partial(bare, echo=True),
}


def _wait_for(target: Target, setting: Setting, processes: Processes) -> None:
    """Until it gives an answer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        processes.require_alive()
        try:
            with closing(connect(target, setting.tail.features[0], context)) as connection:
                connection.send()
                while time.monotonic() < end:
                    processes.require_alive()
                    if connection.receive() is not None:
                        return
                    time.sleep(0.02)
        except (OSError, AskError):
            # It does not listen yet, or the tail is not there yet.
            time.sleep(0.1)
    raise RuntimeError(f"{target} does not answer:\n{processes.log.read_text(errors='replace')[-3000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
