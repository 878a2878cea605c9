"""The wire format, version 1: framing without sockets.

A message is a list of frames::

    [preamble: 8 bytes][header: msgpack map, at most 16 KiB][tensor 0][tensor 1]…

The preamble is ``b"SPLF"``, then one byte each: protocol major, message type, flags (0 in version 1)
and the number of tensor frames. The header is a map with these keys, all but ``id`` left out when empty:

===========  ============================================================================================
``id``       request id, unsigned 64 bit, chosen by whoever asks; the answer repeats it
``method``   what a CALL asks for
``bundle``   digest of the bundle that features belong to, or that made a result: 64 hex digits
``budget``   time that remains for the request, in ms. Never a point in time: clocks differ
``body``     parameters of a CALL, result of a REPLY, code and message of an ERROR, timing of a RESULT
``tensors``  one ``[name, dtype, shape, scale, zero point, codec]`` per tensor frame
===========  ============================================================================================

A header key that is not known is ignored. Maps and lists of a body are nested 32 deep at most. A tensor frame is raw,
C-contiguous and little-endian.
Nothing here, nor anything it calls, can unpickle.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from edge_sdk.errors import ProtocolError, UnsupportedVersionError, to_wire

MAGIC = b"SPLF"
MAJOR = 1
PREAMBLE_BYTES = 8
MAX_HEADER_BYTES = 16 * 1024
# Of maps and lists within a body. What is nested deeper would end whoever looks at all of it in a recursion error.
MAX_BODY_DEPTH = 32
MAX_TENSORS = 64
MAX_RANK = 8
MAX_TENSOR_BYTES = 256 * 1024 * 1024
MAX_NAME_CHARS = 256
# Text and details of an error together leave room for the rest of a header, whatever the text is encoded to.
MAX_ERROR_CHARS = 2000
MAX_ERROR_DETAILS_BYTES = 4 * 1024

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "float16", "float32", "float64")
} | {"bool": np.dtype(np.bool_)}
RAW_CODEC = "raw"
# Looking a name up takes a tenth of the time that a dtype takes to tell it.
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DIGEST = re.compile("[0-9a-f]{64}")

Array = npt.NDArray[Any]
Frame = bytes | bytearray | memoryview


class MessageType(IntEnum):
    """What a message is. INFER ends in RESULT or ERROR, CALL in REPLY or ERROR."""

    INFER = 1
    RESULT = 2
    ERROR = 3
    CALL = 4
    REPLY = 5


_TYPES = {int(kind): kind for kind in MessageType}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One named array, with the per-tensor quantization that maps it to real numbers, if it has one."""

    name: str
    data: Array
    scale: float | None = None
    zero_point: int | None = None


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message; :func:`encode` and :func:`decode` are inverse to each other."""

    type: MessageType
    request_id: int
    method: str | None = None
    bundle: str | None = None
    budget_s: float | None = None
    body: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()

    def arrays(self) -> dict[str, Array]:
        """The tensors by name."""
        return {tensor.name: tensor.data for tensor in self.tensors}


def encode(message: Message) -> list[Frame]:
    """Frames of a message. Tensor frames are views of the arrays: do not change these until sent.

    Raises :class:`ProtocolError` for what version 1 cannot say (dtype, rank, count, header size).
    """
    if len(message.tensors) > MAX_TENSORS:
        raise ProtocolError(f"a message carries at most {MAX_TENSORS} tensors, got {len(message.tensors)}")
    header: dict[str, Any] = {"id": message.request_id}
    if message.method is not None:
        header["method"] = message.method
    if message.bundle is not None:
        header["bundle"] = message.bundle
    if message.budget_s is not None:
        header["budget"] = message.budget_s * 1000.0
    if message.body:
        _check_depth(message.body)
        header["body"] = message.body
    frames: list[Frame] = [b"", b""]
    if message.tensors:
        specs = []
        for tensor in message.tensors:
            data, dtype = _portable(tensor)
            specs.append([tensor.name, dtype, list(tensor.data.shape), tensor.scale, tensor.zero_point, RAW_CODEC])
            # memoryview.cast refuses empty and 0-d arrays, whose bytes are few enough to copy.
            frames.append(data.data.cast("B") if data.size and data.ndim else data.tobytes())
        header["tensors"] = specs
    try:
        packed = msgpack.packb(header, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"the header cannot be packed: {error}") from error
    if len(packed) > MAX_HEADER_BYTES:
        raise ProtocolError(f"the header has {len(packed)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    frames[0] = MAGIC + bytes((MAJOR, message.type, 0, len(message.tensors)))
    frames[1] = packed
    return frames


def error_message(request_id: int, error: BaseException) -> Message:
    """The ERROR that ends request ``request_id``. It surely can be encoded: a long text is cut, and details that are
    large, or that the wire cannot say, are left out.
    """
    body = to_wire(error)
    # Lone surrogates, as in the names of odd files, have no UTF-8.
    body["message"] = body["message"][:MAX_ERROR_CHARS].encode(errors="replace").decode()
    try:
        details = msgpack.packb(body["details"], use_bin_type=True)
        msgpack.unpackb(details, raw=False, strict_map_key=True)
        _check_depth(body)
        sayable = len(details) <= MAX_ERROR_DETAILS_BYTES
    except (TypeError, ValueError, OverflowError, RecursionError, ProtocolError):
        sayable = False
    if not sayable:
        body["details"] = {}
    return Message(type=MessageType.ERROR, request_id=request_id, body=body)


def _portable(tensor: Tensor) -> tuple[Array, str]:
    data = tensor.data
    name = _DTYPE_NAMES.get(data.dtype) or data.dtype.name
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ProtocolError(f"tensor {tensor.name!r}: dtype {name} is not one of {', '.join(DTYPES)}")
    if data.ndim > MAX_RANK:
        raise ProtocolError(f"tensor {tensor.name!r}: rank {data.ndim} exceeds {MAX_RANK}")
    if data.nbytes > MAX_TENSOR_BYTES:
        raise ProtocolError(f"tensor {tensor.name!r}: {data.nbytes} bytes exceed {MAX_TENSOR_BYTES}")
    # ascontiguousarray would make a 0-d array 1-d.
    return np.asarray(data, dtype=dtype, order="C"), name


def decode(frames: Sequence[Frame]) -> Message:
    """The message of some frames. Tensors are read-only views of them, not copies.

    Raises :class:`UnsupportedVersionError` for another protocol major, else :class:`ProtocolError`
    for anything that is not exactly a message of version 1. A tensor's bytes are never read before its spec
    is checked.
    """
    kind, count = _preamble(frames)
    if len(frames) != 2 + count:
        raise ProtocolError(f"the preamble promises {count} tensor frames, {max(len(frames) - 2, 0)} came")
    header = _header(frames[1])
    request_id = _typed(header, "id", int, required=True)
    if not 0 <= request_id < 2**64:
        raise ProtocolError(f"header key 'id' must be an unsigned 64-bit integer, got {request_id}")
    specs = _typed(header, "tensors", list) or []
    if len(specs) != count:
        raise ProtocolError(f"{count} tensor frames came with {len(specs)} tensor specs")
    tensors = tuple(_tensor(spec, frame) for spec, frame in zip(specs, frames[2:], strict=True))
    if count > 1 and len({tensor.name for tensor in tensors}) != count:
        raise ProtocolError("two tensors of one message have the same name")
    budget_ms = _typed(header, "budget", (int, float))
    if budget_ms is not None and not math.isfinite(budget_ms):
        raise ProtocolError(f"header key 'budget' must be a finite number of ms, got {budget_ms}")
    body = _typed(header, "body", dict) or {}
    _check_depth(body)
    return Message(
        type=kind,
        request_id=request_id,
        method=_typed(header, "method", str),
        bundle=_digest(header),
        budget_s=None if budget_ms is None else budget_ms / 1000.0,
        body=body,
        tensors=tensors,
    )


def request_id_of(frames: Sequence[Frame]) -> int | None:
    """The request id of frames that :func:`decode` refused, if it can be made out: an error needs an addressee."""
    try:
        _preamble(frames)
        request_id = _typed(_header(frames[1]), "id", int, required=True)
    except (ProtocolError, IndexError):
        return None
    return request_id if 0 <= request_id < 2**64 else None


def _preamble(frames: Sequence[Frame]) -> tuple[MessageType, int]:
    if len(frames) < 2:
        raise ProtocolError(f"a message has at least 2 frames, {len(frames)} came")
    preamble = bytes(frames[0][: PREAMBLE_BYTES + 1])
    if len(preamble) != PREAMBLE_BYTES or not preamble.startswith(MAGIC):
        raise ProtocolError("the first frame is not a splitfleet preamble")
    major, kind, flags, count = preamble[4:]
    if major != MAJOR:
        raise UnsupportedVersionError(
            f"protocol version {major} is not spoken here, version {MAJOR} is: upgrade the older side"
        )
    if flags:
        raise ProtocolError(f"flags must be 0 in version 1, got {flags}")
    if count > MAX_TENSORS:
        raise ProtocolError(f"a message carries at most {MAX_TENSORS} tensors, got {count}")
    known = _TYPES.get(kind)
    if known is None:
        raise ProtocolError(f"message type {kind} is not known")
    return known, count


def _header(frame: Frame) -> dict[str, Any]:
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError(f"the header has {len(frame)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    try:
        header = msgpack.unpackb(frame, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"the header is not msgpack: {error}") from None
    if not isinstance(header, dict) or not all(isinstance(key, str) for key in header):
        raise ProtocolError("the header is not a map with text keys")
    return header


def _typed(header: Mapping[str, Any], key: str, kind: Any, *, required: bool = False) -> Any:
    value = header.get(key)
    if value is None:
        if required:
            raise ProtocolError(f"header key {key!r} is missing")
        return None
    # bool is an int in Python, not on the wire.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ProtocolError(f"header key {key!r} has type {type(value).__name__}")
    return value


_NESTED = (dict, list, tuple)


def _check_depth(body: Mapping[str, Any]) -> None:
    if not any(isinstance(each, _NESTED) for each in body.values()):
        return
    level: list[Any] = [body]
    for _ in range(MAX_BODY_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, _NESTED)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    if any(isinstance(each, _NESTED) for each in level):
        raise ProtocolError(f"maps and lists of the body are nested deeper than {MAX_BODY_DEPTH}")


def _digest(header: Mapping[str, Any]) -> str | None:
    digest: str | None = _typed(header, "bundle", str)
    if digest is not None and not is_digest(digest):
        raise ProtocolError("header key 'bundle' must be 64 lower-case hex digits")
    return digest


def is_digest(text: object) -> bool:
    """Whether ``text`` is a SHA-256 as 64 lower-case hex digits."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def _tensor(spec: Any, frame: Frame) -> Tensor:
    if not isinstance(spec, list) or len(spec) != 6:
        raise ProtocolError("a tensor spec must be [name, dtype, shape, scale, zero point, codec]")
    name, dtype_name, shape, scale, zero_point, codec = spec
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise ProtocolError(f"a tensor name must be text of 1 to {MAX_NAME_CHARS} characters")
    if codec != RAW_CODEC:
        raise ProtocolError(f"tensor {name!r}: codec {_shown(codec)} is not known, {RAW_CODEC!r} is")
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise ProtocolError(f"tensor {name!r}: dtype {_shown(dtype_name)} is not one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_dimension, shape)):
        raise ProtocolError(f"tensor {name!r}: the shape must be at most {MAX_RANK} non-negative integers")
    if scale is not None and not (isinstance(scale, float) and math.isfinite(scale) and scale > 0):
        raise ProtocolError(f"tensor {name!r}: the scale must be a positive finite float")
    if zero_point is not None and (not isinstance(zero_point, int) or isinstance(zero_point, bool)):
        raise ProtocolError(f"tensor {name!r}: the zero point must be an integer")
    expected = math.prod(shape) * dtype.itemsize
    if len(frame) != expected:
        raise ProtocolError(f"tensor {name!r}: {dtype_name} {shape} needs {expected} bytes, {len(frame)} came")
    # An empty tensor, too, has sides that somebody has to count with.
    if math.prod(side or 1 for side in shape) * dtype.itemsize > MAX_TENSOR_BYTES:
        raise ProtocolError(f"tensor {name!r}: {dtype_name} {shape} exceeds {MAX_TENSOR_BYTES} bytes")
    data = np.frombuffer(frame, dtype=dtype).reshape(shape)
    if data.flags.writeable:
        data.flags.writeable = False
    return Tensor(name=name, data=data, scale=scale, zero_point=zero_point)


def _shown(value: Any) -> str:
    """For an error's text; only text is shown, since what is nested may have no representation."""
    return repr(value[:40]) if isinstance(value, str) else f"of type {type(value).__name__}"


def _is_dimension(axis: Any) -> bool:
    # Neither bool nor anything else that passes for an int.
    return type(axis) is int and 0 <= axis < 2**31
