"""Give each device of a fleet one model of a task and one cut, by measurement.

::

    result = run_allocation(
        AllocationSettings(task="fashion-mnist", thresholds=Thresholds(min_accuracy=0.85, max_latency_ms=60)),
        endpoint="tcp://127.0.0.1:5555",
        registry_url=home.registry_url,
        home=home,
    )
    result.raise_if_incomplete()

Importing the package loads neither SQLAlchemy nor TensorFlow; the latter only ever runs in processes of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloud_server.allocation.settings import AllocationSettings, Thresholds
from cloud_server.home import Home

if TYPE_CHECKING:
    from cloud_server.allocation.observer import Observer
    from cloud_server.allocation.result import AllocationResult
    from edge_sdk.keys import CurveKeys

__all__ = ["AllocationSettings", "Thresholds", "run_allocation"]


def run_allocation(
    settings: AllocationSettings,
    *,
    endpoint: str,
    registry_url: str,
    home: Home,
    observer: Observer | None = None,
    wait_for_devices: bool = False,
    keys: CurveKeys | None = None,
) -> AllocationResult:
    """Allocate the fleet of the server at ``endpoint``, and return how it ended for each device.

    An allocation that does not succeed is a result, not an exception; what raises is what keeps the loop from running:
    :class:`PeerUnreachableError` without a server, :class:`RegistryUnreachableError` without a registry,
    :class:`ConfigError` for a task or endpoint that is none, or when no device is online, unless ``wait_for_devices``:
    then the first one is waited for. Whatever happens is in the registry. ``keys``: an operator's, where the server has
    CURVE on.
    """
    # Both ways round: the registry knows the words of an allocation, and its store is heavy to import.
    from cloud_server.allocation.observer import Observer
    from cloud_server.allocation.run import run_over_wire

    return run_over_wire(
        settings,
        endpoint=endpoint,
        registry_url=registry_url,
        home=home,
        observer=observer or Observer(),
        wait_for_devices=wait_for_devices,
        keys=keys,
    )
