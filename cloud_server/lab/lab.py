"""The lab: starts the devices of a fleet, watches over them, and leaves nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from cloud_server.lab.devices import AGENT, DeviceKeys, EmulatedDevice
from cloud_server.lab.fleet_file import Fleet
from cloud_server.lab.limits import MemoryLimits, open_limits
from cloud_server.lab.process import stop_all
from edge_sdk.channel import Channel
from edge_sdk.errors import LabError
from edge_sdk.protocol import DeviceState, ListDevices

START_TIMEOUT_S = 60.0
GRACE_S = 5.0
ASK_TIMEOUT_S = 10.0
POLL_S = 0.1


class Lab:
    """The emulated devices of one fleet. A context manager: leaving it stops all of them."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        server: str,
        folder: Path,
        keys: DeviceKeys | None = None,
        agent: Sequence[str] = AGENT,
        open_limits: Callable[[], MemoryLimits] = open_limits,
    ) -> None:
        """``folder`` gets a folder for each device, its store and its log. ``keys``: for a server with CURVE on."""
        self._limits = open_limits()
        self._reported: set[str] = set()
        self._before: dict[str, str] = {}
        try:
            self.devices = [
                EmulatedDevice(
                    plan,
                    server=server,
                    folder=folder / plan.device_id,
                    limits=self._limits,
                    options=() if keys is None else keys.options(plan.device_id),
                    agent=agent,
                )
                for plan in fleet.devices
            ]
        except BaseException:
            self._limits.close()
            raise

    def start(self, channel: Channel | None = None) -> None:
        """Start all processes; from a thread that lives as long as the lab.

        With the ``channel`` that :meth:`wait_until_registered` asks, devices of the same ids that an earlier lab had
        there are not taken for these.
        """
        self._before = {} if channel is None else online_instances(channel)
        for device in self.devices:
            device.start()

    def wait_until_registered(
        self, channel: Channel, *, timeout_s: float = START_TIMEOUT_S, stopping: threading.Event | None = None
    ) -> None:
        """Return when the server knows all devices as online, or ``stopping`` is set.

        Raises :class:`LabError` for a device that dies, or does not register within ``timeout_s``.
        """
        stopping = stopping or threading.Event()
        deadline = time.monotonic() + timeout_s
        while missing := self._not_registered(channel):
            deaths = self.new_deaths()
            if deaths:
                raise LabError("\n".join(deaths))
            if time.monotonic() > deadline:
                logs = "\n".join(str(device.log_path) for device in self.devices if device.device_id in missing)
                raise LabError(f"not registered within {timeout_s:g} s: {', '.join(sorted(missing))}; see\n{logs}")
            if stopping.wait(POLL_S):
                return

    def _not_registered(self, channel: Channel) -> set[str]:
        online = online_instances(channel)
        ids = {device.device_id for device in self.devices}
        return {each for each in ids if each not in online or online[each] == self._before.get(each)}

    def new_deaths(self) -> list[str]:
        """What to say of each device that has died since the last time that this was asked."""
        deaths = []
        for device in self.devices:
            death = device.death()
            if death is not None and device.device_id not in self._reported:
                self._reported.add(device.device_id)
                deaths.append(death)
        return deaths

    @property
    def alive(self) -> int:
        """How many devices run."""
        return sum(device.child is not None and device.child.exit_status() is None for device in self.devices)

    def stop(self) -> None:
        """Stop all devices, within twice the grace period, and take links and limits away."""
        try:
            stop_all((device.child for device in self.devices if device.child is not None), grace_s=GRACE_S)
        finally:
            for device in self.devices:
                device.close_link()
            self._limits.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def online_instances(channel: Channel) -> dict[str, str]:
    """The devices that the server knows and hears: the instance that registered, by device id."""
    online: dict[str, str] = {}
    after: str | None = None
    while True:
        page = channel.call(ListDevices(after=after), timeout_s=ASK_TIMEOUT_S).body
        states = [DeviceState.from_body(body) for body in page["devices"]]
        online |= {each.registration.device_id: each.registration.instance for each in states if each.online}
        after = page["next"]
        if after is None:
            return online
