"""A bundle out of a cache, as a folder of the user's own: whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from edge_sdk.bundle import Bundle
from edge_sdk.errors import ConfigError


def check_free(folder: Path) -> None:
    """Raise :class:`ConfigError` unless a bundle may be put at ``folder``: nothing is there, or an empty folder."""
    if folder.is_dir():
        if any(folder.iterdir()):
            raise ConfigError(f"{folder}: is not empty; name a folder that is not there yet")
    elif folder.exists():
        raise ConfigError(f"{folder}: is a file; name a folder that is not there yet")


def copy_bundle(source: Path, folder: Path) -> Bundle:
    """Copy the bundle in ``source`` to ``folder``; the copy is the user's to write to.

    Raises :class:`ConfigError` when something is there already, or it cannot be written.
    """
    check_free(folder)
    making = folder.with_name(f".{folder.name}.{os.getpid()}")
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
