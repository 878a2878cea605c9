"""Errors of the registry that a caller tells apart."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from cloud_server.registry.records import RunRecord
from edge_sdk.errors import ConfigError


class RunUnderWayError(ConfigError):
    """Another run has some of the devices; it counts as alive until ``lease_until``, unless it is renewed."""

    def __init__(self, run: RunRecord, devices: Sequence[str], *, lease_until: datetime) -> None:
        what = f"the devices {', '.join(devices)}" if devices else "devices that this one may need"
        super().__init__(
            f"run {run.run_id} of task {run.settings.task!r} is under way and has {what}; wait for its end, "
            "stop it, or give each run devices of its own with --devices"
        )
        self.run_id = run.run_id
        self.lease_until = lease_until
