"""A bundle out of a cache, as a folder of the user's own: whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from edge_sdk.bundle import Bundle
from edge_sdk.errors import ConfigError


def check_free(folder: Path) -> None:
    """Raise :class:`ConfigError` unless a bundle may be put at ``folder``: nothing is there, or an empty folder."""
    try:
        if folder.is_dir():
            if any(folder.iterdir()):
                raise ConfigError(f"{folder}: is not empty; name a folder that is not there yet")
        elif os.path.lexists(folder):
            raise ConfigError(f"{folder}: is a file; name a folder that is not there yet")
        _check_writable(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: the bundle cannot be written there ({error.strerror})") from None


def _check_writable(folder: Path) -> None:
    """Raise :class:`OSError` where ``folder`` cannot be made: better before a model is converted than after."""
    place = next(parent for parent in folder.absolute().parents if os.path.lexists(parent))
    if not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    with suppress(FileNotFoundError):
        # Its longest name; too long, and it cannot be looked up.
        _unfinished(folder).lstat()
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))


def _unfinished(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}")


def copy_bundle(source: Path, folder: Path) -> Bundle:
    """Copy the bundle in ``source`` to ``folder``; the copy is the user's to write to.

    Raises :class:`ConfigError` when something is there already, or it cannot be written.
    """
    check_free(folder)
    making = _unfinished(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Contents, not modes: what comes out of a cache may be read-only.
        shutil.copytree(source, making, copy_function=shutil.copyfile)
        if folder.is_dir():
            folder.rmdir()
        making.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: the bundle cannot be written there ({error.strerror})") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return Bundle.open(folder)
