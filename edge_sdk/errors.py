"""Every error that splitfleet raises on purpose, in one tree.

::

    SplitfleetError                         exit 1
    ├── ConfigError                         a file or option of the user is wrong
    ├── InvalidInputError                   INVALID_INPUT        a sample or parameter is wrong
    ├── ModelError                          a Keras model cannot be used
    │   ├── UnsupportedModelError           it holds something that cannot be split
    │   ├── IllegalCutError                 the cut point asked for is none
    │   └── ConversionError                 TensorFlow Lite refused it
    ├── BundleError                         BUNDLE_INVALID       manifest or files of a bundle are wrong
    │   └── IntegrityError                  INTEGRITY            bytes do not match their SHA-256
    ├── DoesNotFitError                     DOES_NOT_FIT         the head exceeds the memory budget
    ├── RuntimeUnavailableError             RUNTIME_UNAVAILABLE  no TFLite runtime, or it refuses the file
    ├── ProtocolError                       MALFORMED            a message breaks the wire format
    │   └── UnsupportedVersionError         UNSUPPORTED_VERSION  its protocol major is not ours
    ├── UnauthorizedError                   UNAUTHORIZED         this key may not do that, or nothing (any more)
    ├── UnknownMethodError                  UNKNOWN_METHOD       a call names a method the peer lacks
    ├── UnknownBlobError                    UNKNOWN_BLOB         the repository has no such blob
    ├── UnknownBundleError                  UNKNOWN_BUNDLE       no tail of that bundle is loaded
    ├── FeatureMismatchError                FEATURE_MISMATCH     features that the tail does not take
    ├── TailFailedError                     TAIL_FAILED          the tail raised while it ran
    ├── DeadlineExceededError               DEADLINE_EXCEEDED    the time budget ran out
    ├── OverloadedError                     OVERLOADED           a bounded queue is full
    ├── DeviceUnreachableError              DEVICE_UNREACHABLE   a device vanished, is cut off or made no progress
    ├── DeviceIdTakenError                  DEVICE_ID_TAKEN      another process is connected as that device
    ├── StorageError                        STORAGE              a disk is full, read-only, broken or not ours
    ├── RemoteInternalError                 INTERNAL             the peer failed in an unforeseen way
    ├── PeerUnreachableError                exit 4; no peer answers at that endpoint
    │   ├── GoingAwayError                  GOING_AWAY           the peer is stopping and takes nothing new
    │   └── UntrustedServerError            what answers there is not the server whose key we know
    ├── RegistryUnreachableError            exit 4; the registry's database does not answer
    ├── LabError                            the lab cannot emulate, or one of its devices died
    └── InfeasibleError                     exit 3; no allocation meets the thresholds

A class with a code in capitals crosses the wire: :func:`to_wire` and :func:`from_wire` are inverse
to each other, and each code belongs to exactly one class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class SplitfleetError(Exception):
    """Base of all; ``details`` holds msgpack-able facts for machines."""

    exit_code: ClassVar[int] = 1
    wire_code: ClassVar[str | None] = None

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details


class ConfigError(SplitfleetError):
    """A configuration file, profile or option of the user is wrong."""


class InvalidInputError(SplitfleetError):
    """A sample or a parameter does not have the declared name, shape, dtype or range."""

    wire_code = "INVALID_INPUT"


class ModelError(SplitfleetError):
    """A Keras model cannot be used."""


class UnsupportedModelError(ModelError):
    """The model holds something that cannot be split."""


class IllegalCutError(ModelError):
    """The cut point asked for does not exist or is not legal."""


class ConversionError(ModelError):
    """TensorFlow Lite could not convert the head."""


class BundleError(SplitfleetError):
    """The manifest or the files of a bundle are missing or contradict each other."""

    wire_code = "BUNDLE_INVALID"


class IntegrityError(BundleError):
    """Bytes do not match the SHA-256 they were promised under."""

    wire_code = "INTEGRITY"


class DoesNotFitError(SplitfleetError):
    """The head needs more memory than the budget allows."""

    wire_code = "DOES_NOT_FIT"


class RuntimeUnavailableError(SplitfleetError):
    """No TFLite runtime is installed, or the installed one refuses the file."""

    wire_code = "RUNTIME_UNAVAILABLE"


class ProtocolError(SplitfleetError):
    """A message breaks the wire format."""

    wire_code = "MALFORMED"


class UnsupportedVersionError(ProtocolError):
    """The peer speaks another major version of the protocol."""

    wire_code = "UNSUPPORTED_VERSION"


class UnauthorizedError(SplitfleetError):
    """The server does not allow our key, or not for what was asked; nothing of it was done."""

    wire_code = "UNAUTHORIZED"


class UnknownMethodError(SplitfleetError):
    """A call names a method that the peer does not have."""

    wire_code = "UNKNOWN_METHOD"


class UnknownBlobError(SplitfleetError):
    """The model repository holds no blob of that SHA-256."""

    wire_code = "UNKNOWN_BLOB"


class UnknownBundleError(SplitfleetError):
    """The server has no tail of that bundle loaded."""

    wire_code = "UNKNOWN_BUNDLE"


class FeatureMismatchError(SplitfleetError):
    """Features whose names, dtypes or shapes are not those of the bundle's crossing tensors."""

    wire_code = "FEATURE_MISMATCH"


