"""The bodies of calls: every one survives its map, ignores what it does not know, and names what is missing."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from edge_sdk import protocol
from edge_sdk.errors import InvalidInputError
from edge_sdk.protocol import Body, CallDevice, DeviceState, Emulation, Heartbeat, Register, Resources, Run

RESOURCES = Resources(
    ram_bytes=2**30, ram_available_bytes=2**29, cores=4, architecture="aarch64", runtimes={"litert": "2.3.0"}
)
REGISTER = Register(
    device_id="pi", resources=RESOURCES, model_ram_bytes=100_000, emulation=Emulation(ram="memory cgroup")
)
BODIES: list[Body] = [
    REGISTER,
    Heartbeat(device_id="pi", progress=3),
    DeviceState(registration=REGISTER, online=True, silent_s=0.5),
    CallDevice(device_id="pi", device_method="device.run", params={"a": 1}, stall_timeout_s=5.0),
    Run(bundle="b", inputs={"image": "s"}, first=0, count=10),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_body_survives_msgpack(body: Body) -> None:
    sent = msgpack.unpackb(msgpack.packb(body.to_body()))
    assert type(body).from_body(sent) == body
    assert type(body).from_body(sent | {"unknown": 1}) == body


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"progress": ...}, "'progress' is missing"),
        ({"progress": "3"}, "Heartbeat.progress: expected"),
        ({"progress": True}, "Heartbeat.progress: expected"),
        ({"device_id": None}, "Heartbeat.device_id: expected"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], says: str) -> None:
    body = {"device_id": "pi", "progress": 3} | changes
    with pytest.raises(InvalidInputError, match=says):
        Heartbeat.from_body({key: value for key, value in body.items() if value is not ...})


def test_nested_bodies_are_checked_too() -> None:
    body = REGISTER.to_body()
    body["resources"]["cores"] = "four"
    with pytest.raises(InvalidInputError, match=r"Resources\.cores"):
        Register.from_body(body)


def test_an_integer_stands_for_a_float_and_not_the_other_way() -> None:
    assert CallDevice.from_body(
        {"device_id": "d", "device_method": "m", "params": {}, "stall_timeout_s": 5}
    ) == CallDevice(device_id="d", device_method="m", params={}, stall_timeout_s=5.0)
    with pytest.raises(InvalidInputError):
        Heartbeat.from_body({"device_id": "d", "progress": 1.5})


def test_every_method_has_one_class() -> None:
    methods = [kind.method for kind in vars(protocol).values() if isinstance(kind, type) and hasattr(kind, "method")]
    assert len(set(methods)) == len(methods)
    assert all(f"``{method}``" in (protocol.__doc__ or "") for method in methods)


def test_emulation_is_true_when_any_part_is_emulated() -> None:
    assert not Emulation()
    assert Emulation(link="proxy")
