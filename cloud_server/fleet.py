"""The fleet: which devices are connected, and the calls that are relayed to them.

Pure bookkeeping with an injected clock: no sockets, no threads. The server sends what is decided here, and tells what
came back. A relayed call ends once: with the device's answer, because the device is gone, silent, stuck or began anew,
or because whoever asked gave up. Ids of relayed calls are random 64-bit numbers, so an answer finds its call by id
alone, also over a connection that the device made anew meanwhile, and an answer that comes late finds none.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgpack

from cloud_server.ledger import Request
from cloud_server.registration_check import check_registration
from edge_sdk.errors import DeviceUnreachableError, InvalidInputError, OverloadedError
from edge_sdk.protocol import DEVICES_PER_PAGE, HEARTBEAT_S, CallDevice, DeviceState, Heartbeat, Register

# Three heartbeats missed, and half of one for the road.
OFFLINE_AFTER_S = 3.5 * HEARTBEAT_S
# How often the registry hears which devices there are.
MARK_SEEN_EVERY_S = 10.0
CALLS_PER_DEVICE = 16
# A page of devices has to fit into the header of one message.
_MAX_REGISTRATION_BYTES = 4 * 1024
_MAX_PAGE_BYTES = 12 * 1024


@dataclass(eq=False, kw_only=True, slots=True)
class Relay:
    """A call under way on a device, on behalf of ``request``. ``id`` is the request id that the device sees."""

    id: int
    device_id: str
    request: Request
    stall_timeout_s: float
    began_at: float


@dataclass(eq=False, kw_only=True, slots=True)
class _Device:
    registration: Register
    routing_id: bytes
    heard_at: float
    progress: int | None
    progress_at: float
    relays: dict[int, Relay]
    # Until its connection is found to be gone; it is connected again once it registers.
    connected: bool = True


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A relayed call that ended without an answer, and why."""

    relay: Relay
    error: DeviceUnreachableError


