"""A bundle on disk: a folder with ``manifest.json`` and the files that it lists.

A device's copy lacks the tail, a server's may lack the head; :meth:`Bundle.verify` checks what is there to be checked.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from edge_sdk.errors import BundleError, IntegrityError
from edge_sdk.manifest import HEAD_FILE, MANIFEST_FILE, TAIL_DIR, TAIL_TFLITE_FILE, FileEntry, Manifest, parse


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A folder and the manifest in it."""

    path: Path
    manifest: Manifest
    digest: str

    @classmethod
    def open(cls, path: Path | str) -> Bundle:
        """The bundle in folder ``path``; its files are not read yet."""
        folder = Path(path)
        try:
            with open_regular(folder / MANIFEST_FILE) as file:
                data = file.read()
        except OSError as error:
            raise BundleError(
                f"{folder}: no bundle: {MANIFEST_FILE} cannot be read ({error.strerror}); "
                "expected a folder that 'splitfleet' made or a device installed"
            ) from None
        return cls(path=folder, manifest=parse(data), digest=hashlib.sha256(data).hexdigest())

    @property
    def head_path(self) -> Path:
        return self.path / HEAD_FILE

    @property
    def tail_path(self) -> Path:
        return self.path / TAIL_DIR

    @property
    def tail_tflite_path(self) -> Path:
        return self.path / TAIL_TFLITE_FILE

    def verify(self, entries: Iterable[FileEntry] | None = None) -> None:
        """Check size and SHA-256 of ``entries`` (default: all files).

        Raises :class:`IntegrityError` naming the first file that is missing or differs.
        """
        for entry in self.manifest.files if entries is None else entries:
            path = self.path / entry.path
            try:
                actual_bytes = path.stat().st_size
                actual = file_sha256(path) if actual_bytes == entry.size_bytes else None
            except OSError as error:
                raise IntegrityError(f"{path}: cannot be read ({error.strerror}); fetch the bundle again") from None
            if actual is None:
                raise IntegrityError(
                    f"{path}: has {actual_bytes} bytes, the manifest promises {entry.size_bytes}; "
                    "fetch the bundle again"
                )
            if actual != entry.sha256:
                raise IntegrityError(
                    f"{path}: SHA-256 is {actual}, the manifest promises {entry.sha256}; fetch the bundle again"
                )


def file_sha256(path: Path) -> str:
    """SHA-256 of a regular file as 64 hex digits, read in pieces. Raises :class:`OSError`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_regular(path: Path) -> BufferedReader:
    """``path``, open for reading. Raises :class:`OSError`, also for what is no regular file: a pipe would be waited
    for, and a device may never end.
    """
    # A pipe is not waited for with this flag, and to a regular file it means nothing.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device, no regular file", str(path))
