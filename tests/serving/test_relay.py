"""``device.*`` and ``fleet.*`` with real sockets: a relayed call has exactly one end, whatever the device does."""

from __future__ import annotations

import numpy as np
import pytest

from edge_sdk.errors import (
    DeadlineExceededError,
    DeviceIdTakenError,
    DeviceUnreachableError,
    GoingAwayError,
    InvalidInputError,
    OverloadedError,
    ProtocolError,
    RemoteInternalError,
    TailFailedError,
    to_wire,
)
from edge_sdk.protocol import CallDevice, DeviceState, Heartbeat, ListDevices, LoadTail
from edge_sdk.wire import Message, MessageType, Tensor, encode


def call(device_id="cam-1", stall_timeout_s=60.0, **params):
    return CallDevice(device_id=device_id, device_method="device.run", params=params, stall_timeout_s=stall_timeout_s)


def answer(inner, **changes):
    return Message(**{"type": MessageType.REPLY, "request_id": inner.request_id} | changes)


@pytest.fixture
def device(running, registration):
    peer = running.peer()
    peer.call(registration(instance="a"))
    return peer


def test_a_registered_device_is_recorded_and_listed(running, registration):
    device = running.peer()
    device.call(registration(instance="a"))
    assert running.registry.recorded == [registration(instance="a")]
    body = device.call(ListDevices()).body
    (state,) = [DeviceState.from_body(each) for each in body["devices"]]
    assert state.registration == registration(instance="a")
    assert state.online
    assert body["next"] is None


def test_registration_tells_the_heartbeat_and_the_version(running, registration):
    body = running.peer().call(registration()).body
    assert body["heartbeat_s"] == 1.0
    assert body["version"]


def test_heartbeats_are_known_on_the_connection_of_the_registration_only(running, device):
    assert device.call(Heartbeat(device_id="cam-1", progress=1)).body == {"known": True}
    assert running.peer().call(Heartbeat(device_id="cam-1", progress=1)).body == {"known": False}
    assert device.call(Heartbeat(device_id="cam-2", progress=1)).body == {"known": False}


def test_a_bad_registration_is_refused_and_not_recorded(running, registration):
    with pytest.raises(InvalidInputError, match="device id"):
        running.peer().call(registration(""))
    assert running.registry.recorded == []


def test_a_call_and_its_answer_are_relayed_with_tensors(running, device):
    caller = running.peer()
    samples = Tensor(name="x", data=np.arange(6, dtype=np.float32).reshape(2, 3), scale=0.5, zero_point=1)
    asked = caller.begin(call(first=3, inputs={"image": "ab"}), tensors=(samples,), budget_s=30.0)
    inner = device.receive()
    assert inner.type is MessageType.CALL
    assert inner.method == "device.run"
    assert inner.body == {"first": 3, "inputs": {"image": "ab"}}
    assert 0 < inner.budget_s <= 30.0
    assert np.array_equal(inner.arrays()["x"], samples.data)
    outputs = Tensor(name="output_0", data=np.ones((2, 10), np.float32))
    device.send(answer(inner, body={"count": 2}, tensors=(outputs,)))
    reply = caller.end_of(asked)
    assert reply.type is MessageType.REPLY
    assert reply.body == {"count": 2}
    assert np.array_equal(reply.arrays()["output_0"], outputs.data)


def test_an_error_of_the_device_is_relayed_as_it_is(running, device):
    caller = running.peer()
    asked = caller.begin(call())
    error = TailFailedError("no luck", sample=7)
    device.send(answer(device.receive(), type=MessageType.ERROR, body=to_wire(error)))
    with pytest.raises(TailFailedError, match="no luck") as raised:
        caller.end_of(asked)
    assert raised.value.details == {"sample": 7}


def test_answers_of_many_devices_and_callers_are_never_mixed_up(running, registration):
    devices = [running.peer() for _ in range(4)]
    for number, device in enumerate(devices):
        device.call(registration(f"cam-{number}"))
    callers = [running.peer() for _ in range(3)]
    asked = {}
    for c, caller in enumerate(callers):
        for d in range(len(devices)):
            for turn in range(4):
                asked[c, caller.begin(call(f"cam-{d}", payload=f"{c}/{d}/{turn}"))] = f"{c}/{d}/{turn}"
    for device in reversed(devices):
        inner = [device.receive() for _ in range(len(callers) * 4)]
        for message in reversed(inner):
            device.send(answer(message, body={"echo": message.body["payload"]}))
    for c, caller in enumerate(callers):
        for _ in range(len(devices) * 4):
            reply = caller.receive()
            assert reply.body == {"echo": asked.pop((c, reply.request_id))}
    assert asked == {}


