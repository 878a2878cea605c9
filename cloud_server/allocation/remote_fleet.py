"""A fleet behind a server: instructions go over one channel, and the server relays them to the devices."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from cloud_server.allocation.device_reports import install_report, run_result
from cloud_server.allocation.fleet import Array, RunResult
from edge_sdk.bundle import Bundle
from edge_sdk.channel import Channel
from edge_sdk.errors import ProtocolError, StorageError
from edge_sdk.keys import CurveKeys
from edge_sdk.manifest import Manifest, parse
from edge_sdk.protocol import (
    CallDevice,
    DeviceState,
    Install,
    InstallReport,
    ListDevices,
    LoadTail,
    Run,
    UnloadTail,
)
from edge_sdk.repository_client import RepositoryClient
from edge_sdk.wire import Message

LIST_TIMEOUT_S = 10.0
TAIL_TIMEOUT_S = 300.0
# Also waited for when a run is broken off.
UNLOAD_TIMEOUT_S = 8.0
# How long a device may take is the server's to judge, by its progress. This only bounds what the wire carries.
DEVICE_CALL_TIMEOUT_S = 24 * 3600.0


class RemoteFleet:
    """The fleet of the server at ``endpoint``. A context manager.

    ``stall_timeout_s``: how long a device may be silent or make no progress. Raises :class:`PeerUnreachableError` when
    no server answers, :class:`ConfigError` for a bad endpoint. ``keys``: an operator's, where the server has CURVE on.
    """

    def __init__(self, endpoint: str, *, stall_timeout_s: float, keys: CurveKeys | None = None) -> None:
        self._channel = Channel(endpoint, keys=keys)
        self._repository = RepositoryClient(self._channel)
        self._stall_timeout_s = stall_timeout_s
        # Blobs are appended to in order: two threads that send the same one would disturb each other.
        self._uploading = threading.Lock()
        # What a run of a published bundle must answer with.
        self._manifests: dict[str, Manifest] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def devices(self) -> Sequence[DeviceState]:
        states: list[DeviceState] = []
        after: str | None = None
        while True:
            body = self._channel.call(ListDevices(after=after), timeout_s=LIST_TIMEOUT_S).body
            page, following = body.get("devices"), body.get("next")
            if not isinstance(page, list) or not all(isinstance(entry, dict) for entry in page):
                raise ProtocolError("fleet.devices must answer with a list of devices")
            states += [DeviceState.from_body(entry) for entry in page]
            if following is None:
                return states
            if not isinstance(following, str) or (after is not None and following <= after):
                raise ProtocolError(f"fleet.devices: the page after {after!r} ends in {following!r}")
            after = following

    def publish(self, bundle: Bundle) -> None:
        with self._uploading, _own_disk("sending a bundle"):
            self._repository.put_bundle(bundle)
        self._manifests[bundle.digest] = bundle.manifest
        if bundle.manifest.has_tail:
            self._channel.call(LoadTail(bundle=bundle.digest), timeout_s=TAIL_TIMEOUT_S)

    def unload(self, digest: str) -> None:
        self._channel.call(UnloadTail(bundle=digest), timeout_s=UNLOAD_TIMEOUT_S)

    def publish_inputs(self, inputs: Mapping[str, Array]) -> Mapping[str, str]:
        blobs: dict[str, str] = {}
        with (
            _own_disk("sending samples"),
            tempfile.TemporaryDirectory(prefix="splitfleet-inputs-") as folder,
            self._uploading,
        ):
            for number, (name, array) in enumerate(inputs.items()):
                path = Path(folder) / f"{number}.npy"
                np.save(path, np.ascontiguousarray(array), allow_pickle=False)
                with path.open("rb") as file:
                    blobs[name] = hashlib.file_digest(file, "sha256").hexdigest()
                self._repository.put(blobs[name], path)
        return blobs

    def install(self, device_id: str, digest: str, *, memory_limit_bytes: int | None = None) -> InstallReport:
        request = Install(bundle=digest, memory_limit_bytes=memory_limit_bytes)
        return install_report(self._call(device_id, request).body, digest)

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
        request = Run(bundle=digest, inputs=dict(inputs), first=first, count=count, window=window, warmup=warmup)
        message = self._call(device_id, request)
        return run_result(message.body, message.arrays(), self._manifest(digest), digest, count=count)

    def _manifest(self, digest: str) -> Manifest:
        """That of a bundle which this or another allocator published."""
        if digest not in self._manifests:
            with _own_disk("fetching a manifest"), tempfile.TemporaryDirectory(prefix="splitfleet-manifest-") as folder:
                path = Path(folder) / "manifest.json"
                self._repository.fetch(digest, path)
                self._manifests[digest] = parse(path.read_bytes())
        return self._manifests[digest]

    def _call(self, device_id: str, request: Install | Run) -> Message:
        relayed = CallDevice(
            device_id=device_id,
            device_method=request.method,
            params=request.to_body(),
            stall_timeout_s=self._stall_timeout_s,
        )
        return self._channel.call(relayed, timeout_s=DEVICE_CALL_TIMEOUT_S)


@contextmanager
def _own_disk(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise StorageError(f"{where}{what} failed ({error.strerror or error})") from error
