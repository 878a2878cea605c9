"""The manifest of a bundle: what was split, where, and which bytes it became.

A manifest is canonical JSON (sorted keys, no spaces, UTF-8); the SHA-256 of these bytes is the bundle's digest, so the
digest covers every file too. Shapes never hold the batch axis. Tensors bear two names: ``name`` is what the user sees
(inputs and outputs as in the whole model), the *signature key* is the stable name inside the files, by position:
``input_0…``, ``feature_0…``, ``output_0…``, whatever Keras invented.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from edge_sdk.errors import BundleError
from edge_sdk.wire import DTYPES, MAX_RANK, is_digest

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"
HEAD_FILE = "head.tflite"
TAIL_DIR = "tail"
TAIL_TFLITE_FILE = "tail.tflite"

Side = Literal["head", "tail"]
Precision = Literal["int8", "int8-weights", "float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """The model that was split; ``sha256`` covers its architecture and weights."""

    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The boundary after operation ``k`` of ``n`` in topological order; ``name`` is that operation's.

    ``k == n`` means edge-only (no tail), ``k == 0`` cloud-only (no head: the raw input crosses).
    """

    k: int
    n: int
    name: str


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """An input of the whole model, in its order. ``scale`` and ``zero_point`` map it to the head's int8 input."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scale: float | None = None
    zero_point: int | None = None


@dataclass(frozen=True, kw_only=True)
class CrossingSpec:
    """A tensor that crosses the cut, as it travels: real = scale × (value - zero_point) where a scale is given.

    ``source`` is the operation that makes it.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    scale: float | None = None
    zero_point: int | None = None


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """An output of the whole model, in its order; ``side`` tells which half returns it.

    One that the head returns as int8 has a ``scale`` and a ``zero_point``. ``dtype`` is what the user gets.
    """

    name: str
    side: Side
    shape: tuple[int, ...]
    dtype: str
    scale: float | None = None
    zero_point: int | None = None


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of the bundle; ``path`` is relative, with forward slashes."""

    path: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """Proof that a head computes on this device what it computed where it was made.

    The input bytes are ``SHAKE-128(str(seed))``, read as the head's input dtype (see ``edge_sdk.head``); ``expected``
    holds, per signature key of the head's outputs, evenly spaced raw values of the flattened output, first to last.
    """

    seed: int
    expected: dict[str, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A bundle's description. Build it, or read it with :func:`parse`; both check it as a whole.

    ``precision`` is the head's. Where a better one was tried first, ``precision_reason`` says why it is not that one.
    ``tail_tflite_reason`` says why there is a tail, but no ``tail.tflite``.
    """

    task: str
    model: ModelRef
    cut: Cut
    precision: Precision
    inputs: tuple[InputSpec, ...]
    crossing: tuple[CrossingSpec, ...]
    outputs: tuple[OutputSpec, ...]
    files: tuple[FileEntry, ...]
    self_check: SelfCheck | None
    cumulative_bytes: int
    predicted_peak_bytes: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    precision_reason: str = ""
    tail_tflite_reason: str = ""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        _check(self)

    def canonical(self) -> bytes:
        """The bytes of ``manifest.json``."""
        return json.dumps(
            dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()

    @property
    def digest(self) -> str:
        """The bundle's digest: 64 hex digits."""
        return hashlib.sha256(self.canonical()).hexdigest()

    @property
    def has_head(self) -> bool:
        return self.cut.k > 0

    @property
    def has_tail(self) -> bool:
        return any(output.side == "tail" for output in self.outputs)

    @property
    def has_tail_tflite(self) -> bool:
        """Whether the tail is there as a float TensorFlow Lite model, too."""
        return any(entry.path == TAIL_TFLITE_FILE for entry in self.files)

    @property
    def head_files(self) -> tuple[FileEntry, ...]:
        """What a device stores beside the manifest."""
        return tuple(
            entry
            for entry in self.files
            if entry.path != TAIL_TFLITE_FILE and not entry.path.startswith(f"{TAIL_DIR}/")
        )

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features of one sample as they travel."""
        return sum(math.prod(spec.shape) * DTYPES[spec.dtype].itemsize for spec in self.crossing)


def _check(manifest: Manifest) -> None:
    if manifest.schema_version != SCHEMA_VERSION:
        raise BundleError(
            f"manifest: schema_version {manifest.schema_version} is not supported, {SCHEMA_VERSION} is: "
            "use the splitfleet version that made this bundle"
        )
    cut = manifest.cut
    if not 0 <= cut.k <= cut.n or cut.n < 1:
        raise BundleError(f"manifest: cut k={cut.k} of n={cut.n} is not a boundary of the model")
    for group, specs in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        if not specs:
            raise BundleError(f"manifest: {group} is empty")
    tensors: tuple[InputSpec | CrossingSpec | OutputSpec, ...] = (
        *manifest.inputs,
        *manifest.crossing,
        *manifest.outputs,
    )
    for tensor in tensors:
        _check_tensor(tensor)
    for number, spec in enumerate(manifest.crossing):
        if spec.name != f"feature_{number}":
            raise BundleError(f"manifest: crossing tensor {number} must be named 'feature_{number}', got {spec.name!r}")
    if manifest.has_tail != bool(manifest.crossing):
        raise BundleError("manifest: crossing tensors and outputs of the tail come together or not at all")
    for digest in (manifest.model.sha256, *(entry.sha256 for entry in manifest.files)):
        if not is_digest(digest):
            raise BundleError(f"manifest: {digest!r} is not a SHA-256 as 64 hex digits")
    paths = [entry.path for entry in manifest.files]
    for path in paths:
        parts = PurePosixPath(path).parts
        # A manifest may come from a stranger, and its paths are written to: none may leave the bundle's folder.
        if not parts or path.startswith("/") or "\\" in path or ":" in path or ".." in parts or path == MANIFEST_FILE:
            raise BundleError(f"manifest: file path {path!r} is not a plain relative path")
    if len(set(paths)) != len(paths):
        raise BundleError("manifest: a file is listed twice")
    if any(entry.size_bytes < 0 for entry in manifest.files):
        raise BundleError("manifest: a file has a negative size")
    if manifest.has_head != (HEAD_FILE in paths):
        raise BundleError(f"manifest: cut k={cut.k} and the presence of {HEAD_FILE} contradict each other")
    if manifest.has_tail != any(path.startswith(f"{TAIL_DIR}/") for path in paths):
        raise BundleError(f"manifest: outputs of the tail and files under {TAIL_DIR}/ contradict each other")
    if manifest.has_tail_tflite and not manifest.has_tail:
        raise BundleError(f"manifest: there is a {TAIL_TFLITE_FILE}, but no output of a tail")
    if manifest.tail_tflite_reason and (manifest.has_tail_tflite or not manifest.has_tail):
        raise BundleError(
            f"manifest: tail_tflite_reason is for a tail without {TAIL_TFLITE_FILE}, got "
            f"{manifest.tail_tflite_reason[:80]!r}"
        )


def _check_tensor(spec: InputSpec | CrossingSpec | OutputSpec) -> None:
    if spec.dtype not in DTYPES:
        raise BundleError(f"manifest: tensor {spec.name!r}: dtype {spec.dtype!r} is not one of {', '.join(DTYPES)}")
    if len(spec.shape) >= MAX_RANK or any(axis < 1 for axis in spec.shape):
        raise BundleError(f"manifest: tensor {spec.name!r}: shape {list(spec.shape)} is not usable")
    if (spec.scale is None) != (spec.zero_point is None):
        raise BundleError(f"manifest: tensor {spec.name!r}: scale and zero_point come together or not at all")
    if spec.scale is not None and not (math.isfinite(spec.scale) and spec.scale > 0):
        raise BundleError(f"manifest: tensor {spec.name!r}: scale {spec.scale} is not a positive number")


def parse(data: bytes) -> Manifest:
    """The manifest in ``data``. Raises :class:`BundleError` naming the field that is wrong.

    Unknown, missing and mistyped fields are errors: what is signed by its digest is read as a whole or not at all.
    """
    try:
        return _parse(data)
    except RecursionError:
        raise BundleError("manifest: it is nested deeper than any manifest is") from None


def _parse(data: bytes) -> Manifest:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise BundleError(f"manifest: not JSON: {error}") from None
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise BundleError(f"manifest: schema_version {version!r} is not supported, {SCHEMA_VERSION} is")
    manifest: Manifest = _build(Manifest, document, "manifest")
    if manifest.canonical() != data:
        raise BundleError("manifest: the JSON is not in canonical form, so its digest would not be stable")
    return manifest


def _build(kind: Any, value: Any, where: str) -> Any:
    """``value`` (parsed JSON) as ``kind``. Pydantic does this, but the device side does without its 4 MB."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise BundleError(f"{where}: expected an object, got {type(value).__name__}")
        hints = typing.get_type_hints(kind)
        if set(value) != set(hints):
            wrong = sorted(set(value) ^ set(hints))
            raise BundleError(f"{where}: missing or unknown fields: {', '.join(map(repr, wrong))}")
        return typing.cast("Any", kind)(**{k: _build(hints[k], v, f"{where}.{k}") for k, v in value.items()})
    if origin is tuple:
        if not isinstance(value, list):
            raise BundleError(f"{where}: expected a list, got {type(value).__name__}")
        return tuple(_build(args[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise BundleError(f"{where}: expected an object, got {type(value).__name__}")
        return {key: _build(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Literal:
        if value not in args:
            raise BundleError(f"{where}: {value!r} is not one of {', '.join(map(repr, args))}")
        return value
    if origin is types.UnionType:
        return None if value is None else _build(args[0], value, where)
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise BundleError(f"{where}: expected {kind.__name__}, got {type(value).__name__}")
    return value