class Fleet:
    """All devices that registered since the server started."""

    def __init__(
        self, *, offline_after_s: float = OFFLINE_AFTER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._offline_after_s = offline_after_s
        self._clock = clock
        self._devices: dict[str, _Device] = {}
        self._profiles: dict[bytes, str] = {}
        self._relays: dict[int, Relay] = {}

    @staticmethod
    def check(registration: Register) -> None:
        """Raises :class:`InvalidInputError` for a registration that cannot be taken."""
        size_bytes = len(msgpack.packb(registration.to_body()))
        if size_bytes > _MAX_REGISTRATION_BYTES:
            raise InvalidInputError(
                f"device {registration.device_id[:64]!r}: a registration has at most {_MAX_REGISTRATION_BYTES} bytes, "
                f"got {size_bytes}"
            )
        check_registration(registration)

    def register(self, registration: Register, routing_id: bytes) -> list[Ended]:
        """A device made itself known; returns the calls that ended since its process is another one now."""
        self.check(registration)
        now = self._clock()
        device_id = registration.device_id
        known = self._devices.get(device_id)
        ended: list[Ended] = []
        if known is not None and not _is_same_process(known, registration, routing_id):
            ended = self._end(known.relays.values(), f"device {device_id} began anew: its process is another one now")
            known = None
        if device_id in self._devices:
            self._profiles.pop(self._devices[device_id].routing_id, None)
        self._profiles[routing_id] = registration.profile or ""
        self._devices[device_id] = _Device(
            registration=registration,
            routing_id=routing_id,
            heard_at=now,
            progress=known.progress if known else None,
            progress_at=known.progress_at if known else now,
            relays=known.relays if known else {},
        )
        return ended

    def rival(self, registration: Register, routing_id: bytes) -> bytes | None:
        """Routing id of another process that goes by this device id and is online, if there is one.

        Only a message tells whether it is connected still: a device that restarts is back before that is offline.
        """
        known = self._devices.get(registration.device_id)
        if known is None or _is_same_process(known, registration, routing_id):
            return None
        return known.routing_id if self._is_online(known) else None

    def heartbeat(self, heartbeat: Heartbeat, routing_id: bytes) -> bool:
        """A device is alive. ``False``: it is not known on this connection and has to register."""
        device = self._devices.get(heartbeat.device_id)
        if device is None or device.routing_id != routing_id or not device.connected:
            return False
        device.heard_at = self._clock()
        if heartbeat.progress != device.progress:
            device.progress = heartbeat.progress
            device.progress_at = device.heard_at
        return True

    def profile_of(self, routing_id: bytes) -> str:
        """The profile of the device that registered over that connection; empty for one without, and for others."""
        return self._profiles.get(routing_id, "")

    def online(self) -> int:
        """How many devices are heard of. May be asked from any thread."""
        return sum(map(self._is_online, self._devices.copy().values()))

    def page(self, after: str | None) -> tuple[list[DeviceState], str | None]:
        """Devices by id from the first one after ``after``, and what to ask for next (``None``: that was all)."""
        now = self._clock()
        following = sorted(device_id for device_id in self._devices if after is None or device_id > after)
        states: list[DeviceState] = []
        size_bytes = 0
        for device_id in following[:DEVICES_PER_PAGE]:
            device = self._devices[device_id]
            silent_s = now - device.heard_at
            state = DeviceState(registration=device.registration, online=self._is_online(device), silent_s=silent_s)
            size_bytes += len(msgpack.packb(state.to_body()))
            if size_bytes > _MAX_PAGE_BYTES:
                break
            states.append(state)
        more = len(states) < len(following)
        return states, states[-1].registration.device_id if more else None

    def heard_since(self, moment: float) -> list[str]:
        """Ids of the devices that were heard of since ``moment`` of the clock."""
        return [device_id for device_id, device in self._devices.items() if device.heard_at >= moment]

    def open(self, call: CallDevice, request: Request) -> tuple[Relay, bytes]:
        """Begin a call on behalf of ``request``; returns it and the routing id to send it to.

        Raises :class:`DeviceUnreachableError` for a device that never registered, :class:`OverloadedError` when too
        many calls to it are under way, :class:`InvalidInputError` for a timeout that is none.
        """
        if not call.stall_timeout_s > 0:
            raise InvalidInputError(f"CallDevice.stall_timeout_s must be positive, got {call.stall_timeout_s}")
        device = self._devices.get(call.device_id)
        if device is None:
            raise DeviceUnreachableError(f"no device {call.device_id[:160]!r} is registered at this server")
        self._forget_given_up(device)
        if len(device.relays) >= CALLS_PER_DEVICE:
            raise OverloadedError(
                f"device {call.device_id}: {CALLS_PER_DEVICE} calls are under way, which is the limit",
                retry_after_s=HEARTBEAT_S,
            )
        relay = Relay(
            id=secrets.randbits(64),
            device_id=call.device_id,
            request=request,
            stall_timeout_s=call.stall_timeout_s,
            began_at=self._clock(),
        )
        device.relays[relay.id] = self._relays[relay.id] = relay
        return relay, device.routing_id

    def under_way(self) -> list[Relay]:
        """All calls that have no end yet."""
        return [relay for relay in self._relays.values() if not relay.request.ended]

    def answered(self, relay_id: int, *, by: str | None = None) -> Relay | None:
        """Close and return the call that an answer belongs to; ``None``: it ended before, the answer is late.

        ``by``: the device that answered, where that is known; the call of another one is not its to end.
        """
        relay = self._relays.get(relay_id)
        if relay is None or (by is not None and by != relay.device_id):
            return None
        self._forget(relay)
        return None if relay.request.ended else relay

    def stalled(self) -> list[Ended]:
        """Close and return the calls whose device made no progress for their stall timeout."""
        now = self._clock()
        ended: list[Ended] = []
        for device in self._devices.values():
            self._forget_given_up(device)
            silent_s = now - device.heard_at
            state = f"silent for {silent_s:.1f} s" if silent_s >= self._offline_after_s else "alive but stuck"
            for relay in tuple(device.relays.values()):
                if now - max(relay.began_at, device.progress_at) >= relay.stall_timeout_s:
                    reason = f"device {relay.device_id} made no progress for {relay.stall_timeout_s:g} s ({state})"
                    ended += self._end([relay], reason)
        return ended

    def suspects(self) -> list[bytes]:
        """Routing ids of the devices that owe an answer and are silent: probe whether they are connected at all."""
        silent_since = self._clock() - self._offline_after_s
        return [
            device.routing_id for device in self._devices.values() if device.relays and device.heard_at <= silent_since
        ]

    def lost(self, routing_id: bytes) -> list[Ended]:
        """A device's connection is gone: close and return its calls. It is offline until it registers again."""
        ended: list[Ended] = []
        for device_id, device in self._devices.items():
            if device.routing_id == routing_id:
                device.connected = False
                ended += self._end(device.relays.values(), f"device {device_id} is not connected any more")
        return ended

    def _is_online(self, device: _Device) -> bool:
        return device.connected and self._clock() - device.heard_at < self._offline_after_s

    def _end(self, relays: Iterable[Relay], reason: str) -> list[Ended]:
        ended = [Ended(relay=relay, error=DeviceUnreachableError(reason)) for relay in relays]
        for entry in ended:
            self._forget(entry.relay)
        return ended

    def _forget_given_up(self, device: _Device) -> None:
        """Drop the calls whose requests ended otherwise: nobody waits for them."""
        for relay in [relay for relay in device.relays.values() if relay.request.ended]:
            self._forget(relay)

    def _forget(self, relay: Relay) -> None:
        del self._relays[relay.id]
        self._devices[relay.device_id].relays.pop(relay.id, None)


def _is_same_process(known: _Device, registration: Register, routing_id: bytes) -> bool:
    """Whether a device that registers again merely does so, or reconnected; its calls are still under way then."""
    if known.routing_id == routing_id:
        return True
    return registration.instance != "" and registration.instance == known.registration.instance
