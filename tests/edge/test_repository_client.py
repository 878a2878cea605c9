"""Blobs and bundles over real sockets: chunks, broken-off fetches, damaged bytes, what is skipped."""

import hashlib
import shutil

import numpy as np
import pytest

from edge_sdk.bundle import Bundle
from edge_sdk.channel import Channel
from edge_sdk.errors import (
    BundleError,
    IntegrityError,
    InvalidInputError,
    ProtocolError,
    StorageError,
    UnknownBlobError,
)
from edge_sdk.protocol import CHUNK_BYTES
from edge_sdk.repository_client import RepositoryClient
from edge_sdk.wire import Tensor

DATA = np.random.default_rng(1).bytes(3 * CHUNK_BYTES + 17)


@pytest.fixture
def blobs(blob_handler):
    return blob_handler()


@pytest.fixture
def repository(start_peer, blobs):
    with Channel(start_peer(blobs).endpoint) as channel:
        yield RepositoryClient(channel)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(DATA)])
def test_there_and_back(repository, blobs, tmp_path, size):
    source, destination = tmp_path / "source", tmp_path / "new" / "destination"
    source.write_bytes(DATA[:size])
    digest = hashlib.sha256(DATA[:size]).hexdigest()
    assert repository.stat(digest) is None
    assert repository.put(digest, source) == size
    assert blobs.blobs[digest] == DATA[:size]
    assert repository.stat(digest) == size
    assert repository.put(digest, source) == 0
    assert repository.fetch(digest, destination) == size
    assert destination.read_bytes() == DATA[:size]
    assert [path.name for path in destination.parent.iterdir()] == ["destination"]


def test_a_fetch_goes_on_where_it_broke_off(repository, blobs, tmp_path):
    digest = blobs.add(DATA)
    (tmp_path / "x.part").write_bytes(DATA[: CHUNK_BYTES + 5])
    assert repository.fetch(digest, tmp_path / "x") == len(DATA) - CHUNK_BYTES - 5
    assert (tmp_path / "x").read_bytes() == DATA
    assert min(offset for _, offset in blobs.fetched) == CHUNK_BYTES + 5


