"""What is said over the wire apart from INFER: the calls, their parameters and results.

Each call is a frozen dataclass that knows its method name, and turns into the ``body`` of a CALL and back. Bodies are
flat msgpack maps; unknown keys are ignored, missing ones are an :class:`InvalidInputError`. Who answers what:

===================  ==============  ================================================================================
method               answered by     result
===================  ==============  ================================================================================
``device.register``  server          ``{"heartbeat_s": float, "version": str}``
``device.heartbeat`` server          ``{"known": bool}``; not known: register again
``fleet.devices``    server          ``{"devices": [DeviceState as map…], "next": str | None}``, at most 16 a page
``fleet.call``       server          what the device answers to the inner call, tensors included
``tail.load``        server          ``{"load_s": float, "engine": str, "engine_reason": str}`` once the tail is warm
``tail.unload``      server          ``{"unloaded": bool}``
``blob.stat``        repository      ``{"size": int | None}``
``blob.fetch``       repository      tensor ``chunk``: uint8 (length,), shorter at the end of the blob
``blob.put``         repository      ``{"received": int}``; the blob exists once all of its bytes came and match
``device.install``   device          :class:`InstallReport`
``device.run``       device          :class:`RunReport` and the tensors named there
===================  ==============  ================================================================================
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from edge_sdk.errors import ConfigError, InvalidInputError

CHUNK_BYTES = 256 * 1024
DEVICES_PER_PAGE = 16
HEARTBEAT_S = 1.0
DEVICE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DEVICE_ID_RULE = "1 to 64 letters, digits, '.', '_' or '-', a letter or digit first"
# Of a request that a user asks for: milliseconds of it have to fit into 32 bits.
MAX_TIMEOUT_S = 24 * 3600.0
# No request has this id. An ERROR that bears it is a notice, about all requests of a connection: GOING_AWAY (nothing
# new is taken) or UNSUPPORTED_VERSION (nothing is understood).
NOTICE_ID = 0


def check_device_id(device_id: str) -> str:
    """``device_id`` if it is one. Raises :class:`ConfigError`."""
    if not DEVICE_ID.fullmatch(device_id):
        raise ConfigError(f"{device_id!r} is not a device id: expected {DEVICE_ID_RULE}")
    return device_id


class Body:
    """Mixin: a dataclass as a flat map and back."""

    def to_body(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Self:
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for spec in dataclasses.fields(cls):  # type: ignore[arg-type]
            if spec.name in body:
                values[spec.name] = _coerce(hints[spec.name], body[spec.name], f"{cls.__name__}.{spec.name}")
            elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
                raise InvalidInputError(f"{cls.__name__}: {spec.name!r} is missing")
        return cls(**values)


def _coerce(kind: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _coerce(args[0], value, where)
    if isinstance(kind, type) and issubclass(kind, Body) and isinstance(value, dict):
        return kind.from_body(value)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_coerce(args[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {_coerce(args[0], key, where): _coerce(args[1], item, where) for key, item in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Any or (
        isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    ):
        return value
    raise InvalidInputError(f"{where}: expected {kind}, got {type(value).__name__}")


@dataclass(frozen=True, kw_only=True)
class Emulation(Body):
    """How parts of a device are emulated; an empty text means that this part is real."""

    ram: str = ""
    cpu: str = ""
    link: str = ""

    def __bool__(self) -> bool:
        return bool(self.ram or self.cpu or self.link)


@dataclass(frozen=True, kw_only=True)
class Resources(Body):
    """What a device reports of itself, live. ``runtimes``: name -> version, first the one that it runs heads with."""

    ram_bytes: int
    ram_available_bytes: int
    cores: int
    architecture: str
    runtimes: dict[str, str]
    python: str = ""


@dataclass(frozen=True, kw_only=True)
class Register(Body):
    """A device makes itself known. ``model_ram_bytes`` is its memory budget.

    ``instance`` is a random text that a process makes once: so a device that merely reconnected is told from one that
    began anew and knows nothing of the calls under way. Without it each new connection counts as a new process.
    """

    method: ClassVar[str] = "device.register"
    device_id: str
    resources: Resources
    model_ram_bytes: int
    profile: str | None = None
    emulation: Emulation = field(default_factory=Emulation)
    bundle: str | None = None
    version: str = ""
    instance: str = ""


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Body):
    """A device is alive; ``progress`` grows with each unit of work done, so that a hung one is told from a busy one."""

    method: ClassVar[str] = "device.heartbeat"
    device_id: str
    progress: int


@dataclass(frozen=True, kw_only=True)
class ListDevices(Body):
    """One page of the fleet, by device id, after ``after``."""

    method: ClassVar[str] = "fleet.devices"
    after: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceState(Body):
    """A registered device as the server sees it; ``silent_s`` is the time since it was last heard of."""

    registration: Register
    online: bool
    silent_s: float


@dataclass(frozen=True, kw_only=True)
class CallDevice(Body):
    """Relay a call to a device. ``stall_timeout_s``: how long it may be silent or make no progress."""

    method: ClassVar[str] = "fleet.call"
    device_id: str
    device_method: str
    params: dict[str, Any]
    stall_timeout_s: float


@dataclass(frozen=True, kw_only=True)
class LoadTail(Body):
    """Make the tail of a bundle that is in the repository ready to serve."""

    method: ClassVar[str] = "tail.load"
    bundle: str


@dataclass(frozen=True, kw_only=True)
class UnloadTail(Body):
    """Stop serving a tail."""

    method: ClassVar[str] = "tail.unload"
    bundle: str


@dataclass(frozen=True, kw_only=True)
class StatBlob(Body):
    """Ask for the size of a blob."""

    method: ClassVar[str] = "blob.stat"
    sha256: str


@dataclass(frozen=True, kw_only=True)
class FetchBlob(Body):
    """Read a piece of a blob."""

    method: ClassVar[str] = "blob.fetch"
    sha256: str
    offset: int
    length: int = CHUNK_BYTES


@dataclass(frozen=True, kw_only=True)
class PutBlob(Body):
    """Append tensor ``chunk`` (uint8) to a blob of ``size`` bytes in all, of which ``offset`` came so far.

    A chunk for another offset is not taken: ``received`` of the answer tells from where to go on.
    """

    method: ClassVar[str] = "blob.put"
    sha256: str
    size: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Install(Body):
    """The allocation instruction: fetch this bundle's manifest and head, check, warm, measure, hold ready.

    ``repository`` is the endpoint to fetch from; ``None``: the server that sent the instruction. A head that
    is measured to grow a process by more than ``memory_limit_bytes`` is refused.
    """

    method: ClassVar[str] = "device.install"
    bundle: str
    repository: str | None = None
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class InstallReport(Body):
    """``peak_bytes``: growth of a fresh process over loading the head and ten invokes, measured on the device."""

    bundle: str
    runtime: str
    runtime_version: str
    head_bytes: int
    peak_bytes: int
    fetched_bytes: int
    install_s: float


@dataclass(frozen=True, kw_only=True)
class Run(Body):
    """Infer samples ``first`` to ``first + count`` of the inputs, each a ``.npy`` blob by input name.

    ``window`` requests are under way at once: 1 for latency, more for throughput. ``warmup`` requests come first and do
    not count.
    """

    method: ClassVar[str] = "device.run"
    bundle: str
    inputs: dict[str, str]
    first: int
    count: int
    window: int = 1
    warmup: int = 0
    repository: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunReport(Body):
    """Goes with the tensors ``output_0…`` (count, …) float32 in the model's order, and ``edge_s``, ``transfer_s``,
    ``cloud_s`` (count,) float64. ``sent_bytes`` is the mean size of one request as it crossed, all frames together.
    """

    bundle: str
    runtime: str
    count: int
    sent_bytes: float
    received_bytes: float
