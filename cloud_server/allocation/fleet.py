"""What the loop needs of a fleet; :mod:`cloud_server.allocation.remote_fleet` has it over the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edge_sdk.bundle import Bundle
from edge_sdk.protocol import DeviceState, InstallReport

Array = npt.NDArray[Any]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunResult:
    """What came back of ``count`` requests: the model's ``outputs`` in its order, each (count, …), and the times of
    each request, (count,). ``sent_bytes`` is the mean size of a request.
    """

    outputs: tuple[Array, ...]
    edge_s: Seconds
    transfer_s: Seconds
    cloud_s: Seconds
    sent_bytes: float


class Fleet(Protocol):
    """All methods may be called from any thread.

    They raise :class:`DeviceUnreachableError` when the device is gone or hangs, :class:`PeerUnreachableError` when the
    server is, or the error that the device or the server answered with.
    """

    def devices(self) -> Sequence[DeviceState]:
        """All devices that the server knows."""
        ...

    def publish(self, bundle: Bundle) -> None:
        """Put a bundle into the model repository, and have its tail, if it has one, loaded and warm."""
        ...

    def unload(self, digest: str) -> None:
        """No device uses this bundle's tail any more."""
        ...

    def publish_inputs(self, inputs: Mapping[str, Array]) -> Mapping[str, str]:
        """Put arrays (N, …) into the repository, each as a ``.npy`` blob; returns the blobs by input name."""
        ...

    def install(self, device_id: str, digest: str, *, memory_limit_bytes: int | None = None) -> InstallReport:
        """Have a device fetch, check, warm and hold ready a published bundle.

        Raises :class:`DoesNotFitError` too, when its head grows a process by more than the limit there.
        """
        ...

    def run(
        self,
        device_id: str,
        digest: str,
        inputs: Mapping[str, str],
        *,
        first: int,
        count: int,
        window: int,
        warmup: int,
    ) -> RunResult:
        """Have a device infer samples ``first`` to ``first + count`` of published inputs with an installed bundle."""
        ...

    def close(self) -> None:
        """What is under way fails with :class:`PeerUnreachableError`."""
        ...
