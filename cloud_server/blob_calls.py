"""The calls of the model repository: ``blob.stat``, ``blob.fetch``, ``blob.put``.

Plain functions from a message to its answer, so that any server can offer them: the cloud server now, a repository
server of its own later. They block on the disk: call them outside of an I/O loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cloud_server.repository import ArtifactRepository
from edge_sdk.errors import InvalidInputError
from edge_sdk.protocol import FetchBlob, PutBlob, StatBlob
from edge_sdk.wire import Message, Tensor

Answer = tuple[dict[str, Any], Sequence[Tensor]]
Call = Callable[[Message], Answer]

# Also what a peer that does not read may have waiting for it, times the messages that are queued for it.
MAX_CHUNK_BYTES = 1 << 20


class BlobCalls:
    """What a repository answers; raises the errors of :class:`ArtifactRepository`."""

    def __init__(self, repository: ArtifactRepository) -> None:
        self._repository = repository

    @property
    def reading(self) -> Mapping[str, Call]:
        """By method, the calls that change nothing: any number of them may run side by side."""
        return {StatBlob.method: self._stat, FetchBlob.method: self._fetch}

    @property
    def writing(self) -> Mapping[str, Call]:
        """By method, the calls that must run in the order in which they came."""
        return {PutBlob.method: self._put}

    def _stat(self, message: Message) -> Answer:
        asked = StatBlob.from_body(message.body)
        return {"size": self._repository.sound_size(asked.sha256)}, ()

    def _fetch(self, message: Message) -> Answer:
        asked = FetchBlob.from_body(message.body)
        if not 0 < asked.length <= MAX_CHUNK_BYTES:
            raise InvalidInputError(f"a chunk has 1 to {MAX_CHUNK_BYTES} bytes, {asked.length} were asked for")
        data = self._repository.read(asked.sha256, asked.offset, asked.length)
        return {}, (Tensor(name="chunk", data=np.frombuffer(data, dtype=np.uint8)),)

    def _put(self, message: Message) -> Answer:
        asked = PutBlob.from_body(message.body)
        chunk = message.arrays().get("chunk")
        if chunk is None or chunk.dtype != np.uint8 or chunk.ndim != 1:
            raise InvalidInputError("blob.put needs one tensor 'chunk', uint8 of rank 1")
        # A memoryview of an empty array cannot be cast, and has nothing to say either.
        data = chunk.data if chunk.size else b""
        received = self._repository.put(asked.sha256, size=asked.size, offset=asked.offset, chunk=data)
        return {"received": received}, ()
