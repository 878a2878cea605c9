"""The model repository: blobs under their SHA-256 in a local folder, and bundles made of them.

A bundle is its manifest blob (whose SHA-256 is the bundle's digest) and the blobs of the files listed there. A blob
appears whole or not at all: it is written to a partial file, hashed, then renamed. Several processes may share the
folder. Who may ask, and over which transport, is left to others: nothing here knows of the server.

::

    blobs/ab/ab34…      complete blobs, read-only
    partial/ab34…       what came so far of a put; locked by whoever writes
    partial/*.copy      a local file on its way in
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom, BufferedReader
from pathlib import Path

from edge_sdk.bundle import Bundle, file_sha256
from edge_sdk.errors import BundleError, ConfigError, IntegrityError, InvalidInputError, UnknownBlobError
from edge_sdk.manifest import MANIFEST_FILE, FileEntry, Manifest, parse
from edge_sdk.wire import is_digest

_LOG = logging.getLogger(__name__)
_ABANDONED_S = 24 * 3600.0
_COPY_BYTES = 1 << 20
# A manifest lists files: one that needs more than this is none.
_MAX_MANIFEST_BYTES = 16 << 20


class ArtifactRepository:
    """The blobs in folder ``path``, which is created when missing. All methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`ConfigError` where no such folder can be made."""
        self._blobs = path / "blobs"
        self._partial = path / "partial"
        self._sound: dict[str, tuple[int, int, int]] = {}
        try:
            self._blobs.mkdir(parents=True, exist_ok=True)
            self._partial.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be made the model repository ({error.strerror})") from None
        self._remove_abandoned()

    def has(self, sha256: str) -> bool:
        return self._path(sha256).is_file()

    def size(self, sha256: str) -> int | None:
        """Bytes of a blob, ``None`` where there is no such blob."""
        try:
            return self._path(sha256).stat().st_size
        except FileNotFoundError:
            return None

    def sound_size(self, sha256: str) -> int | None:
        """Bytes of a blob whose content is right; one that is damaged is dropped, so that it can be put again.

        Whoever uploads asks this: a blob of the right size alone would be taken for the right blob for ever. The file
        is hashed once, and again when it has changed.
        """
        path = self._path(sha256)
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        state = (status.st_ino, status.st_mtime_ns, status.st_size)
        if self._sound.get(sha256) != state:
            self._discard(sha256)
            if not path.is_file():
                return None
            self._sound[sha256] = state
        return status.st_size

    def read(self, sha256: str, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``offset``, fewer at the end of the blob.

        Raises :class:`UnknownBlobError`, or :class:`InvalidInputError` for an offset past the end.
        """
        with self._open(sha256) as file:
            size = os.fstat(file.fileno()).st_size
            if not 0 <= offset <= size or length < 0:
                raise InvalidInputError(f"blob {sha256}: {length} bytes from {offset} asked for, it has {size} bytes")
            file.seek(offset)
            return file.read(length)

    def put(self, sha256: str, *, size: int, offset: int, chunk: bytes | memoryview) -> int:
        """Append ``chunk`` to a blob of ``size`` bytes in all; returns how many came so far.

        The blob exists once all bytes came and match. Nothing changes when ``offset`` is not what came so far, or when
        the blob is complete already: the result tells from where to go on. Raises :class:`InvalidInputError` for more
        bytes than ``size``, :class:`IntegrityError` when the bytes do not match; then all of them are forgotten.
        """
        path = self._path(sha256)
        if size < 0 or offset < 0:
            raise InvalidInputError(f"blob {sha256}: size {size} and offset {offset} must not be negative")
        with self._writing(sha256) as file:
            complete = self.sound_size(sha256)
            if complete is not None and complete != size:
                raise InvalidInputError(f"blob {sha256} has {complete} bytes, a put says {size}")
            if complete is not None:
                file.truncate(0)
                return complete
            received = os.fstat(file.fileno()).st_size
            if received > size:
                # What an earlier put left under another, wrong size cannot be continued.
                file.truncate(0)
                received = 0
            if offset != received:
                return received
            if received + len(chunk) > size:
                raise InvalidInputError(
                    f"blob {sha256}: {received + len(chunk)} bytes came, more than the {size} that were announced"
                )
            file.seek(received)
            file.write(chunk)
            file.flush()
            received += len(chunk)
            if received == size:
                self._complete(sha256, file, path)
            return received

    def add_bundle(self, bundle: Bundle) -> str:
        """Take in manifest and files of a bundle on disk; returns its digest.

        Raises :class:`IntegrityError` when a file is missing or is not what the manifest promises.
        """
        for entry in bundle.manifest.files:
            self._add_file(bundle.path / entry.path, entry.sha256)
        self._add_file(bundle.path / MANIFEST_FILE, bundle.digest)
        return bundle.digest

    def add_file(self, source: Path) -> str:
        """Take in a copy of any file; returns its SHA-256. Raises :class:`IntegrityError` when it cannot be read."""
        sha256 = _sha256_of(source)
        self._add_file(source, sha256)
        return sha256

    def file(self, sha256: str) -> Path:
        """Where a blob lies, to be read by path, never written. Raises :class:`UnknownBlobError`."""
        path = self._path(sha256)
        if not path.is_file():
            raise UnknownBlobError(f"the repository holds no blob {sha256}")
        return path

    def remove(self, sha256: str) -> None:
        """Forget a blob, if there is one. Who still has the file open goes on reading it."""
        self._path(sha256).unlink(missing_ok=True)

    def manifest(self, digest: str) -> Manifest:
        """The manifest of a bundle.

        Raises :class:`UnknownBlobError`, or :class:`BundleError` for a blob that is no manifest.
        """
        size = self.size(digest)
        if size is None:
            raise UnknownBlobError(f"the repository holds no bundle {digest}: upload it first")
        if size > _MAX_MANIFEST_BYTES:
            raise BundleError(f"blob {digest} has {size} bytes and is no manifest of a bundle")
        data = self.read(digest, 0, size)
        if hashlib.sha256(data).hexdigest() != digest:
            self._discard(digest)
            raise IntegrityError(f"the manifest of bundle {digest} is corrupt in the repository: upload it again")
        return parse(data)

    def lay_out(self, digest: str, folder: Path) -> Bundle:
        """Materialise a bundle as ``folder``, verified; what is there already is kept if it is that bundle, intact.

        Files are hard links to the blobs where the file system allows it: do not write to them. Raises
        :class:`UnknownBlobError` when a part is missing and :class:`IntegrityError` when one is corrupt; the corrupt
        blob is dropped, so that a new upload mends the bundle.
        """
        with suppress(BundleError):
            present = Bundle.open(folder)
            if present.digest == digest:
                present.verify()
                return present
        manifest = self.manifest(digest)
        folder.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{folder.name[:16]}-", dir=folder.parent))
        try:
            for entry in manifest.files:
                self._link(entry.sha256, making / entry.path)
            self._link(digest, making / MANIFEST_FILE)
            self._verify(Bundle.open(making))
            if folder.exists():
                shutil.rmtree(folder)
            making.rename(folder)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        return Bundle.open(folder)

    def _verify(self, bundle: Bundle) -> None:
        for entry in bundle.manifest.files:
            try:
                bundle.verify([entry])
            except IntegrityError:
                self._discard(entry.sha256)
                raise IntegrityError(
                    f"bundle {bundle.digest}: {_promised(entry)}; the repository's copy is corrupt: upload it again"
                ) from None

    def _path(self, sha256: str) -> Path:
        # A digest comes from strangers and becomes a path: 64 hex digits cannot leave the folder.
        if not is_digest(sha256):
            raise InvalidInputError(f"{str(sha256)[:80]!r} is not a SHA-256 as 64 lower-case hex digits")
        return self._blobs / sha256[:2] / sha256

    def _part(self, sha256: str) -> Path:
        return self._partial / sha256

    def _open(self, sha256: str) -> BufferedReader:
        try:
            return self._path(sha256).open("rb")
        except FileNotFoundError:
            raise UnknownBlobError(f"the repository holds no blob {sha256}") from None

    @contextmanager
    def _writing(self, sha256: str) -> Iterator[BufferedRandom]:
        """The partial file of a blob, locked: against other threads and other processes alike."""
        part = self._part(sha256)
        while True:
            with part.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                # Another writer may have completed or dropped it while we waited: then our file has no name any more.
                if not _is_same_file(file, part):
                    continue
                try:
                    yield file
                finally:
                    if not os.fstat(file.fileno()).st_size and _is_same_file(file, part):
                        part.unlink()
                return

    def _complete(self, sha256: str, file: BufferedRandom, path: Path) -> None:
        part = self._part(sha256)
        file.seek(0)
        actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != sha256:
            part.unlink()
            raise IntegrityError(f"blob {sha256}: the bytes that came have the SHA-256 {actual}; send them again")
        os.fsync(file.fileno())
        self._publish(part, path)

    def _publish(self, written: Path, path: Path) -> None:
        written.chmod(0o444)
        path.parent.mkdir(exist_ok=True)
        written.replace(path)

    def _add_file(self, source: Path, sha256: str) -> None:
        path = self._path(sha256)
        if self.sound_size(sha256) is not None:
            return
        digest = hashlib.sha256()
        descriptor, name = tempfile.mkstemp(suffix=".copy", dir=self._partial)
        copy = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as target:
                try:
                    with source.open("rb") as file:
                        while piece := file.read(_COPY_BYTES):
                            digest.update(piece)
                            target.write(piece)
                except OSError as error:
                    raise IntegrityError(f"{source}: {error.strerror}; make the bundle again") from None
                target.flush()
                os.fsync(target.fileno())
            if digest.hexdigest() != sha256:
                raise IntegrityError(
                    f"{source}: SHA-256 is {digest.hexdigest()}, the manifest promises {sha256}; make the bundle again"
                )
            self._publish(copy, path)
        finally:
            copy.unlink(missing_ok=True)

    def _link(self, sha256: str, target: Path) -> None:
        source = self._path(sha256)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            try:
                os.link(source, target)
            except FileNotFoundError:
                raise
            except OSError:
                # Another file system, or one without hard links.
                shutil.copyfile(source, target)
        except FileNotFoundError:
            raise UnknownBlobError(f"the repository holds no blob {sha256}, a part of the bundle: upload it") from None

    def _discard(self, sha256: str) -> None:
        path = self._path(sha256)
        # Look again: it may have been mended meanwhile.
        if path.is_file() and file_sha256(path) != sha256:
            _LOG.warning("blob %s is corrupt and was dropped", sha256)
            path.unlink(missing_ok=True)

    def _remove_abandoned(self) -> None:
        """Drop what crashed writers left; a day's grace, since another process may be writing right now."""
        oldest = time.time() - _ABANDONED_S
        for path in self._partial.iterdir():
            with suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


def _sha256_of(source: Path) -> str:
    try:
        return file_sha256(source)
    except OSError as error:
        raise IntegrityError(f"{source}: cannot be read ({error.strerror})") from None


def _is_same_file(file: BufferedRandom, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _promised(entry: FileEntry) -> str:
    return f"{entry.path!r} is not the {entry.size_bytes} bytes with SHA-256 {entry.sha256} that the manifest promises"
