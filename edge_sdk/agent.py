"""The agent of a device: it registers at the server, and does there and then what the server asks of it.

The main thread holds the connection and sends heartbeats; work runs in the channel's thread for calls, and the TFLite
runtimes let go of Python's lock while they compute, so work cannot starve heartbeats. Each heartbeat carries a counter
of work done, by which a hung device is told from a busy one. A server that is away is tried again for ever.
"""

from __future__ import annotations

import importlib.metadata
import logging
import random
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from edge_sdk.bundle import Bundle
from edge_sdk.channel import Channel
from edge_sdk.errors import (
    DeviceIdTakenError,
    DeviceUnreachableError,
    DoesNotFitError,
    PeerUnreachableError,
    SplitfleetError,
    UnauthorizedError,
    UnknownBundleError,
    UnknownMethodError,
)
from edge_sdk.evaluation_run import check_run, execute, open_inputs
from edge_sdk.head import Head
from edge_sdk.inference import Inference
from edge_sdk.keys import CurveKeys
from edge_sdk.memory import measure
from edge_sdk.protocol import HEARTBEAT_S, Emulation, Heartbeat, Install, InstallReport, Register, Resources, Run
from edge_sdk.repository_client import RepositoryClient
from edge_sdk.resources import detect
from edge_sdk.runtime import choose_runtime, runtime_version
from edge_sdk.sizes import format_size
from edge_sdk.store import DeviceStore
from edge_sdk.wire import Message, Tensor

# A signal is heeded when an attempt to connect is over.
CONNECT_TIMEOUT_S = 2.0
CALL_TIMEOUT_S = 10.0
POLL_S = 0.2
# With several requests under way on a thin link, one waits for those before it.
REQUEST_TIMEOUT_S = 60.0
FIRST_RETRY_S = 0.5
MAX_RETRY_S = 15.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """How a device presents itself. ``cpu_slowdown`` above 1 emulates a slower processor by pauses; ``keys`` are for a
    server with CURVE on.
    """

    server: str
    device_id: str
    model_ram_bytes: int
    profile: str | None = None
    runtime: str | None = None
    emulation: Emulation = field(default_factory=Emulation)
    cpu_slowdown: float = 1.0
    keys: CurveKeys | None = None


