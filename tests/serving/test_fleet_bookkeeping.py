"""The fleet's bookkeeping alone: no sockets, and a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from cloud_server.fleet import CALLS_PER_DEVICE, OFFLINE_AFTER_S, Fleet
from cloud_server.ledger import Request
from edge_sdk.errors import DeviceUnreachableError, InvalidInputError, OverloadedError
from edge_sdk.protocol import DEVICES_PER_PAGE, CallDevice, Emulation, Heartbeat


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fleet(clock):
    return Fleet(clock=clock)


def call(device_id="cam-1", stall_timeout_s=10.0):
    return CallDevice(device_id=device_id, device_method="device.run", params={}, stall_timeout_s=stall_timeout_s)


def request():
    return Request(peer=b"caller", id=1, method="fleet.call", received_at=0.0, deadline=None)


def ids(ended):
    return [entry.relay.id for entry in ended]


def test_a_device_is_online_until_three_heartbeats_are_missed(fleet, clock, registration):
    fleet.register(registration(), b"r1")
    clock.now += OFFLINE_AFTER_S - 0.1
    (state,), following = fleet.page(None)
    assert state.online
    assert following is None
    assert state.silent_s == pytest.approx(OFFLINE_AFTER_S - 0.1)
    clock.now += 0.1
    assert not fleet.page(None)[0][0].online
    assert fleet.heartbeat(Heartbeat(device_id="cam-1", progress=0), b"r1")
    assert fleet.page(None)[0][0].online


def test_a_heartbeat_over_another_connection_asks_for_registration(fleet, registration):
    assert not fleet.heartbeat(Heartbeat(device_id="cam-1", progress=0), b"r1")
    fleet.register(registration(), b"r1")
    assert not fleet.heartbeat(Heartbeat(device_id="cam-1", progress=0), b"r2")
    fleet.register(registration(), b"r2")
    assert fleet.heartbeat(Heartbeat(device_id="cam-1", progress=0), b"r2")
    assert not fleet.heartbeat(Heartbeat(device_id="cam-1", progress=0), b"r1")


def test_pages_hold_all_devices_once_and_fit_into_a_header(fleet, registration):
    names = [f"device-{number:03}" for number in range(50)]
    for number, name in enumerate(names):
        # Every other one says as much as it may.
        said = registration(name)
        runtimes = {f"runtime-{each}": "x" * 200 for each in range(16)} if number % 2 else {}
        fleet.register(replace(said, resources=replace(said.resources, runtimes=runtimes)), name.encode())
    found, after = [], None
    while True:
        states, following = fleet.page(after)
        assert 0 < len(states) <= DEVICES_PER_PAGE
        assert len(msgpack.packb([state.to_body() for state in states])) < 15_000
        found += [state.registration.device_id for state in states]
        if following is None:
            break
        after = following
    assert found == names


def test_an_empty_fleet_is_one_empty_page(fleet):
    assert fleet.page(None) == ([], None)


@pytest.mark.parametrize("device_id", ["", "x" * 65, "cam\n1", "-cam", "cam 1", "../cam", "[red]cam"])
def test_a_device_id_that_is_none_is_refused(fleet, registration, device_id):
    with pytest.raises(InvalidInputError, match="device id"):
        fleet.register(registration(device_id), b"r1")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_ram_bytes": -1}, "model_ram_bytes must be 0 to"),
        ({"model_ram_bytes": 2**63}, "model_ram_bytes must be 0 to"),
        ({"ram_bytes": -1}, "ram_bytes must be 0 to"),
        ({"ram_available_bytes": 2**63}, "ram_available_bytes must be 0 to"),
        ({"cores": 0}, "cores must be 1 to"),
        ({"profile": "rpi\x1b[2J"}, "profile holds characters"),
        ({"version": "x" * 256}, "version has 256 characters"),
        ({"runtimes": {"lite\nrt": "2.3"}}, "a key of resources.runtimes holds characters"),
        ({"emulation": Emulation(cpu="\x07")}, "emulation.cpu holds characters"),
    ],
)
def test_values_that_no_device_can_have_are_refused(fleet, registration, changes, told):
    usual = registration()
    within = {name: value for name, value in changes.items() if hasattr(usual.resources, name)}
    wrong = {name: value for name, value in changes.items() if name not in within}
    with pytest.raises(InvalidInputError, match=told):
        fleet.register(replace(usual, resources=replace(usual.resources, **within), **wrong), b"r1")
    assert fleet.page(None) == ([], None)


def test_a_device_whose_connection_is_gone_is_offline_until_it_registers_again(fleet, registration):
    fleet.register(registration(), b"r1")
    fleet.lost(b"r1")
    assert not fleet.page(None)[0][0].online
    assert fleet.online() == 0
    assert not fleet.heartbeat(Heartbeat(device_id="cam-1", progress=1), b"r1")
    assert not fleet.page(None)[0][0].online
    fleet.register(registration(), b"r1")
    assert fleet.page(None)[0][0].online
    assert fleet.heartbeat(Heartbeat(device_id="cam-1", progress=1), b"r1")


def test_a_registration_that_would_fill_a_page_is_refused(fleet, registration):
    with pytest.raises(InvalidInputError, match="at most 4096 bytes"):
        fleet.register(registration(version="x" * 5000), b"r1")


def test_a_call_finds_its_answer_once(fleet, registration):
    fleet.register(registration(), b"r1")
    asked = request()
    relay, routing_id = fleet.open(call(), asked)
    assert routing_id == b"r1"
    assert fleet.under_way() == [relay]
    assert fleet.answered(relay.id + 1) is None
    assert fleet.answered(relay.id) is relay
    assert relay.request is asked
    assert fleet.answered(relay.id) is None
    assert fleet.under_way() == []


def test_an_answer_after_the_caller_gave_up_is_late(fleet, registration):
    fleet.register(registration(), b"r1")
    asked = request()
    relay, _ = fleet.open(call(), asked)
    asked.ended = True
    assert fleet.under_way() == []
    assert fleet.answered(relay.id) is None


def test_a_call_to_nobody_is_refused(fleet):
    with pytest.raises(DeviceUnreachableError, match="no device 'cam-1' is registered"):
        fleet.open(call(), request())


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_stall_timeout_that_is_none_is_refused(fleet, registration, timeout_s):
    fleet.register(registration(), b"r1")
    with pytest.raises(InvalidInputError, match="stall_timeout_s"):
        fleet.open(call(stall_timeout_s=timeout_s), request())


def test_calls_to_one_device_are_bounded_and_given_up_ones_do_not_count(fleet, registration):
    fleet.register(registration(), b"r1")
    fleet.register(registration("cam-2"), b"r2")
    asked = [request() for _ in range(CALLS_PER_DEVICE)]
    for each in asked:
        fleet.open(call(), each)
    with pytest.raises(OverloadedError) as raised:
        fleet.open(call(), request())
    assert raised.value.details["retry_after_s"] > 0
    fleet.open(call("cam-2"), request())
    asked[3].ended = True
    fleet.open(call(), request())


def test_only_progress_keeps_a_call_alive(fleet, clock, registration):
    fleet.register(registration(), b"r1")
    relay, _ = fleet.open(call(stall_timeout_s=10.0), request())
    progress = 0
    for _ in range(5):
        clock.now += 9.0
        progress += 1
        fleet.heartbeat(Heartbeat(device_id="cam-1", progress=progress), b"r1")
        assert fleet.stalled() == []
    for _ in range(9):
        clock.now += 1.0
        fleet.heartbeat(Heartbeat(device_id="cam-1", progress=progress), b"r1")
        assert fleet.stalled() == []
    clock.now += 1.0
    fleet.heartbeat(Heartbeat(device_id="cam-1", progress=progress), b"r1")
    (ended,) = fleet.stalled()
    assert ended.relay is relay
    assert "made no progress for 10 s (alive but stuck)" in ended.error.message
    assert fleet.stalled() == []
    assert fleet.answered(relay.id) is None


def test_each_call_has_its_own_patience(fleet, clock, registration):
    fleet.register(registration(), b"r1")
    clock.now += 100.0
    short, _ = fleet.open(call(stall_timeout_s=5.0), request())
    long, _ = fleet.open(call(stall_timeout_s=50.0), request())
    clock.now += 5.0
    (ended,) = fleet.stalled()
    assert ended.relay is short
    assert "silent for 105.0 s" in ended.error.message
    assert fleet.under_way() == [long]


def test_a_new_process_ends_the_calls_of_the_old_one(fleet, registration):
    fleet.register(registration(instance="a"), b"r1")
    fleet.register(registration("cam-2", instance="b"), b"r9")
    first, _ = fleet.open(call(), request())
    other, _ = fleet.open(call("cam-2"), request())
    ended = fleet.register(registration(instance="c"), b"r2")
    assert ids(ended) == [first.id]
    assert "began anew" in ended[0].error.message
    assert fleet.under_way() == [other]
    assert fleet.open(call(), request())[1] == b"r2"


def test_without_an_instance_each_connection_is_a_new_process(fleet, registration):
    fleet.register(registration(), b"r1")
    relay, _ = fleet.open(call(), request())
    assert fleet.register(registration(model_ram_bytes=9), b"r1") == []
    assert ids(fleet.register(registration(), b"r2")) == [relay.id]


def test_a_rival_is_another_process_that_is_online(fleet, clock, registration):
    assert fleet.rival(registration(instance="a"), b"r1") is None
    fleet.register(registration(instance="a"), b"r1")
    assert fleet.rival(registration(instance="a"), b"r1") is None
    assert fleet.rival(registration(instance="a"), b"r2") is None
    assert fleet.rival(registration("cam-2", instance="b"), b"r2") is None
    clock.now += OFFLINE_AFTER_S - 0.1
    assert fleet.rival(registration(instance="b"), b"r2") == b"r1"
    assert fleet.rival(registration(), b"r2") == b"r1"
    clock.now += 0.2
    assert fleet.rival(registration(instance="b"), b"r2") is None
    fleet.heartbeat(Heartbeat(device_id="cam-1", progress=0), b"r1")
    assert fleet.rival(registration(instance="b"), b"r2") == b"r1"


def test_a_device_that_reconnects_keeps_its_calls_and_their_patience(fleet, clock, registration):
    fleet.register(registration(instance="a"), b"r1")
    fleet.heartbeat(Heartbeat(device_id="cam-1", progress=5), b"r1")
    relay, _ = fleet.open(call(stall_timeout_s=10.0), request())
    clock.now += 6.0
    assert fleet.register(registration(instance="a"), b"r2") == []
    assert fleet.lost(b"r1") == []
    clock.now += 4.0
    fleet.heartbeat(Heartbeat(device_id="cam-1", progress=5), b"r2")
    assert ids(fleet.stalled()) == [relay.id]
    again, routing_id = fleet.open(call(), request())
    assert routing_id == b"r2"
    assert fleet.answered(again.id) is again


def test_only_silent_devices_that_owe_an_answer_are_suspects(fleet, clock, registration):
    for number in range(3):
        fleet.register(registration(f"cam-{number}"), b"r%d" % number)
    relay, _ = fleet.open(call("cam-1", 100.0), request())
    fleet.open(call("cam-2", 100.0), request())
    assert fleet.suspects() == []
    clock.now += OFFLINE_AFTER_S
    fleet.heartbeat(Heartbeat(device_id="cam-2", progress=0), b"r2")
    assert fleet.suspects() == [b"r1"]
    (ended,) = fleet.lost(b"r1")
    assert ended.relay is relay
    assert "not connected any more" in ended.error.message
    assert fleet.suspects() == []


def test_who_was_heard_of(fleet, clock, registration):
    fleet.register(registration("cam-1"), b"r1")
    clock.now += 5.0
    fleet.register(registration("cam-2"), b"r2")
    assert fleet.heard_since(clock.now) == ["cam-2"]
    assert fleet.heard_since(clock.now - 5.0) == ["cam-1", "cam-2"]


def test_the_state_of_a_device_survives_the_wire(fleet, registration):
    registered = registration(profile="pi", instance="a")
    fleet.register(registered, b"r1")
    (state,), _ = fleet.page(None)
    body = msgpack.unpackb(msgpack.packb(state.to_body()))
    assert type(state).from_body(body) == replace(state, registration=registered)