@pytest.mark.parametrize("left", [b"wrong" * 10, DATA + b"too long", DATA[:-1] + b"x"])
def test_a_wrong_leftover_does_no_harm(repository, blobs, tmp_path, left):
    digest = blobs.add(DATA)
    (tmp_path / "x.part").write_bytes(left)
    repository.fetch(digest, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == DATA


def test_a_leftover_that_is_complete_is_only_checked(repository, blobs, tmp_path):
    digest = blobs.add(DATA)
    (tmp_path / "x.part").write_bytes(DATA)
    assert repository.fetch(digest, tmp_path / "x") == 0
    assert blobs.fetched == []


def test_damaged_bytes_never_appear(repository, blobs, tmp_path):
    digest = blobs.add(DATA)
    blobs.blobs[digest] = DATA[:-1] + b"x"
    with pytest.raises(IntegrityError, match="the repository's copy is damaged"):
        repository.fetch(digest, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_blob_that_is_not_there(repository, tmp_path):
    with pytest.raises(UnknownBlobError, match="a" * 64):
        repository.fetch("a" * 64, tmp_path / "x")
    with pytest.raises(InvalidInputError, match="SHA-256"):
        repository.stat("../etc")


def test_a_place_that_cannot_be_written(repository, blobs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        repository.fetch(blobs.add(DATA), tmp_path / "file" / "x")


def test_a_file_that_cannot_be_read(repository, tmp_path):
    with pytest.raises(StorageError, match=r"x: cannot be read \(No such file"):
        repository.put("a" * 64, tmp_path / "x")


def test_bytes_that_went_wrong_once_are_fetched_again(start_peer, blob_handler, make_reply, tmp_path):
    spoiled = []

    def answer(message, peer):
        if message.method == "blob.fetch" and not spoiled:
            spoiled.append(message)
            chunk = np.zeros(message.body["length"], np.uint8)
            return make_reply(message, {}, [Tensor(name="chunk", data=chunk)])
        return blobs(message, peer)

    blobs = blob_handler()
    digest = blobs.add(DATA)
    with Channel(start_peer(answer).endpoint) as channel:
        RepositoryClient(channel).fetch(digest, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == DATA
    assert len(blobs.fetched) == 3 + 4


def test_a_put_onto_a_wrong_leftover_is_begun_anew(start_peer, blob_handler, make_reply, tmp_path):
    """An earlier put broke off after bytes that were not those: the repository tells at the end, and forgets them."""
    offsets = []

    def answer(message, peer):
        if message.method == "blob.put":
            offsets.append(message.body["offset"])
            if len(offsets) == 1:
                return make_reply(message, {"received": 3 * CHUNK_BYTES})
            if len(offsets) == 2:
                raise IntegrityError("the bytes that came have another SHA-256; send them again")
        return blobs(message, peer)

    blobs = blob_handler()
    digest = hashlib.sha256(DATA).hexdigest()
    (tmp_path / "x").write_bytes(DATA)
    with Channel(start_peer(answer).endpoint) as channel:
        RepositoryClient(channel).put(digest, tmp_path / "x")
    assert offsets == [0, 3 * CHUNK_BYTES, 0, CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES]
    assert blobs.blobs[digest] == DATA


def test_a_put_of_a_file_that_is_another_ends(start_peer, make_reply, tmp_path):
    asked = []

    def answer(message, peer):  # noqa: ARG001
        asked.append(message.method)
        if message.method == "blob.put":
            raise IntegrityError("the bytes that came have another SHA-256; send them again")
        return make_reply(message, {"size": None})

    (tmp_path / "x").write_bytes(b"0123456789")
    with Channel(start_peer(answer).endpoint) as channel, pytest.raises(IntegrityError):
        RepositoryClient(channel).put("a" * 64, tmp_path / "x")
    assert asked == ["blob.stat", "blob.put", "blob.put"]


@pytest.mark.parametrize(
    "chunk",
    [
        None,
        np.zeros(5, np.uint8),
        np.zeros(11, np.uint8),
        np.zeros(10, np.int8),
        np.zeros((1, 10), np.uint8),
    ],
)
def test_a_chunk_that_is_not_what_was_asked_for(start_peer, make_reply, tmp_path, chunk):
    tensors = [] if chunk is None else [Tensor(name="chunk", data=chunk)]
    peer = start_peer(lambda message, _: make_reply(message, {"size": 10}, tensors))
    with Channel(peer.endpoint) as channel, pytest.raises(ProtocolError, match=r"uint8 \[10\]"):
        RepositoryClient(channel).fetch("a" * 64, tmp_path / "x")


@pytest.mark.parametrize("body", [{}, {"received": "all"}, {"received": 0}, {"received": 11}])
def test_a_put_that_gets_nowhere_ends(start_peer, make_reply, tmp_path, body):
    def answer(message, peer):  # noqa: ARG001
        return make_reply(message, {"size": None} if message.method == "blob.stat" else body)

    (tmp_path / "x").write_bytes(b"0123456789")
    with Channel(start_peer(answer).endpoint) as channel, pytest.raises(ProtocolError, match=r"blob\.put"):
        RepositoryClient(channel).put("a" * 64, tmp_path / "x")


@pytest.mark.parametrize("as_error", [False, True])
def test_a_put_goes_on_where_the_repository_is(start_peer, blob_handler, make_reply, tmp_path, as_error):
    """Another upload came further, then the repository had to begin anew: its answer tells where it is."""
    digest = hashlib.sha256(DATA).hexdigest()
    offsets = []

    def answer(message, peer):
        if message.method == "blob.put":
            offsets.append(message.body["offset"])
            elsewhere = {1: 2 * CHUNK_BYTES, 2: 0}.get(len(offsets))
            if elsewhere is not None and as_error:
                raise InvalidInputError("wrong offset", received=elsewhere)
            if elsewhere is not None:
                return make_reply(message, {"received": elsewhere})
        return blobs(message, peer)

    blobs = blob_handler()
    (tmp_path / "x").write_bytes(DATA)
    with Channel(start_peer(answer).endpoint) as channel:
        RepositoryClient(channel).put(digest, tmp_path / "x")
    assert offsets == [0, 2 * CHUNK_BYTES, 0, CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES]
    assert blobs.blobs[digest] == DATA


def test_a_bundle_there_and_back(repository, bundles, tmp_path):
    bundle = Bundle.open(bundles / "split")
    total = sum(entry.size_bytes for entry in bundle.manifest.files) + len(bundle.manifest.canonical())
    assert repository.put_bundle(bundle) == total
    assert repository.put_bundle(bundle) == 0
    assert repository.fetch_bundle(bundle.digest, tmp_path / "all", head_only=False) == total
    Bundle.open(tmp_path / "all").verify()
    assert repository.fetch_bundle(bundle.digest, tmp_path / "head", head_only=True) < total
    fetched = Bundle.open(tmp_path / "head")
    assert fetched.digest == bundle.digest
    fetched.verify(fetched.manifest.head_files)
    assert sorted(path.name for path in fetched.path.iterdir()) == ["head.tflite", "manifest.json"]


def test_files_that_are_there_are_not_fetched_again(repository, blobs, bundles, tmp_path):
    digest = blobs.add_bundle(bundles / "split")
    (tmp_path / "b").mkdir()
    shutil.copy(bundles / "split" / "head.tflite", tmp_path / "b" / "head.tflite")
    assert repository.fetch_bundle(digest, tmp_path / "b", head_only=True) == len(blobs.blobs[digest])


def test_without_one_file_there_is_no_manifest(repository, blobs, bundles, tmp_path):
    digest = blobs.add_bundle(bundles / "split")
    del blobs.blobs[Bundle.open(bundles / "split").manifest.head_files[0].sha256]
    with pytest.raises(UnknownBlobError):
        repository.fetch_bundle(digest, tmp_path / "b", head_only=True)
    assert not (tmp_path / "b" / "manifest.json").exists()


def test_a_blob_that_is_no_manifest(repository, blobs, tmp_path):
    with pytest.raises(BundleError, match="not JSON"):
        repository.fetch_bundle(blobs.add(b"nonsense"), tmp_path / "b", head_only=True)


def test_progress_is_told(start_peer, blobs, tmp_path):
    steps = []
    digest = blobs.add(DATA)
    with Channel(start_peer(blobs).endpoint) as channel:
        RepositoryClient(channel, progress=lambda: steps.append(1)).fetch(digest, tmp_path / "x")
    assert len(steps) == 4