def test_a_device_that_never_registered_is_unreachable(running):
    with pytest.raises(DeviceUnreachableError, match="no device 'cam-9' is registered"):
        running.peer().call(call("cam-9"))


def test_a_device_that_left_before_is_unreachable(running, device):
    device.close()
    with pytest.raises(DeviceUnreachableError, match="not connected"):
        running.peer().call(call())


def test_a_device_that_vanishes_meanwhile_is_unreachable_long_before_its_stall_timeout(running, device):
    caller = running.peer()
    asked = [caller.begin(call(stall_timeout_s=3600.0)) for _ in range(2)]
    device.receive()
    device.close()
    for request_id in asked:
        with pytest.raises(DeviceUnreachableError, match="not connected any more"):
            caller.end_of(request_id)


def test_a_silent_device_that_is_connected_has_until_its_stall_timeout(running, device):
    caller = running.peer()
    asked = caller.begin(call(stall_timeout_s=1.5))
    inner = device.receive()
    with pytest.raises(DeviceUnreachableError, match=r"made no progress for 1\.5 s \(silent for"):
        caller.end_of(asked)
    # What asks whether it is connected still is an answer to nothing, which a device ignores.
    probe = device.receive()
    assert probe.type is MessageType.REPLY
    assert not probe.body
    device.send(answer(inner))
    listed = device.begin(ListDevices())
    while device.receive().request_id != listed:
        pass
    assert running.server.dropped["late answers"] == 1
    assert not caller.has_message()


def test_a_device_that_is_alive_but_stuck_is_unreachable(running, device):
    caller = running.peer()
    asked = caller.begin(call(stall_timeout_s=0.5))
    device.receive()
    while not caller.has_message():
        device.call(Heartbeat(device_id="cam-1", progress=4))
    with pytest.raises(DeviceUnreachableError, match="alive but stuck"):
        caller.end_of(asked)


def test_a_device_that_makes_progress_may_take_longer_than_its_stall_timeout(running, device, registration):
    caller, still = running.peer(), running.peer()
    still.call(registration("cam-2"))
    asked = caller.begin(call("cam-1", 1.0))
    inner = device.receive()
    progress = 0
    # It takes as long as two calls need to end, one after the other, on a device that stands still.
    for _ in range(2):
        stuck = caller.begin(call("cam-2", 1.0))
        while not caller.has_message():
            progress += 1
            device.call(Heartbeat(device_id="cam-1", progress=progress))
        with pytest.raises(DeviceUnreachableError, match="cam-2"):
            caller.end_of(stuck)
    device.send(answer(inner, body={"done": True}))
    assert caller.end_of(asked).body == {"done": True}


def test_a_device_that_begins_anew_ends_its_calls_and_takes_new_ones(running, device, registration):
    caller = running.peer()
    asked = caller.begin(call())
    device.receive()
    device.close()
    new = running.peer()
    _register_in_the_end(new, registration(instance="b"))
    with pytest.raises(DeviceUnreachableError, match=r"began anew|not connected any more"):
        caller.end_of(asked)
    again = caller.begin(call(turn=2))
    inner = new.receive()
    assert inner.body == {"turn": 2}
    new.send(answer(inner, body={"turn": 2}))
    assert caller.end_of(again).body == {"turn": 2}


def _register_in_the_end(peer, registration):
    """As an agent does: until the server has seen that the connection of the process before is gone."""
    for _ in range(100_000):
        try:
            return peer.call(registration)
        except DeviceIdTakenError:
            continue
    raise AssertionError("never registered")


