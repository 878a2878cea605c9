"""A folder for the temporary files of one process, which is removed with it; one that was left behind is swept later.

Whoever works in a folder holds a lock on it, and the lock ends with its holder, however that one ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from edge_sdk.errors import StorageError

_PREFIX = "splitfleet-work-"


class Scratch:
    """A new and empty folder in ``parent``, by default in the system's folder of temporary files.

    Making one removes those beside it whose makers died. Raises :class:`StorageError` where none can be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        place = parent or Path(tempfile.gettempdir())
        try:
            place.mkdir(parents=True, exist_ok=True)
            _sweep(place)
            self.path, self._lock = _make(place)
        except OSError as error:
            raise StorageError(f"{place}: no folder for temporary files can be made ({error.strerror})") from error

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def is_of_the_disk(error: BaseException) -> bool:
    """Whether ``error`` is about files that could not be read or written, and not about what is in them.

    TensorFlow has errors of its own for what the system says.
    """
    return isinstance(error, OSError) or os.strerror(errno.ENOSPC) in str(error)


def _make(place: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        lock = _locked(path)
        if lock is not None:
            return path, lock
        # Another one's sweep came between making and locking.


def _sweep(place: Path) -> None:
    for path in place.glob(f"{_PREFIX}*"):
        # What is not ours, or gone meanwhile, is none of our business.
        with suppress(OSError):
            lock = _locked(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _locked(path: Path) -> int | None:
    """The lock of a folder, if nobody has it and the folder is there still."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(lock).st_ino:
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None
