"""A fleet with CURVE on, each part a process of its own: server with its allocator, devices, lab, and a user."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zoo_keras
from edge_sdk import CurveKeys, SplitClient
from edge_sdk.errors import UnauthorizedError

WAIT_S = 120.0
FLEET = """\
schema_version: 1
devices:
  - {id: pi, profile: raspberry-pi-zero-2-w, model_ram_bytes: 60kB}
  - {id: camera, profile: camera-256mb, model_ram_bytes: 20kB}
"""


class Fleet:
    """A server with CURVE on and the keys of those who know it."""

    def __init__(self, commands: Any) -> None:
        self.commands = commands
        self.running: list[Any] = []
        self.run("keys", "server", "new")
        self.server_key = str(commands.home / "keys" / "server.pub")
        self.new("operator", "boss")
        self.boss = ("--key", "boss.key", "--server-key", self.server_key)

    def run(self, *arguments: str, exit_code: int = 0) -> Any:
        return self.commands.run(self.commands.cloud, *arguments, exit_code=exit_code)

    def new(self, role: str, name: str) -> None:
        self.run("keys", role, "new", name)
        self.run("keys", role, "allow", f"{name}.pub")

    def serve(self, *options: str, bind: str = "tcp://127.0.0.1:*") -> str:
        ready = self.commands.folder / "ready.json"
        key = str(self.commands.home / "keys" / "server.key")
        arguments = ("serve", "--bind", bind, "--key", key, "--ready-file", str(ready), *options)
        process = self.start(self.commands.cloud, *arguments, log="serve.log")
        self.wait(lambda: ready.exists() or process.poll() is not None, "the server")
        return str(json.loads(ready.read_text())["endpoint"])

    def agent(self, endpoint: str, name: str) -> Any:
        arguments = ("run", "--server", endpoint, "--key", f"{name}.key", "--server-key", self.server_key)
        budget = ("--store", f"store-{name}", "--model-ram", "60kB")
        return self.start(self.commands.edge, *arguments, *budget, log=f"{name}.log")

    def start(self, program: tuple[str, ...], *arguments: str, log: str) -> Any:
        self.running.append(self.commands.start(program, *arguments, log=log))
        return self.running[-1]

    def log(self, name: str) -> str:
        return (self.commands.folder / f"{name}.log").read_text()

    def states(self) -> list[str]:
        """Of all runs of allocators."""
        runs = self.commands.json(self.commands.cloud, "allocations", "list")["runs"]
        return [run["state"] for run in runs]

    def wait(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.05)


@pytest.fixture
def fleet(commands: Any) -> Iterator[Fleet]:
    fleet = Fleet(commands)
    yield fleet
    for process in reversed(fleet.running):
        assert process.poll() is not None or commands.stop(process) == 0


def test_an_agent_waits_for_its_key_works_is_revoked_and_comes_back(fleet: Fleet) -> None:
    endpoint = fleet.serve()
    fleet.run("keys", "device", "new", "attic")
    agent = fleet.agent(endpoint, "attic")
    fleet.wait(lambda: "does not allow our key" in fleet.log("attic"), "the refusal")
    fleet.run("keys", "device", "allow", "attic.pub")
    fleet.wait(lambda: "registered at" in fleet.log("attic"), "the registration")
    fleet.run("keys", "device", "revoke", "attic")
    fleet.wait(lambda: "not any more" in fleet.log("attic"), "the revocation")
    fleet.run("keys", "device", "allow", "attic.pub")
    fleet.wait(lambda: fleet.log("attic").count("registered at") == 2, "the second registration")
    (device,) = fleet.commands.json(fleet.commands.cloud, "devices", "list")["devices"]
    assert device["device_id"] == "attic"
    assert fleet.commands.stop(agent) == 0


@pytest.mark.exhaustive
def test_an_allocation_beside_the_server_and_one_from_outside(fleet: Fleet) -> None:
    options = ("--memory-model", "cumulative", "--latency-samples", "10", "--seed", "3")
    endpoint = fleet.serve("--allocate-task", "fashion-mnist", *options)
    fleet.new("device", "attic")
    fleet.agent(endpoint, "attic")
    fleet.wait(lambda: "registered at" in fleet.log("attic"), "the registration")
    # While the run of the server's own allocator is under way, the device is not free for another.
    fleet.wait(lambda: fleet.states() == ["accepted"], "the allocation")
    arguments = ("allocate", "--server", endpoint, "--task", "fashion-mnist", *options)
    document = fleet.commands.json(fleet.commands.cloud, *arguments, *fleet.boss)
    (device,) = document["devices"]
    bundle = fleet.commands.folder / "store-attic" / "bundles" / device["allocation"]["bundle"]
    image = zoo_keras.task("fashion-mnist").samples("test").inputs["image"][0]
    np.save(fleet.commands.folder / "image.npy", image)
    keys = CurveKeys.load(fleet.commands.folder / "attic.key", fleet.server_key)
    with SplitClient(endpoint, bundle=bundle, keys=keys) as client:
        (scores,) = client.infer(image).outputs.values()
        assert scores.shape == (10,)
        infer = ("infer", "--server", endpoint, "--bundle", str(bundle), "image.npy")
        own = ("--key", "attic.key", "--server-key", fleet.server_key)
        (again,) = fleet.commands.json(fleet.commands.edge, *infer, *own)["outputs"].values()
        np.testing.assert_allclose(again, scores, atol=1e-5)
        fleet.run("keys", "device", "revoke", "attic")
        if client.bundle.manifest.has_tail:
            with pytest.raises(UnauthorizedError):
                client.infer(image)
            refused = fleet.commands.run(fleet.commands.edge, *infer, *own, exit_code=1)
            assert refused.stderr.startswith(f"error: the server at {endpoint} does not allow our key")
            assert refused.stdout == ""


def test_the_devices_of_a_lab(fleet: Fleet) -> None:
    endpoint = fleet.serve()
    (fleet.commands.folder / "fleet.yaml").write_text(FLEET)
    lab = ("lab", "run", "fleet.yaml", "--server", endpoint)
    missing = fleet.run(*lab, *fleet.boss, exit_code=1)
    assert "--device-keys goes with --key" in missing.stderr
    missing = fleet.run(*lab, *fleet.boss, "--device-keys", ".", exit_code=1)
    assert "pi.key: the key cannot be read" in missing.stderr
    for name in ("pi", "camera"):
        fleet.new("device", name)
    ready = fleet.commands.folder / "lab.json"
    process = fleet.start(
        fleet.commands.cloud, *lab, *fleet.boss, "--device-keys", ".", "--ready-file", str(ready), log="lab.log"
    )
    fleet.wait(lambda: ready.exists() or process.poll() is not None, "the lab")
    assert json.loads(ready.read_text())["devices"] == ["pi", "camera"]
    assert fleet.commands.stop(process) == 0


def test_other_machines_are_served_with_keys_only(fleet: Fleet) -> None:
    refused = fleet.run("serve", "--bind", "tcp://0.0.0.0:*", exit_code=1)
    assert "without CURVE" in refused.stderr
    endpoint = fleet.serve(bind="tcp://0.0.0.0:*")
    assert endpoint.startswith("tcp://0.0.0.0:")
    assert f"splitfleet serves at {endpoint} with CURVE" in fleet.log("serve")
    # Nobody but the server reads its secret.
    assert os.stat(Path(fleet.commands.home) / "keys" / "server.key").st_mode & 0o077 == 0  # noqa: PTH116
    refused = fleet.run("allocate", "--server", endpoint, "--task", "fashion-mnist", exit_code=1)
    assert "asks for keys: name them with --key and --server-key" in refused.stderr
