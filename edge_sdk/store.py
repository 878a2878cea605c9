"""What a device keeps on disk: heads by bundle digest, validation inputs by SHA-256, its id, the active bundle's name.

::

    <store>/bundles/<digest>/manifest.json, head.tflite     complete and checked, or not there at all
    <store>/incoming/<digest>/                              being fetched; taken up again after a break
    <store>/blobs/<sha256>.npy                              validation inputs, checked before a process uses them
    <store>/blobs/<sha256>.npy.part                         being fetched; the last one is taken up again after a break
    <store>/active                                          digest of the bundle in use
    <store>/device-id

One agent at a time: :meth:`DeviceStore.open` locks the folder. A folder that somebody removes meanwhile is made anew.
What the disk refuses is a :class:`StorageError`. Fetching is others' business.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

from edge_sdk.bundle import Bundle, file_sha256
from edge_sdk.errors import BundleError, ConfigError, IntegrityError, InvalidInputError, StorageError
from edge_sdk.protocol import check_device_id
from edge_sdk.wire import is_digest

BUNDLES_KEPT = 3
BLOBS_KEPT = 8


def default_store() -> Path:
    """``$SPLITFLEET_EDGE_STORE``, else ``$XDG_DATA_HOME/splitfleet-edge`` (``~/.local/share/splitfleet-edge``)."""
    if named := os.environ.get("SPLITFLEET_EDGE_STORE"):
        return Path(named)
    return Path(os.environ.get("XDG_DATA_HOME") or Path("~/.local/share").expanduser()) / "splitfleet-edge"


class DeviceStore:
    """The folder of one device. A context manager that holds its lock."""

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock
        # By SHA-256, the state of the file that was checked last: to hash a validation set for each run takes too long.
        self._checked: dict[str, tuple[int, int, int]] = {}

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
        with _storing(folder):
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
        the bytes fetched. Raises what ``fetch`` raises, :class:`BundleError`, and :class:`StorageError` when the disk
        does not take it.
        """
        folder = self._bundle_folder(digest)
        incoming = self.path / "incoming" / digest
        with self._keeping(folder):
            bundle = self.bundle(digest)
            if bundle is not None:
                _touch(bundle.path)
                return bundle, 0
            # Before anything is fetched: it makes the room that a full disk lacks.
            self._prune_bundles(BUNDLES_KEPT - 1)
            self._drop_parts(keep=digest)
            incoming.mkdir(parents=True, exist_ok=True)
            fetched = fetch(incoming)
            fresh = Bundle.open(incoming)
            if fresh.digest != digest:
                shutil.rmtree(incoming, ignore_errors=True)
                raise IntegrityError(f"the bundle that was fetched has digest {fresh.digest}, {digest} was asked for")
            fresh.verify(fresh.manifest.head_files)
            for file in (*incoming.rglob("*"), incoming):
                _sync(file)
            folder.parent.mkdir(parents=True, exist_ok=True)
            incoming.rename(folder)
            _sync(folder.parent)
            return Bundle.open(folder), fetched

    @property
    def active(self) -> str | None:
        """Digest of the bundle in use, if it is still here."""
        try:
            digest = (self.path / "active").read_text().strip()
            return digest if is_digest(digest) and self._bundle_folder(digest).exists() else None
        except (OSError, UnicodeDecodeError):
            return None

    def activate(self, digest: str) -> None:
        """Make ``digest`` the bundle in use; this survives a restart."""
        _write(self.path / "active", digest + "\n")

    def blob(self, sha256: str, fetch: Callable[[Path], int]) -> Path:
        """The ``.npy`` file of a blob, put here by ``fetch(path)``, which checks it, unless it is here, undamaged.

        Raises what ``fetch`` raises, and :class:`StorageError` when the disk does not take or give it.
        """
        if not is_digest(sha256):
            raise InvalidInputError(f"{sha256[:80]!r} is not a SHA-256 as 64 lower-case hex digits")
        path = self.path / "blobs" / f"{sha256}.npy"
        with self._keeping(path):
            if not self._is_intact(path, sha256):
                path.unlink(missing_ok=True)
                path.parent.mkdir(parents=True, exist_ok=True)
                self._prune_blobs(BLOBS_KEPT - 1)
                self._drop_parts(keep=path.name)
                fetch(path)
            # First the time of use, then what tells whether the file has changed since.
            _touch(path)
            self._checked[sha256] = _state(path)
            return path

    def _is_intact(self, path: Path, sha256: str) -> bool:
        try:
            return self._checked.get(sha256) == _state(path) or file_sha256(path) == sha256
        except FileNotFoundError:
            return False

    def _prune_blobs(self, kept: int) -> None:
        blobs = [path for path in _oldest_first(self.path / "blobs") if path.suffix == ".npy"]
        for old in blobs[: max(len(blobs) - kept, 0)]:
            old.unlink(missing_ok=True)
            self._checked.pop(old.stem, None)

    def _drop_parts(self, keep: str | None) -> None:
        """Remove what fetches left that broke off, but for that of the bundle or blob ``keep``, which is taken up."""
        for broken_off in (self.path / "incoming").glob("*"):
            if broken_off.name != keep:
                shutil.rmtree(broken_off, ignore_errors=True)
        for part in (self.path / "blobs").glob("*"):
            if part.suffix != ".npy" and part.stem != keep:
                part.unlink(missing_ok=True)

    @contextmanager
    def _keeping(self, path: Path) -> Iterator[None]:
        """After a :class:`StorageError`, which most often is a full disk, what can be fetched again makes room."""
        try:
            with _storing(path):
                yield
        except StorageError:
            with suppress(OSError):
                self._drop_parts(keep=None)
                self._prune_blobs(0)
            raise

    def _bundle_folder(self, digest: str) -> Path:
        if not is_digest(digest):
            raise InvalidInputError(f"{digest[:80]!r} is not a bundle digest: expected 64 lower-case hex digits")
        return self.path / "bundles" / digest

    def _prune_bundles(self, kept: int) -> None:
        """Leave the newest ``kept`` and the active one."""
        bundles = _oldest_first(self.path / "bundles")
        for old in bundles[: max(len(bundles) - kept, 0)]:
            if old.name != self.active:
                shutil.rmtree(old, ignore_errors=True)


def _oldest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime_ns)


def _touch(path: Path) -> None:
    """Note that it was used. A store that nobody can write to any more still gives what it has."""
    with suppress(OSError):
        os.utime(path)


def _state(path: Path) -> tuple[int, int, int]:
    """What changes when a file does."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


@contextmanager
def _storing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: the device's store does not take or give it ({error.strerror or error}); "
            "make room, or name another folder with --store"
        ) from error


def _write(file: Path, text: str) -> None:
    """Write a small file such that it holds the old or the new text after a power cut, nothing between."""
    fresh = file.with_name(file.name + ".new")
    with _storing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text)
        _sync(fresh)
        fresh.replace(file)
        _sync(file.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
