"""The model repository on disk: a blob is there whole or not at all."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloud_server.repository import ArtifactRepository
from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, ConfigError, IntegrityError, InvalidInputError, UnknownBlobError
from edge_sdk.manifest import MANIFEST_FILE


def sha(data):
    return hashlib.sha256(data).hexdigest()


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "repository"


@pytest.fixture
def repository(folder):
    return ArtifactRepository(folder)


def put(repository, data, chunk_bytes=4, **changes):
    for offset in range(0, max(len(data), 1), chunk_bytes):
        repository.put(
            changes.get("sha256", sha(data)), size=len(data), offset=offset, chunk=data[offset : offset + chunk_bytes]
        )


def test_a_blob_exists_once_all_of_its_bytes_came(repository, folder):
    data = b"0123456789"
    name = sha(data)
    assert repository.put(name, size=10, offset=0, chunk=data[:6]) == 6
    assert not repository.has(name)
    assert repository.size(name) is None
    with pytest.raises(UnknownBlobError):
        repository.read(name, 0, 1)
    assert repository.put(name, size=10, offset=6, chunk=data[6:]) == 10
    assert repository.size(name) == 10
    assert repository.read(name, 0, 100) == data
    assert repository.read(name, 8, 100) == b"89"
    assert repository.read(name, 10, 1) == b""
    assert files(folder) == [f"blobs/{name[:2]}/{name}"]
    # Again: nothing changes.
    assert repository.put(name, size=10, offset=0, chunk=data[:6]) == 10
    assert files(folder) == [f"blobs/{name[:2]}/{name}"]


def test_an_empty_blob_is_a_blob(repository):
    assert repository.put(sha(b""), size=0, offset=0, chunk=b"") == 0
    assert repository.size(sha(b"")) == 0
    assert repository.read(sha(b""), 0, 10) == b""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=6))
def test_a_blob_is_what_its_chunks_were_however_cut_and_resumed(tmp_path_factory, data, cuts):
    folder = tmp_path_factory.mktemp("repository")
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    name = sha(data)
    for begin, end in [*itertools.pairwise(bounds)] or [(0, 0)]:
        # Another process each time: nothing is kept in memory.
        assert ArtifactRepository(folder).put(name, size=len(data), offset=begin, chunk=data[begin:end]) == end
    assert ArtifactRepository(folder).read(name, 0, 1000) == data
    assert files(folder) == [f"blobs/{name[:2]}/{name}"]


def test_a_damaged_blob_of_the_right_size_is_dropped_before_a_new_put(repository, folder):
    data = b"all of the bytes"
    sha256 = hashlib.sha256(data).hexdigest()
    assert repository.put(sha256, size=len(data), offset=0, chunk=data) == len(data)
    assert repository.sound_size(sha256) == len(data)
    path = folder / "blobs" / sha256[:2] / sha256
    path.chmod(0o644)
    path.write_bytes(data[::-1])
    os.utime(path, ns=(1, 1))
    assert repository.sound_size(sha256) is None
    assert repository.put(sha256, size=len(data), offset=0, chunk=data) == len(data)
    assert repository.read(sha256, 0, 99) == data


def test_a_folder_that_cannot_be_made_is_told(folder):
    (folder / "file").parent.mkdir(parents=True, exist_ok=True)
    (folder / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made the model repository"):
        ArtifactRepository(folder / "file")


@pytest.mark.parametrize("offset", [0, 3, 5, 9, 1000])
def test_a_chunk_for_another_offset_is_not_taken_and_told_what_came_so_far(repository, offset):
    data = b"0123456789"
    repository.put(sha(data), size=10, offset=0, chunk=data[:4])
    assert repository.put(sha(data), size=10, offset=offset, chunk=b"x") == 4
    assert repository.put(sha(data), size=10, offset=4, chunk=data[4:]) == 10
    assert repository.read(sha(data), 0, 10) == data


def test_more_bytes_than_announced_are_refused(repository):
    data = b"0123456789"
    repository.put(sha(data), size=10, offset=0, chunk=data[:6])
    with pytest.raises(InvalidInputError, match="11 bytes came, more than the 10"):
        repository.put(sha(data), size=10, offset=6, chunk=b"67890")
    assert repository.put(sha(data), size=10, offset=6, chunk=data[6:]) == 10


def test_bytes_that_do_not_match_are_forgotten(repository, folder):
    name = sha(b"0123456789")
    repository.put(name, size=10, offset=0, chunk=b"01234")
    with pytest.raises(IntegrityError, match="send them again"):
        repository.put(name, size=10, offset=5, chunk=b"xxxxx")
    assert files(folder) == []
    put(repository, b"0123456789")
    assert repository.has(name)


def test_a_leftover_of_another_size_does_not_block_a_put(repository):
    data = b"0123456789"
    repository.put(sha(data), size=100, offset=0, chunk=b"y" * 50)
    put(repository, data)
    assert repository.read(sha(data), 0, 10) == data


def test_a_put_of_another_size_than_the_blob_is_refused_and_mends_a_truncated_one(repository, folder):
    data = b"0123456789"
    name = sha(data)
    put(repository, data)
    with pytest.raises(InvalidInputError, match="has 10 bytes, a put says 9"):
        repository.put(name, size=9, offset=0, chunk=data[:9])
    path = folder / "blobs" / name[:2] / name
    path.chmod(0o600)
    path.write_bytes(data[:7])
    put(repository, data)
    assert repository.read(name, 0, 100) == data


@pytest.mark.parametrize(("size", "offset"), [(-1, 0), (10, -1)])
def test_negative_numbers_are_refused(repository, size, offset):
    with pytest.raises(InvalidInputError, match="must not be negative"):
        repository.put(sha(b""), size=size, offset=offset, chunk=b"")


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (11, 1), (0, -1)])
def test_reading_outside_of_a_blob_is_refused(repository, offset, length):
    put(repository, b"0123456789")
    with pytest.raises(InvalidInputError):
        repository.read(sha(b"0123456789"), offset, length)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "", "a" * 63, "A" * 64, "g" * 64, "a" * 63 + "\n", "../" + "a" * 61]
)
def test_no_name_leads_out_of_the_folder(repository, folder, name):
    for use in (
        repository.has,
        repository.size,
        repository.manifest,
        lambda name: repository.read(name, 0, 1),
        lambda name: repository.put(name, size=1, offset=0, chunk=b"x"),
        lambda name: repository.lay_out(name, folder / "laid"),
    ):
        with pytest.raises(InvalidInputError, match="not a SHA-256"):
            use(name)
    assert files(folder.parent) == []


def _put_all(folder, data):
    """Put ``data`` like a client: from the start, and from where the repository says when another was quicker."""
    repository = ArtifactRepository(folder)
    offset = 0
    while offset < len(data):
        offset = repository.put(sha(data), size=len(data), offset=offset, chunk=data[offset : offset + 1000])


def test_two_processes_and_two_threads_may_put_the_same_blob(folder):
    data = os.urandom(200_000)
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=_put_all, args=(folder, data)) for _ in range(2)]
    writers += [threading.Thread(target=_put_all, args=(folder, data)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert all(writer.exitcode == 0 for writer in writers[:2])
    assert ArtifactRepository(folder).read(sha(data), 0, len(data)) == data
    assert files(folder) == [f"blobs/{sha(data)[:2]}/{sha(data)}"]


def test_what_crashed_writers_left_is_removed_after_a_day(repository, folder):
    repository.put(sha(b"old"), size=3, offset=0, chunk=b"o")
    repository.put(sha(b"new"), size=3, offset=0, chunk=b"n")
    (folder / "partial" / "x.copy").write_bytes(b"half a file")
    yesterday = time.time() - 25 * 3600
    for name in (sha(b"old"), "x.copy"):
        os.utime(folder / "partial" / name, (yesterday, yesterday))
    again = ArtifactRepository(folder)
    assert files(folder) == [f"partial/{sha(b'new')}"]
    assert again.put(sha(b"new"), size=3, offset=1, chunk=b"ew") == 3


def test_a_bundle_is_taken_in_and_laid_out(repository, make_bundle, tmp_path):
    bundle = make_bundle(tail={"saved_model.pb": b"graph", "variables/variables.index": b"index"})
    assert repository.add_bundle(bundle) == bundle.digest
    assert repository.add_bundle(bundle) == bundle.digest
    assert repository.manifest(bundle.digest) == bundle.manifest
    laid = repository.lay_out(bundle.digest, tmp_path / "laid" / bundle.digest)
    laid.verify()
    assert laid.digest == bundle.digest
    assert files(laid.path) == files(bundle.path)
    assert list(laid.path.parent.iterdir()) == [laid.path]


def test_what_is_laid_out_is_kept_if_intact_and_made_anew_if_not(repository, make_bundle, tmp_path):
    bundle = make_bundle()
    repository.add_bundle(bundle)
    folder = tmp_path / "laid"
    inode = repository.lay_out(bundle.digest, folder).path.stat().st_ino
    assert repository.lay_out(bundle.digest, folder).path.stat().st_ino == inode
    (folder / "tail" / "saved_model.pb").unlink()
    repository.lay_out(bundle.digest, folder).verify()
    (folder / MANIFEST_FILE).unlink()
    repository.lay_out(bundle.digest, folder).verify()


def test_another_file_system_gets_copies(repository, make_bundle, tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(18, "Invalid cross-device link")

    bundle = make_bundle()
    repository.add_bundle(bundle)
    monkeypatch.setattr(os, "link", no_links)
    repository.lay_out(bundle.digest, tmp_path / "laid").verify()


@pytest.mark.parametrize("change", ["delete", "truncate", "corrupt"])
@pytest.mark.parametrize("victim", [MANIFEST_FILE, "head.tflite", "tail/saved_model.pb"])
def test_an_incomplete_or_corrupt_bundle_is_not_laid_out_and_a_new_upload_mends_it(
    repository, folder, make_bundle, tmp_path, victim, change
):
    bundle = make_bundle()
    repository.add_bundle(bundle)
    name = sha((bundle.path / victim).read_bytes())
    path = folder / "blobs" / name[:2] / name
    path.chmod(0o600)
    if change == "delete":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[:-1] if change == "truncate" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(UnknownBlobError if change == "delete" else IntegrityError, match="upload it"):
        repository.lay_out(bundle.digest, tmp_path / "laid")
    assert not (tmp_path / "laid").exists()
    assert not repository.has(name)
    repository.add_bundle(bundle)
    repository.lay_out(bundle.digest, tmp_path / "laid").verify()


@pytest.mark.parametrize("change", ["delete", "corrupt"])
def test_a_bundle_on_disk_that_is_not_what_it_says_is_not_taken_in(repository, folder, make_bundle, change):
    bundle = make_bundle()
    if change == "delete":
        bundle.head_path.unlink()
    else:
        bundle.head_path.write_bytes(b"tampered")
    with pytest.raises(IntegrityError, match=r"head\.tflite.*make the bundle again"):
        repository.add_bundle(bundle)
    assert not repository.has(bundle.digest)
    assert not [name for name in files(folder) if name.startswith("partial")]


def test_a_blob_that_is_no_manifest_is_no_bundle(repository, tmp_path):
    put(repository, b"{}")
    with pytest.raises(BundleError, match="schema_version"):
        repository.lay_out(sha(b"{}"), tmp_path / "laid")
    with pytest.raises(UnknownBlobError, match="holds no bundle"):
        repository.lay_out(sha(b"unknown"), tmp_path / "laid")


def test_blobs_cannot_be_written_by_accident(repository, make_bundle, tmp_path):
    bundle = make_bundle()
    repository.add_bundle(bundle)
    laid = repository.lay_out(bundle.digest, tmp_path / "laid")
    assert laid.head_path.stat().st_mode & 0o222 == 0
    assert Bundle.open(bundle.path).head_path.stat().st_mode & 0o200
