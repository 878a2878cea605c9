"""The repository over the wire, by the client that devices and allocators use, and by peers that do it wrong."""

from __future__ import annotations

import hashlib
import os
import threading

import numpy as np
import pytest

from cloud_server.blob_calls import MAX_CHUNK_BYTES
from edge_sdk.bundle import Bundle
from edge_sdk.channel import Channel
from edge_sdk.errors import InvalidInputError, SplitfleetError, UnknownBlobError
from edge_sdk.protocol import CHUNK_BYTES, FetchBlob, ListDevices, PutBlob, StatBlob
from edge_sdk.repository_client import RepositoryClient
from edge_sdk.wire import Tensor


def sha(data):
    return hashlib.sha256(data).hexdigest()


def chunk(data):
    return Tensor(name="chunk", data=np.frombuffer(data, np.uint8))


@pytest.fixture
def client(running):
    with Channel(running.endpoint) as channel:
        yield RepositoryClient(channel)


@pytest.fixture
def blob(tmp_path):
    path = tmp_path / "blob"
    path.write_bytes(os.urandom(3 * CHUNK_BYTES + 17))
    return path


def test_there_and_back(client, blob, tmp_path):
    data = blob.read_bytes()
    assert client.stat(sha(data)) is None
    assert client.put(sha(data), blob) == len(data)
    assert client.put(sha(data), blob) == 0
    assert client.stat(sha(data)) == len(data)
    client.fetch(sha(data), tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == data


def test_an_upload_that_broke_off_is_taken_up_where_it_ended(running, client, blob):
    data = blob.read_bytes()
    running.repository.put(sha(data), size=len(data), offset=0, chunk=data[: 2 * CHUNK_BYTES])
    assert client.put(sha(data), blob) < len(data)
    assert running.repository.read(sha(data), 0, len(data)) == data


def test_two_uploads_of_one_blob_both_succeed(running, blob):
    data = blob.read_bytes()
    failures: list[SplitfleetError] = []

    def upload():
        with Channel(running.endpoint) as channel:
            try:
                RepositoryClient(channel).put(sha(data), blob)
            except SplitfleetError as error:
                failures.append(error)

    threads = [threading.Thread(target=upload) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert running.repository.read(sha(data), 0, len(data)) == data


def test_a_bundle_there_and_back(running, client, make_bundle, tmp_path):
    bundle = make_bundle()
    client.put_bundle(bundle)
    running.repository.lay_out(bundle.digest, tmp_path / "laid").verify()
    client.fetch_bundle(bundle.digest, tmp_path / "device", head_only=True)
    assert not (tmp_path / "device" / "tail").exists()
    Bundle.open(tmp_path / "device").verify(bundle.manifest.head_files)


def test_what_is_not_there_is_unknown(running):
    peer = running.peer()
    assert peer.call(StatBlob(sha256=sha(b"x"))).body == {"size": None}
    with pytest.raises(UnknownBlobError):
        peer.call(FetchBlob(sha256=sha(b"x"), offset=0))


@pytest.mark.parametrize("length", [0, -1, MAX_CHUNK_BYTES + 1])
def test_a_chunk_has_a_bounded_length(running, length):
    running.repository.put(sha(b"x"), size=1, offset=0, chunk=b"x")
    with pytest.raises(InvalidInputError, match="a chunk has 1 to"):
        running.peer().call(FetchBlob(sha256=sha(b"x"), offset=0, length=length))


@pytest.mark.parametrize(
    "tensors",
    [
        (),
        (Tensor(name="piece", data=np.zeros(1, np.uint8)),),
        (Tensor(name="chunk", data=np.zeros(1, np.int8)),),
        (Tensor(name="chunk", data=np.zeros((1, 1), np.uint8)),),
    ],
)
def test_a_put_needs_its_chunk(running, tensors):
    with pytest.raises(InvalidInputError, match="one tensor 'chunk'"):
        running.peer().call(PutBlob(sha256=sha(b"x"), size=1, offset=0), tensors=tensors)


@pytest.mark.parametrize("call", [PutBlob(sha256=sha(b"x"), size=10**9, offset=0), ListDevices()])
def test_a_call_brings_along_no_more_than_a_chunk(running, call):
    peer = running.peer()
    with pytest.raises(InvalidInputError, match=f"tensors of at most {MAX_CHUNK_BYTES} bytes, {call.method} came with"):
        peer.call(call, tensors=(chunk(bytes(MAX_CHUNK_BYTES)), Tensor(name="x", data=np.zeros(1, np.int8))))
    peer.call(ListDevices(), tensors=(chunk(bytes(MAX_CHUNK_BYTES)),))


def test_puts_of_one_peer_run_in_the_order_in_which_they_were_sent(running):
    peer = running.peer()
    data = os.urandom(64)
    asked = [
        peer.begin(PutBlob(sha256=sha(data), size=64, offset=offset), tensors=(chunk(data[offset : offset + 1]),))
        for offset in range(64)
    ]
    assert [peer.end_of(request_id).body["received"] for request_id in asked] == list(range(1, 65))


def test_an_empty_blob_can_be_put(running):
    assert running.peer().call(PutBlob(sha256=sha(b""), size=0, offset=0), tensors=(chunk(b""),)).body == {
        "received": 0
    }
    assert running.repository.has(sha(b""))