class Agent:
    """One device. :meth:`run` works until :meth:`stop`."""

    def __init__(self, settings: AgentSettings, store: DeviceStore) -> None:
        """Raises :class:`RuntimeUnavailableError` when no head could ever run here."""
        self._settings = settings
        self._store = store
        self._runtime = choose_runtime(settings.runtime)
        self._instance = secrets.token_hex(16)
        self._stop = threading.Event()
        self._progress = 0
        self._head: Head | None = None
        self._channel: Channel | None = None
        self._retry_s = FIRST_RETRY_S

    def stop(self) -> None:
        """End :meth:`run` soon; may be called from a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Serve until :meth:`stop`; a server that is unreachable, or does not allow our key, is tried again, more and
        more seldom.
        """
        while not self._stop.is_set():
            try:
                with Channel(
                    self._settings.server,
                    on_call=self._on_call,
                    connect_timeout_s=CONNECT_TIMEOUT_S,
                    keys=self._settings.keys,
                ) as channel:
                    self._channel = channel
                    self._keep_registered(channel)
            except (PeerUnreachableError, UnauthorizedError) as error:
                logger.warning("%s; trying again", error.message)
                self._back_off()

    def _back_off(self) -> None:
        # Spread, so that a fleet does not come back in one instant.
        self._stop.wait(self._retry_s * random.uniform(0.5, 1.0))
        self._retry_s = min(self._retry_s * 2, MAX_RETRY_S)

    def _keep_registered(self, channel: Channel) -> None:
        """Register on each new connection and send heartbeats between, until :meth:`stop`.

        Raises :class:`UnauthorizedError` when the server does not allow our key, or not any more, and
        :class:`PeerUnreachableError` when the channel is of no more use.
        """
        registered = 0
        heartbeat_s = HEARTBEAT_S
        while not self._stop.is_set():
            if channel.ended:
                raise PeerUnreachableError(f"the connection to {self._settings.server} failed inside")
            connection = channel.connections
            try:
                if registered != connection:
                    heartbeat_s = self._register(channel)
                    registered = connection
                    self._retry_s = FIRST_RETRY_S
                heartbeat = Heartbeat(device_id=self._settings.device_id, progress=self._progress)
                if not self._ask(channel, heartbeat).get("known"):
                    logger.info("the server does not know this device any more: registering again")
                    registered = 0
            except UnauthorizedError:
                # Only a new handshake tells when it is allowed again.
                raise
            except DeviceIdTakenError as error:
                # It may be what is left of our own process before a restart: then we get in once that is offline.
                logger.error("%s; trying again", error.message)
                self._back_off()
                continue
            except SplitfleetError as error:
                if self._stop.is_set():
                    return
                logger.warning("heartbeat to %s failed: %s", self._settings.server, error.message)
            self._stop.wait(heartbeat_s)

    def _register(self, channel: Channel) -> float:
        settings = self._settings
        registration = Register(
            device_id=settings.device_id,
            resources=self._resources(),
            model_ram_bytes=settings.model_ram_bytes,
            profile=settings.profile,
            emulation=settings.emulation,
            bundle=self._store.active,
            version=_own_version(),
            instance=self._instance,
        )
        answer = self._ask(channel, registration)
        logger.info(
            "registered at %s as %s; bundles are kept in %s", settings.server, settings.device_id, self._store.path
        )
        heartbeat_s = answer.get("heartbeat_s")
        return heartbeat_s if isinstance(heartbeat_s, float) and 0 < heartbeat_s <= 60 else HEARTBEAT_S

    def _resources(self) -> Resources:
        """The runtime that heads run with comes first: the server plans with it."""
        resources = detect()
        own = {self._runtime: runtime_version(self._runtime)}
        return replace(resources, runtimes=own | resources.runtimes)

    def _ask(self, channel: Channel, request: Register | Heartbeat) -> dict[str, Any]:
        answer = channel.begin_call(request, timeout_s=CALL_TIMEOUT_S)
        while not self._stop.is_set():
            # In steps: a signal handler only sets the flag, it cannot wake us.
            with suppress(TimeoutError):
                return answer.result(POLL_S).body
        raise DeviceUnreachableError(f"device {self._settings.device_id} shuts down")

    # Below: in the channel's thread for calls.

    def _on_call(self, message: Message) -> tuple[dict[str, Any], Sequence[Tensor]]:
        try:
            return self._take_on(message)
        except PeerUnreachableError as error:
            # Nobody answered us. Whoever asked has the server still, and would take that error for the loss of it.
            raise DeviceUnreachableError(
                f"device {self._settings.device_id} was cut off during {message.method}: {error.message}"
            ) from error

    def _take_on(self, message: Message) -> tuple[dict[str, Any], Sequence[Tensor]]:
        if message.method == Install.method:
            return self._install(Install.from_body(message.body)).to_body(), ()
        if message.method == Run.method:
            return self._run(Run.from_body(message.body))
        raise UnknownMethodError(
            f"a device has no method {(message.method or '')[:80]!r}: it takes device.install and device.run"
        )

    def _install(self, request: Install) -> InstallReport:
        began_at = time.monotonic()
        with self._repository(request.repository) as repository:
            bundle, fetched_bytes = self._store.install(
                request.bundle, lambda folder: repository.fetch_bundle(request.bundle, folder, head_only=True)
            )
        self._advance()
        has_head = bundle.manifest.has_head
        peak_bytes = 0
        # A small device has no room for the head that is loaded beside the process that measures this one.
        self._head = None
        if has_head:
            peak_bytes = measure(bundle.head_path, runtime=self._runtime, stop=self._stop).peak_bytes
            self._advance()
            _require_fit(peak_bytes, request.memory_limit_bytes, bundle.digest)
        self._load(bundle)
        self._store.activate(bundle.digest)
        logger.info("installed bundle %s", bundle.path)
        return InstallReport(
            bundle=bundle.digest,
            runtime=self._runtime if has_head else "none",
            runtime_version=runtime_version(self._runtime) if has_head else "",
            head_bytes=bundle.head_path.stat().st_size if has_head else 0,
            peak_bytes=peak_bytes,
            fetched_bytes=fetched_bytes,
            install_s=time.monotonic() - began_at,
        )

    def _run(self, run: Run) -> tuple[dict[str, Any], Sequence[Tensor]]:
        head = self._loaded(run.bundle)
        manifest = head.bundle.manifest
        check_run(run, manifest)
        with self._repository(run.repository) as repository:
            files = {
                name: self._store.blob(sha256, partial(repository.fetch, sha256)) for name, sha256 in run.inputs.items()
            }
        inference = Inference(
            head, self._channel, timeout_s=REQUEST_TIMEOUT_S, cpu_slowdown=self._settings.cpu_slowdown
        )
        report, tensors = execute(run, inference, open_inputs(run, manifest, files), manifest, self._advance)
        return report.to_body(), tensors

    def _loaded(self, digest: str) -> Head:
        if self._head is None or self._head.bundle.digest != digest:
            bundle = self._store.bundle(digest)
            if bundle is None:
                raise UnknownBundleError(f"bundle {digest} is not installed on this device: send device.install first")
            self._load(bundle)
        assert self._head is not None
        return self._head

    def _load(self, bundle: Bundle) -> None:
        # So that two heads are never in memory together.
        self._head = None
        self._head = Head(bundle, runtime=self._runtime)
        self._advance()

    @contextmanager
    def _repository(self, endpoint: str | None) -> Iterator[RepositoryClient]:
        assert self._channel is not None
        if endpoint is None or endpoint == self._settings.server:
            yield RepositoryClient(self._channel, progress=self._advance)
            return
        with Channel(endpoint, connect_timeout_s=CONNECT_TIMEOUT_S, keys=self._settings.keys) as channel:
            yield RepositoryClient(channel, progress=self._advance)

    def _advance(self) -> None:
        self._progress += 1
        if self._stop.is_set():
            raise DeviceUnreachableError(f"device {self._settings.device_id} shuts down")


def _require_fit(peak_bytes: int, limit_bytes: int | None, digest: str) -> None:
    if limit_bytes is not None and peak_bytes > limit_bytes:
        raise DoesNotFitError(
            f"the head of bundle {digest[:12]} grows a process by {format_size(peak_bytes)} on this device, "
            f"its memory budget is {format_size(limit_bytes)}",
            peak_bytes=peak_bytes,
            memory_limit_bytes=limit_bytes,
        )


def _own_version() -> str:
    try:
        return importlib.metadata.version("splitfleet")
    except importlib.metadata.PackageNotFoundError:
        # Run from a source tree.
        return ""