def test_two_processes_under_one_id_do_not_push_each_other_out(start, registration):
    running = start(offline_after_s=3600.0)
    device, caller, rival = running.peer(), running.peer(), running.peer()
    device.call(registration(instance="a"))
    asked = caller.begin(call())
    inner = device.receive()
    for instance in ("b", "c", ""):
        with pytest.raises(DeviceIdTakenError, match="another process is connected as device cam-1: stop it"):
            rival.call(registration(instance=instance))
    # What asked whether it is connected still is an answer to nothing.
    for _ in range(3):
        assert device.receive().type is MessageType.REPLY
    assert device.call(Heartbeat(device_id="cam-1", progress=1)).body == {"known": True}
    assert running.registry.recorded == [registration(instance="a")]
    device.send(answer(inner, body={"mine": True}))
    assert caller.end_of(asked).body == {"mine": True}
    # A device that restarts need not wait until the process before is offline.
    device.close()
    _register_in_the_end(rival, registration(instance="b"))
    assert rival.call(Heartbeat(device_id="cam-1", progress=0)).body == {"known": True}


def test_a_silent_process_is_pushed_out_when_it_is_offline(running, registration):
    """Half open: its machine lost power, and nobody told us that the connection is gone."""
    silent, new = running.peer(), running.peer()
    silent.call(registration(instance="a"))
    _register_in_the_end(new, registration(instance="b"))
    assert new.call(Heartbeat(device_id="cam-1", progress=0)).body == {"known": True}


def test_a_device_that_reconnects_may_answer_over_the_new_connection(running, device, registration):
    caller = running.peer()
    asked = caller.begin(call())
    inner = device.receive()
    device.close()
    again = running.peer()
    again.call(registration(instance="a"))
    again.send(answer(inner, body={"done": True}))
    assert caller.end_of(asked).body == {"done": True}


def test_the_budget_of_the_caller_ends_the_call(running, device):
    caller = running.peer()
    asked = caller.begin(call(), budget_s=0.1)
    inner = device.receive()
    with pytest.raises(DeadlineExceededError, match=r"fleet\.call: its time budget of 100 ms ran out"):
        caller.end_of(asked)
    device.send(answer(inner, body={"late": True}))
    device.call(Heartbeat(device_id="cam-1", progress=1))
    assert not caller.has_message()
    assert running.server.dropped["late answers"] == 1


def test_a_caller_that_vanished_costs_nothing(running, device):
    caller = running.peer()
    caller.begin(call())
    inner = device.receive()
    caller.close()
    device.send(answer(inner))
    assert device.call(Heartbeat(device_id="cam-1", progress=1)).body == {"known": True}


def test_a_malformed_answer_ends_the_call_as_such(running, device):
    caller = running.peer()
    asked = caller.begin(call())
    floats = Tensor(name="x", data=np.zeros(4, np.float32))
    frames = [bytes(frame) for frame in encode(answer(device.receive(), tensors=(floats,)))]
    device.send_frames([*frames[:-1], frames[-1][:-1]])
    with pytest.raises(ProtocolError, match="needs 16 bytes, 15 came"):
        caller.end_of(asked)


def test_an_error_that_would_not_fit_into_a_header_is_cut_not_lost(running, monkeypatch):
    def fail(_):
        raise RemoteInternalError("ä" * 50_000, more=["x" * 50_000])

    monkeypatch.setattr(running.tails, "load", fail)
    with pytest.raises(RemoteInternalError, match=r"^ä{2000}$") as raised:
        running.peer().call(LoadTail(bundle="x"))
    assert raised.value.details == {}


@pytest.mark.usefixtures("device")
def test_calls_to_one_device_are_bounded(running):
    caller = running.peer()
    for _ in range(16):
        caller.begin(call())
    with pytest.raises(OverloadedError):
        caller.call(call())


def test_stopping_ends_relayed_calls_at_once(running, device):
    caller = running.peer()
    asked = caller.begin(call())
    device.receive()
    running.stop()
    with pytest.raises(GoingAwayError, match="stopping"):
        caller.end_of(asked)
    running.join()
    assert running.ended


def test_devices_that_were_heard_of_are_marked_in_the_registry(start, registration, monkeypatch):
    monkeypatch.setattr("cloud_server.fleet_calls.MARK_SEEN_EVERY_S", 0.05)
    running = start()
    peer = running.peer()
    peer.call(registration())
    while len(running.registry.seen) < 2:
        peer.call(Heartbeat(device_id="cam-1", progress=0))
    assert set(running.registry.seen) == {"cam-1"}
