"""One emulated device: a ``splitfleet-edge run`` process of its own, its link and its memory limit."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloud_server.lab.fleet_file import DevicePlan
from cloud_server.lab.limits import MemoryLimit, MemoryLimits
from cloud_server.lab.process import Child
from cloud_server.lab.proxy import LinkProxy
from edge_sdk.keys import SECRET_SUFFIX, CurveKeys
from edge_sdk.sizes import format_size

AGENT = (sys.executable, "-c", "from edge_sdk.cli import main; main()", "run")
RUNTIME_MODULES = {"litert": "ai_edge_litert", "tflite-runtime": "tflite_runtime"}

CPU_METHOD = "sleep"
"""The agent sleeps after each head run, for so long that the run takes ``cpu_slowdown`` times its CPU time.

The quota of a cpu cgroup cannot do it: as ``benchmarks/emulation.py`` measures, a burst of 0.3 ms stays at full speed.
"""


@dataclass(frozen=True, kw_only=True)
class DeviceKeys:
    """Where the devices find their secret keys, ``DEVICE-ID.key`` in ``folder``, and the public key of the server."""

    folder: Path
    server_key: Path

    def options(self, device_id: str) -> tuple[str, ...]:
        """The options of the agent. Raises :class:`ConfigError` for a key that cannot be used."""
        key = self.folder / f"{device_id}{SECRET_SUFFIX}"
        CurveKeys.load(key, self.server_key)
        return ("--key", str(key.absolute()), "--server-key", str(self.server_key.absolute()))


class EmulatedDevice:
    """A device of a lab. Everything that it is not itself, its labels tell."""

    def __init__(
        self,
        plan: DevicePlan,
        *,
        server: str,
        folder: Path,
        limits: MemoryLimits,
        options: Sequence[str] = (),
        agent: Sequence[str] = AGENT,
    ) -> None:
        """``options``: more ones for the agent."""
        self.plan = plan
        self.folder = folder
        self._agent = (*agent, *options)
        self._server = server
        self._limit: MemoryLimit = limits.limit(plan.device_id, plan.profile.ram_bytes)
        self._proxy = None if plan.profile.link is None else LinkProxy(server, plan.profile.link)
        self._child: Child | None = None

    @property
    def device_id(self) -> str:
        return self.plan.device_id

    @property
    def child(self) -> Child | None:
        """The process, once started."""
        return self._child

    @property
    def log_path(self) -> Path:
        return self.folder / "device.log"

    def labels(self) -> dict[str, str]:
        """What of the device is emulated, and how; keys as in :class:`edge_sdk.protocol.Emulation`."""
        profile = self.plan.profile
        link = profile.link
        slowdown = profile.cpu_slowdown or 1.0
        return {
            "ram": self._limit.label if profile.ram_bytes < _ram_bytes() else "",
            "cpu": f"{slowdown:g} × the time of this machine by {CPU_METHOD}" if slowdown > 1 else "",
            "link": ""
            if link is None
            else f"{link.uplink_mbit_s:g}/{link.downlink_mbit_s:g} Mbit/s up/down, RTT {link.rtt_ms:g} ms by a proxy",
        }

    def not_emulated(self) -> list[str]:
        """Where the device is simply this machine."""
        profile = self.plan.profile
        facts = []
        if profile.ram_bytes >= _ram_bytes():
            facts.append(f"the {format_size(profile.ram_bytes)} of RAM, here are {format_size(_ram_bytes())}")
        if profile.cores != _cores():
            facts.append(f"{_cores()} cores instead of {profile.cores}")
        if profile.architecture != platform.machine():
            facts.append(f"{platform.machine()} instead of {profile.architecture}")
        if not _is_installed(profile.runtime):
            facts.append(f"the runtime is what is installed here, not {profile.runtime}")
        if profile.cpu_slowdown is not None and profile.cpu_slowdown < 1:
            facts.append(f"the CPU, which would be {1 / profile.cpu_slowdown:g} × faster")
        return facts

    def describe(self) -> str:
        """One line for people."""
        names = {"ram": "RAM", "cpu": "CPU", "link": "link"}
        parts = [f"{names[part]} {label}" for part, label in self.labels().items() if label]
        text = (
            f"{self.device_id} ({self.plan.profile.name}), emulated: {'; '.join(parts)}. "
            f"Memory for a model: {format_size(self.plan.profile.memory_budget_bytes)}."
        )
        real = self.not_emulated()
        return f"{text} Not emulated: {'; '.join(real)}." if real else text

    def start(self) -> None:
        """Start link and process; from a thread that lives as long as the device."""
        profile = self.plan.profile
        self.folder.mkdir(parents=True, exist_ok=True)
        server = self._server if self._proxy is None else self._proxy.start().endpoint
        emulation = self.labels() | {"cpu_slowdown": max(profile.cpu_slowdown or 1.0, 1.0)}
        command = [*self._agent, "--server", server, "--device-id", self.device_id]
        command += ["--store", str(self.folder / "store"), "--profile", profile.name]
        command += ["--model-ram", str(profile.memory_budget_bytes), "--emulation", json.dumps(emulation)]
        if _is_installed(profile.runtime):
            command += ["--runtime", profile.runtime]
        self._child = Child(command, log_path=self.log_path, confine=self._limit.arguments)

    def death(self) -> str | None:
        """Why and how the process has ended, with the end of its log; ``None`` while it runs."""
        status = None if self._child is None else self._child.exit_status()
        if self._child is None or status is None:
            return None
        if self._limit.times_exceeded():
            status += f": it needed more than its RAM, {self._limit.label}"
        return f"device {self.device_id} {status}; the end of {self.log_path}:\n{self._child.last_lines()}"

    def interrupt(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        if self._child is not None:
            self._child.send(number)

    def close_link(self) -> None:
        """End the proxy, after the process."""
        if self._proxy is not None:
            self._proxy.stop()


def _ram_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _is_installed(runtime: str) -> bool:
    return importlib.util.find_spec(RUNTIME_MODULES[runtime]) is not None
