"""What a device keeps on disk: heads by bundle digest, validation inputs by SHA-256, its id, the active bundle's name.

::

    <store>/bundles/<digest>/manifest.json, head.tflite     complete and checked, or not there at all
    <store>/incoming/<digest>/                              being fetched; taken up again after a break
    <store>/blobs/<sha256>.npy                              validation inputs
    <store>/active                                          digest of the bundle in use
    <store>/device-id

One agent at a time: :meth:`DeviceStore.open` locks the folder. Fetching is others' business.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, ConfigError, IntegrityError
from edge_sdk.wire import is_digest

BUNDLES_KEPT = 3
BLOBS_KEPT = 8
_DEVICE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def default_store() -> Path:
    """``$SPLITFLEET_EDGE_STORE``, else ``$XDG_DATA_HOME/splitfleet-edge`` (``~/.local/share/splitfleet-edge``)."""
    if named := os.environ.get("SPLITFLEET_EDGE_STORE"):
        return Path(named)
    return Path(os.environ.get("XDG_DATA_HOME") or Path("~/.local/share").expanduser()) / "splitfleet-edge"


def check_device_id(device_id: str) -> str:
    """``device_id`` if it is one. Raises :class:`ConfigError`."""
    if not _DEVICE_ID.fullmatch(device_id):
        raise ConfigError(
            f"{device_id!r} is not a device id: expected 1 to 64 letters, digits, '.', '_' or '-', "
            "a letter or digit first"
        )
    return device_id


class DeviceStore:
    """The folder of one device. A context manager that holds its lock."""

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> Self:
        """Make the folder when missing and lock it. Raises :class:`ConfigError` when that fails or another holds it."""
        try:
            for name in ("bundles", "incoming", "blobs"):
                (path / name).mkdir(parents=True, exist_ok=True)
            lock = (path / "lock").open("ab")
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be the device's store ({error.strerror}); name another with --store"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ConfigError(
                f"{path}: another splitfleet-edge works in this store; stop it, or name another with --store"
            ) from None
        return cls(path, lock)

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def device_id(self) -> str:
        """The id made up for this store when it was first asked for one.

        Not the machine's own id: cloned SD cards and containers share that.
        """
        file = self.path / "device-id"
        try:
            return check_device_id(file.read_text().strip())
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"{file}: cannot be used: {error}") from None
        made_up = f"edge-{secrets.token_hex(6)}"
        _write(file, made_up + "\n")
        return made_up

    def bundle(self, digest: str) -> Bundle | None:
        """The installed bundle, its files checked against the manifest; ``None`` when it is not here or damaged.

        A damaged one is removed, so that it is fetched again.
        """
        folder = self._bundle_folder(digest)
        if not folder.exists():
            return None
        try:
            bundle = Bundle.open(folder)
            if bundle.digest != digest:
                raise IntegrityError(f"{folder}: the manifest has digest {bundle.digest}")
            bundle.verify(bundle.manifest.head_files)
        except BundleError:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return bundle

    def install(self, digest: str, fetch: Callable[[Path], int]) -> tuple[Bundle, int]:
        """The bundle ``digest``, put here by ``fetch(folder)`` (which returns bytes fetched) unless it is here already.

        It is checked as a whole before it appears; ``fetch`` finds what an earlier attempt left. Returns the bundle and
        the bytes fetched.
        """
        bundle = self.bundle(digest)
        if bundle is not None:
            os.utime(bundle.path)
            return bundle, 0
        incoming = self.path / "incoming" / digest
        try:
            incoming.mkdir(exist_ok=True)
            fetched = fetch(incoming)
            fresh = Bundle.open(incoming)
            if fresh.digest != digest:
                shutil.rmtree(incoming, ignore_errors=True)
                raise IntegrityError(f"the bundle that was fetched has digest {fresh.digest}, {digest} was asked for")
            fresh.verify(fresh.manifest.head_files)
            for file in (*incoming.rglob("*"), incoming):
                _sync(file)
            folder = self._bundle_folder(digest)
            incoming.rename(folder)
            _sync(folder.parent)
        except OSError as error:
            raise ConfigError(f"{incoming}: cannot install the bundle ({error.strerror})") from error
        self._prune(keep=digest)
        return Bundle.open(folder), fetched

    @property
    def active(self) -> str | None:
        """Digest of the bundle in use, if it is still here."""
        try:
            digest = (self.path / "active").read_text().strip()
        except OSError:
            return None
        return digest if is_digest(digest) and self._bundle_folder(digest).exists() else None

    def activate(self, digest: str) -> None:
        """Make ``digest`` the bundle in use; this survives a restart."""
        _write(self.path / "active", digest + "\n")

    def blob(self, sha256: str, fetch: Callable[[Path], int]) -> Path:
        """The ``.npy`` file of a blob, put here by ``fetch(path)`` unless it is here already."""
        path = self.path / "blobs" / f"{sha256}.npy"
        if path.exists():
            os.utime(path)
        else:
            fetch(path)
            for old in _oldest_first(self.path / "blobs")[:-BLOBS_KEPT]:
                if old != path:
                    old.unlink(missing_ok=True)
        return path

    def _bundle_folder(self, digest: str) -> Path:
        if not is_digest(digest):
            raise ConfigError(f"{digest!r} is not a bundle digest")
        return self.path / "bundles" / digest

    def _prune(self, keep: str) -> None:
        kept = {keep, self.active}
        for old in _oldest_first(self.path / "bundles")[:-BUNDLES_KEPT]:
            if old.name not in kept:
                shutil.rmtree(old, ignore_errors=True)
        for broken_off in (self.path / "incoming").iterdir():
            shutil.rmtree(broken_off, ignore_errors=True)


def _oldest_first(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def _write(file: Path, text: str) -> None:
    """Write a small file such that it holds the old or the new text after a power cut, nothing between."""
    fresh = file.with_name(file.name + ".new")
    try:
        fresh.write_text(text)
        _sync(fresh)
        fresh.replace(file)
        _sync(file.parent)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written ({error.strerror})") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