class TailFailedError(SplitfleetError):
    """The tail raised while it ran."""

    wire_code = "TAIL_FAILED"


class DeadlineExceededError(SplitfleetError):
    """The time budget of a request ran out; what was not begun by then is not executed."""

    wire_code = "DEADLINE_EXCEEDED"


class OverloadedError(SplitfleetError):
    """A bounded queue is full; ``details["retry_after_s"]`` tells when to come again."""

    wire_code = "OVERLOADED"


class DeviceUnreachableError(SplitfleetError):
    """A device vanished, is cut off from the server or the repository amid its work, or made no progress for longer
    than its timeout.
    """

    exit_code = 4
    wire_code = "DEVICE_UNREACHABLE"


class DeviceIdTakenError(SplitfleetError):
    """Another process is connected under the device id of this one."""

    wire_code = "DEVICE_ID_TAKEN"


class StorageError(SplitfleetError):
    """A file could not be read or written: the disk is full, read-only or broken, or a folder is not ours.

    Not about what was asked for: it may well succeed once the disk is in order.
    """

    wire_code = "STORAGE"


class RemoteInternalError(SplitfleetError):
    """The peer failed in a way it did not foresee; its log has the traceback."""

    wire_code = "INTERNAL"


class PeerUnreachableError(SplitfleetError):
    """No peer answers at the endpoint."""

    exit_code = 4


class GoingAwayError(PeerUnreachableError):
    """The peer is stopping: what it could not finish is ended so, and it takes nothing new."""

    wire_code = "GOING_AWAY"


class UntrustedServerError(PeerUnreachableError):
    """Something listens at the endpoint, but it does not prove to be the server whose public key was given."""


class RegistryUnreachableError(SplitfleetError):
    """The registry's database does not answer."""

    exit_code = 4


class LabError(SplitfleetError):
    """The emulation lab cannot do what it was asked to, or one of its processes died."""


class InfeasibleError(SplitfleetError):
    """No allocation meets the thresholds."""

    exit_code = 3


def _descendants(cls: type[SplitfleetError]) -> list[type[SplitfleetError]]:
    found = [cls]
    for child in cls.__subclasses__():
        found.extend(_descendants(child))
    return found


WIRE_CLASSES: dict[str, type[SplitfleetError]] = {
    cls.wire_code: cls for cls in _descendants(SplitfleetError) if cls.wire_code is not None
}


def to_wire(error: BaseException) -> dict[str, Any]:
    """The body of an ERROR message. An error without a wire code of its own becomes ``INTERNAL``."""
    if isinstance(error, SplitfleetError):
        return {
            "code": error.wire_code or RemoteInternalError.wire_code,
            "message": error.message,
            "details": error.details,
        }
    return {
        "code": RemoteInternalError.wire_code,
        "message": f"unexpected {type(error).__name__}: {error}",
        "details": {},
    }


def from_wire(body: Mapping[str, Any]) -> SplitfleetError:
    """The error that an ERROR body stands for. A code unknown here becomes ``RemoteInternalError``."""
    code = body.get("code")
    message = str(body.get("message", "the peer gave no reason"))
    details = body.get("details")
    known = {str(key): value for key, value in details.items()} if isinstance(details, Mapping) else {}
    error = WIRE_CLASSES.get(str(code), RemoteInternalError)(message)
    error.details.update(known)
    return error
