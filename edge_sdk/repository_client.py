"""Blobs and bundles of a model repository, fetched and put in chunks over a channel.

A blob is named by its SHA-256; a bundle is its manifest's blob and those of the files listed there. Where things are
kept is the caller's business.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_sdk.bundle import Bundle
from edge_sdk.channel import Channel
from edge_sdk.errors import IntegrityError, InvalidInputError, ProtocolError, StorageError, UnknownBlobError
from edge_sdk.manifest import MANIFEST_FILE, parse
from edge_sdk.protocol import CHUNK_BYTES, FetchBlob, PutBlob, StatBlob
from edge_sdk.wire import Message, Tensor, is_digest

CHUNKS_UNDER_WAY = 4
MAX_SETBACKS = 3
PART_SUFFIX = ".part"
# A manifest is read into memory before its digest can be checked.
MAX_MANIFEST_BYTES = 16 * 1024 * 1024


class RepositoryClient:
    """The repository behind a channel. ``progress`` is called after each chunk; it must be quick."""

    def __init__(
        self, channel: Channel, *, timeout_s: float = 30.0, progress: Callable[[], None] | None = None
    ) -> None:
        """``timeout_s`` bounds each chunk, not the whole blob."""
        self._channel = channel
        self._timeout_s = timeout_s
        self._progress = progress or (lambda: None)

    def stat(self, sha256: str) -> int | None:
        """Size in bytes of a blob, ``None`` when the repository has none of that name."""
        reply = self._channel.call(StatBlob(sha256=_checked(sha256)), timeout_s=self._timeout_s)
        size = reply.body.get("size")
        if size is not None and (not isinstance(size, int) or size < 0):
            raise ProtocolError(f"blob.stat must answer with a size in bytes or nil, got {size!r}")
        return size

    def fetch(self, sha256: str, destination: Path, size_bytes: int | None = None) -> int:
        """Fetch a blob into the file ``destination``, which appears whole or not at all; returns the bytes that came.

        An earlier attempt that broke off is taken up where it ended. Bytes that do not match are fetched once more.
        Raises :class:`UnknownBlobError`, :class:`IntegrityError`, :class:`StorageError` when it cannot be written.
        """
        if size_bytes is None:
            size_bytes = self.stat(sha256)
            if size_bytes is None:
                raise UnknownBlobError(f"the repository has no blob {sha256}")
        part = destination.with_name(destination.name + PART_SUFFIX)
        with _on_disk(destination, "written"):
            resumed = part.stat().st_size if part.exists() else 0
            try:
                return self._fetch(sha256, part, destination, resumed if resumed <= size_bytes else 0, size_bytes)
            except IntegrityError:
                # What was left behind may be the wrong part, or the repository mends its copy: a whole fetch tells.
                return self._fetch(sha256, part, destination, 0, size_bytes)

    def _fetch(self, sha256: str, part: Path, destination: Path, start: int, size_bytes: int) -> int:
        destination.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with part.open("r+b" if start else "wb") as file:
            while start and (piece := file.read(CHUNK_BYTES)):
                digest.update(piece)
            for chunk in self._chunks(sha256, start, size_bytes):
                file.write(chunk.data)
                digest.update(chunk.data)
            # A name that stands for a whole file must not survive a power cut that its bytes did not.
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != sha256:
            part.unlink()
            raise IntegrityError(
                f"blob {sha256}: the {size_bytes} bytes that came have SHA-256 {digest.hexdigest()}; "
                "the repository's copy is damaged: put it there again"
            )
        part.replace(destination)
        return size_bytes - start

    def _chunks(self, sha256: str, start: int, size_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        under_way: deque[tuple[int, Future[Message]]] = deque()
        offsets = iter(range(start, size_bytes, CHUNK_BYTES))
        while True:
            while len(under_way) < CHUNKS_UNDER_WAY and (offset := next(offsets, None)) is not None:
                length = min(CHUNK_BYTES, size_bytes - offset)
                request = FetchBlob(sha256=sha256, offset=offset, length=length)
                under_way.append((length, self._channel.begin_call(request, timeout_s=self._timeout_s)))
            if not under_way:
                return
            length, future = under_way.popleft()
            chunk = future.result().arrays().get("chunk")
            if chunk is None or chunk.dtype != np.uint8 or chunk.shape != (length,):
                got = "nothing" if chunk is None else f"{chunk.dtype} {list(chunk.shape)}"
                raise ProtocolError(f"blob.fetch must answer with tensor 'chunk', uint8 [{length}]; got {got}")
            self._progress()
            yield chunk

    def put(self, sha256: str, path: Path) -> int:
        """Put the file ``path`` as a blob; returns the bytes sent, 0 when the repository has it already.

        Raises :class:`StorageError` when it cannot be read, :class:`IntegrityError` when it has another SHA-256.
        """
        with _on_disk(path, "read"):
            size_bytes = path.stat().st_size
            if self.stat(sha256) == size_bytes:
                return 0
            try:
                return self._put(sha256, path, size_bytes)
            except IntegrityError:
                # The repository went on from what an earlier put had left, and has forgotten it now.
                return self._put(sha256, path, size_bytes)

    def _put(self, sha256: str, path: Path, size_bytes: int) -> int:
        sent = offset = setbacks = 0
        with path.open("rb") as file:
            while True:
                file.seek(offset)
                chunk = np.frombuffer(file.read(CHUNK_BYTES), np.uint8)
                received = self._put_chunk(PutBlob(sha256=sha256, size=size_bytes, offset=offset), chunk)
                sent += chunk.size
                if received == size_bytes:
                    return sent
                # Less than we put: the repository had to begin anew. Once in a while that is no fault.
                setbacks += received <= offset
                if not 0 <= received < size_bytes or setbacks > MAX_SETBACKS:
                    raise ProtocolError(
                        f"blob.put of {size_bytes} bytes at {offset} was answered with {received} bytes received"
                    )
                offset = received

    def _put_chunk(self, request: PutBlob, chunk: npt.NDArray[Any]) -> int:
        """Put one chunk; returns the bytes that the repository has of the blob now."""
        tensors = (Tensor(name="chunk", data=chunk),)
        try:
            answer = self._channel.call(request, tensors=tensors, timeout_s=self._timeout_s).body
        except InvalidInputError as error:
            # Another upload of the same blob, or an earlier one, came further than ours.
            if "received" not in error.details:
                raise
            answer = error.details
        self._progress()
        received = answer.get("received")
        if not isinstance(received, int):
            raise ProtocolError(f"blob.put must answer with the bytes received, got {received!r}")
        return received

    def fetch_bundle(self, digest: str, folder: Path, *, head_only: bool) -> int:
        """Fetch a bundle into ``folder``; files that are there and whole are kept. Returns the bytes that came.

        ``head_only``: without the tail, as a device stores it. The manifest comes last to its place, so that a folder
        with a manifest is complete.
        """
        incoming = folder / f"incoming-{MANIFEST_FILE}"
        size_bytes = self.stat(digest)
        if size_bytes is None:
            raise UnknownBlobError(f"the repository has no bundle {digest}")
        if size_bytes > MAX_MANIFEST_BYTES:
            raise IntegrityError(f"blob {digest} has {size_bytes} bytes: too large for a manifest")
        fetched = self.fetch(digest, incoming, size_bytes)
        with _on_disk(incoming, "read"):
            manifest = parse(incoming.read_bytes())
        bundle = Bundle(path=folder, manifest=manifest, digest=digest)
        for entry in manifest.head_files if head_only else manifest.files:
            try:
                bundle.verify([entry])
            except IntegrityError:
                fetched += self.fetch(entry.sha256, folder / entry.path, entry.size_bytes)
        with _on_disk(folder, "written"):
            incoming.replace(folder / MANIFEST_FILE)
        return fetched

    def put_bundle(self, bundle: Bundle) -> int:
        """Put all files of a bundle that the repository lacks, the manifest last. Returns the bytes sent."""
        sent = sum(self.put(entry.sha256, bundle.path / entry.path) for entry in bundle.manifest.files)
        return sent + self.put(bundle.digest, bundle.path / MANIFEST_FILE)


@contextmanager
def _on_disk(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "; make room or name another folder" if done == "written" else ""
        raise StorageError(f"{path}: cannot be {done} ({error.strerror or error}){advice}") from error


def _checked(sha256: str) -> str:
    if not is_digest(sha256):
        raise InvalidInputError(f"{sha256!r} is not a SHA-256 as 64 lower-case hex digits")
    return sha256
