"""The calls ``device.register``, ``device.heartbeat``, ``fleet.devices`` and ``fleet.call``, in the I/O thread.

What is decided is :mod:`cloud_server.fleet`'s; here it is sent, and the registry hears of it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Protocol

from cloud_server.allow_list import Holder
from cloud_server.fleet import MARK_SEEN_EVERY_S, Ended, Fleet
from cloud_server.guard import Guard
from cloud_server.lanes import Lane, log_failure
from cloud_server.ledger import Request
from cloud_server.router import Delivery
from cloud_server.switchboard import Handler, Switchboard
from edge_sdk.errors import DeviceIdTakenError, DeviceUnreachableError, OverloadedError, SplitfleetError
from edge_sdk.protocol import HEARTBEAT_S, CallDevice, Heartbeat, ListDevices, Register
from edge_sdk.wire import Message, MessageType

_LOG = logging.getLogger(__name__)


class DeviceRegistry(Protocol):
    """What is recorded of devices. Both may block, and are called from one thread that is not the I/O thread."""

    def record_device(self, register: Register, *, now: datetime) -> None: ...

    def mark_seen(self, device_id: str, now: datetime) -> None: ...


class FleetCalls:
    """Devices that register, and calls that are relayed to them."""

    def __init__(
        self, switchboard: Switchboard, fleet: Fleet, registry: DeviceRegistry, guard: Guard | None = None
    ) -> None:
        self._switchboard = switchboard
        self._fleet = fleet
        self._registry = registry
        self._guard = guard
        # By device id, the key that it registered with.
        self._keys: dict[str, str | None] = {}
        self._recording = Lane("registry", capacity=1024)
        self._version = version("splitfleet")
        self._marked_at = switchboard.clock()

    @property
    def methods(self) -> Mapping[str, Handler]:
        return {
            Register.method: self._register,
            Heartbeat.method: self._heartbeat,
            ListDevices.method: self._list,
            CallDevice.method: self._call,
        }

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return (self._recording,)

    def forward(self, message: Message, holder: Holder | None = None) -> None:
        """A REPLY or an ERROR came in: it ends the call that it answers, or it is late.

        Where CURVE is on, ``holder`` sent it; only the device that was asked may answer.
        """
        by = None if holder is None else holder.device_id
        relay = self._fleet.answered(message.request_id, by=by)
        if relay is None:
            self._switchboard.dropped["late answers"] += 1
        else:
            self._switchboard.end(relay.request, replace(message, request_id=relay.request.id))

    def leave(self, peer: bytes) -> None:
        """What is connected by that routing id is not allowed any more: nobody need wait for its answers."""
        self._fail(self._fleet.lost(peer))

    def sweep(self) -> None:
        """To be called several times a second: end the calls of devices that are gone or stuck."""
        self._fail(self._fleet.stalled())
        for routing_id in self._fleet.suspects():
            if not self._is_connected(routing_id):
                self._fail(self._fleet.lost(routing_id))
        now = self._switchboard.clock()
        if now >= self._marked_at + MARK_SEEN_EVERY_S:
            self._mark_seen(self._fleet.heard_since(self._marked_at))
            self._marked_at = now

    def stop(self, error: SplitfleetError) -> None:
        """End all relayed calls: they may take minutes, and nobody will be here to hear the answer."""
        for relay in self._fleet.under_way():
            self._switchboard.fail(relay.request, error)

    def _register(self, request: Request, message: Message) -> None:
        registration = Register.from_body(message.body)
        self._fleet.check(registration)
        self._require_free(registration, request)

        def record() -> None:
            self._registry.record_device(registration, now=datetime.now(UTC))

        def recorded(_: None) -> None:
            # Two at once: the other one may have been recorded meanwhile.
            self._require_free(registration, request)
            # Only now: whoever sees a device in the fleet finds it in the registry too.
            self._keys[registration.device_id] = request.key
            self._fail(self._fleet.register(registration, request.peer))
            self._switchboard.reply(request, {"heartbeat_s": HEARTBEAT_S, "version": self._version})

        self._switchboard.work(self._recording, request, record, recorded)

    def _require_free(self, registration: Register, request: Request) -> None:
        """Two processes that both took the id would push each other out for ever."""
        rival = self._fleet.rival(registration, request.peer)
        if rival is not None and self._is_connected(rival):
            raise DeviceIdTakenError(
                f"another process is connected as device {registration.device_id}: stop it, or start this one with "
                "another --device-id"
            )

    def _is_connected(self, routing_id: bytes) -> bool:
        # An answer to nothing: a peer that is alive ignores it as late, one that is gone cannot be reached.
        probe = Message(type=MessageType.REPLY, request_id=secrets.randbits(64))
        return self._switchboard.send(routing_id, probe) is not Delivery.GONE

    def _heartbeat(self, request: Request, message: Message) -> None:
        known = self._fleet.heartbeat(Heartbeat.from_body(message.body), request.peer)
        self._switchboard.reply(request, {"known": known})

    def _list(self, request: Request, message: Message) -> None:
        states, following = self._fleet.page(ListDevices.from_body(message.body).after)
        self._switchboard.reply(request, {"devices": [state.to_body() for state in states], "next": following})

    def _call(self, request: Request, message: Message) -> None:
        call = CallDevice.from_body(message.body)
        key = self._keys.get(call.device_id)
        if self._guard is not None and key is not None and self._guard.holder(key) is None:
            raise DeviceUnreachableError(f"the key of device {call.device_id} is not allowed any more")
        relay, routing_id = self._fleet.open(call, request)
        inner = Message(
            type=MessageType.CALL,
            request_id=relay.id,
            method=call.device_method,
            body=call.params,
            budget_s=request.remaining_s(self._switchboard.clock()),
            tensors=message.tensors,
        )
        delivery = self._switchboard.send(routing_id, inner)
        if delivery is Delivery.GONE:
            self._fail(self._fleet.lost(routing_id))
            raise DeviceUnreachableError(f"device {call.device_id} is not connected")
        if delivery is Delivery.FULL:
            raise OverloadedError(f"device {call.device_id} does not read its messages", retry_after_s=HEARTBEAT_S)

    def _fail(self, ended: Iterable[Ended]) -> None:
        for entry in ended:
            self._switchboard.fail(entry.relay.request, entry.error)

    def _mark_seen(self, device_ids: list[str]) -> None:
        def mark() -> None:
            now = datetime.now(UTC)
            for device_id in device_ids:
                self._registry.mark_seen(device_id, now)

        try:
            if device_ids:
                self._recording.submit(mark, log_failure("recording which devices were seen"))
        except OverloadedError as error:
            _LOG.warning("not recorded which devices were seen: %s", error)
