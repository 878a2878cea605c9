"""What a device answers to an instruction, checked before anything is reckoned or recorded of it.

A device may be broken, or somebody else's: what it says must cost its own trial at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from cloud_server.allocation.fleet import Array, RunResult, Seconds
from edge_sdk.errors import InvalidInputError, ProtocolError
from edge_sdk.manifest import Manifest
from edge_sdk.protocol import Body, InstallReport, RunReport

# No request takes a day, and the registry has 63 bits for a number of bytes.
MAX_S = 24 * 3600.0
MAX_BYTES = 2**63 - 1

B = TypeVar("B", bound=Body)


def install_report(body: dict[str, Any], digest: str) -> InstallReport:
    """The report on installing the bundle ``digest``. Raises :class:`ProtocolError` where it cannot be true."""
    report = _parsed(InstallReport, body, "device.install")
    _same("device.install: bundle", report.bundle, digest)
    for name in ("head_bytes", "peak_bytes", "fetched_bytes"):
        _within(f"device.install: {name}", getattr(report, name), MAX_BYTES)
    _within("device.install: install_s", report.install_s, MAX_S)
    return report


def run_result(
    body: dict[str, Any], arrays: Mapping[str, Array], manifest: Manifest, digest: str, *, count: int
) -> RunResult:
    """The result of running ``count`` samples through the bundle ``digest``.

    Raises :class:`ProtocolError` where it cannot be true: outputs must be as in the manifest, (count, *shape) float32.
    """
    report = _parsed(RunReport, body, "device.run")
    _same("device.run: bundle", report.bundle, digest)
    _same("device.run: count", report.count, count)
    for name in ("sent_bytes", "received_bytes"):
        _within(f"device.run: {name}", getattr(report, name), MAX_BYTES)
    outputs = tuple(
        _tensor(arrays, f"output_{number}", (count, *spec.shape), np.float32)
        for number, spec in enumerate(manifest.outputs)
    )
    edge_s, transfer_s, cloud_s = (_times(arrays, name, count) for name in ("edge_s", "transfer_s", "cloud_s"))
    return RunResult(
        outputs=outputs, edge_s=edge_s, transfer_s=transfer_s, cloud_s=cloud_s, sent_bytes=report.sent_bytes
    )


def _parsed(kind: type[B], body: dict[str, Any], what: str) -> B:
    try:
        return kind.from_body(body)
    except InvalidInputError as error:
        raise ProtocolError(f"{what}: the device's report is none: {error.message}") from error


def _same(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise ProtocolError(f"{what}: asked for {expected!r}, the device reports on {str(got)[:100]!r}")


def _within(what: str, value: float, most: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= most):
        raise ProtocolError(f"{what}: expected 0 to {most:g}, the device reports {value!r}"[:300])


def _tensor(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
    array = arrays.get(name)
    if array is None or array.shape != shape or array.dtype != dtype:
        got = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
        raise ProtocolError(f"device.run: tensor {name!r}: expected {np.dtype(dtype)} {list(shape)}, got {got}")
    return array


def _times(arrays: Mapping[str, Array], name: str, count: int) -> Seconds:
    array: Seconds = _tensor(arrays, name, (count,), np.float64)
    if not (np.isfinite(array) & (array >= 0) & (array <= MAX_S)).all():
        raise ProtocolError(f"device.run: tensor {name!r}: expected times of 0 to {MAX_S:g} s")
    return array
