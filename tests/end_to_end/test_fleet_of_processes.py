"""A server, two devices and an allocator as a user starts them, each a process of its own."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np

import zoo_keras

README = Path(__file__).parents[2] / "README.md"
BUDGETS = {"attic": "60kB", "cellar": "100kB"}
REGISTER_TIMEOUT_S = 60.0


def wait_for_devices(commands: Any) -> None:
    deadline = time.monotonic() + REGISTER_TIMEOUT_S
    while {device["device_id"] for device in commands.json(commands.cloud, "devices", "list")["devices"]} != set(
        BUDGETS
    ):
        assert time.monotonic() < deadline, "the devices did not register in time"


def readme_example() -> str:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return str(example)


def infer_as_the_readme_says(endpoint: str, bundle: Path, image: np.ndarray[Any, Any]) -> Any:
    example = readme_example()
    assert "tcp://127.0.0.1:5555" in example
    assert "bundles/abc" in example
    namespace: dict[str, Any] = {"image": image}
    exec(example.replace("tcp://127.0.0.1:5555", endpoint).replace("bundles/abc", str(bundle)), namespace)
    return namespace["reply"]


def test_allocate_infer_restart_stop(commands: Any) -> None:
    server, endpoint = commands.serve()
    agents = [
        commands.start(
            commands.edge, "run", "--server", endpoint, "--device-id", name,
            "--store", f"store-{name}", "--model-ram", budget,
            log=f"{name}.log",
        )
        for name, budget in BUDGETS.items()
    ]  # fmt: skip
    wait_for_devices(commands)

    document = commands.json(
        commands.cloud, "allocate", "--server", endpoint, "--task", "fashion-mnist", "--memory-model", "cumulative",
        "--min-accuracy", "0.85",
        "--latency-samples", "20", "--seed", "3",
    )  # fmt: skip
    devices = {device["device_id"]: device["allocation"] for device in document["devices"]}
    assert set(devices) == set(BUDGETS)

    task = zoo_keras.task("fashion-mnist")
    test = task.samples("test")
    image = test.inputs["image"][0]
    for name, device in devices.items():
        bundle = commands.folder / f"store-{name}" / "bundles" / device["bundle"]
        reply = infer_as_the_readme_says(endpoint, bundle, image)
        (scores,) = reply.outputs.values()
        assert scores.dtype == np.float32
        assert scores.shape == (10,)
        assert reply.timing.total_s == reply.timing.edge_s + reply.timing.transfer_s + reply.timing.cloud_s
        assert reply.bundle == device["bundle"]

    # The allocation survives a restart of the server, which loads its tails again by itself.
    assert commands.stop(server) == 0
    server, endpoint = commands.serve()
    np.save(commands.folder / "image.npy", image)
    name, device = next(iter(devices.items()))
    bundle = commands.folder / f"store-{name}" / "bundles" / device["bundle"]
    again = commands.json(
        commands.edge,
        "infer",
        "--server",
        endpoint,
        "--bundle",
        str(bundle),
        "--timeout",
        "60",
        str(commands.folder / "image.npy"),
    )
    assert again["bundle"] == device["bundle"]

    (run,) = commands.json(commands.cloud, "allocations", "list")["runs"]
    assert run["state"] == "accepted"
    assert commands.json(commands.cloud, "allocations", "show", str(run["run"])) == document

    assert [commands.stop(process) for process in (*agents, server)] == [0, 0, 0]


def test_nothing_meets_the_thresholds(commands: Any) -> None:
    server, endpoint = commands.serve()
    agent = commands.start(
        commands.edge,
        "run",
        "--server",
        endpoint,
        "--device-id",
        "attic",
        "--store",
        "store",
        "--model-ram",
        "1kB",
        log="a.log",
    )
    deadline = time.monotonic() + REGISTER_TIMEOUT_S
    while not commands.json(commands.cloud, "devices", "list")["devices"]:
        assert time.monotonic() < deadline
    result = commands.run(
        commands.cloud, "allocate", "--server", endpoint, "--task", "fashion-mnist", "--memory-model", "cumulative",
        "--min-accuracy", "0.8", "--json",
        exit_code=3,
    )  # fmt: skip
    assert "attic" in result.stderr
    assert commands.stop(agent) == 0
    assert commands.stop(server) == 0


def test_no_server_answers(commands: Any) -> None:
    result = commands.run(
        commands.cloud, "allocate", "--server", "tcp://127.0.0.1:9", "--task", "fashion-mnist", exit_code=4
    )
    assert "tcp://127.0.0.1:9" in result.stderr
