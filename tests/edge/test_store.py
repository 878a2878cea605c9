"""The device's store: whole bundles or none, repair, what is kept and what goes."""

import errno
import hashlib
import os
import shutil
from pathlib import Path

import pytest

from edge_sdk.bundle import Bundle
from edge_sdk.errors import (
    BundleError,
    ConfigError,
    IntegrityError,
    InvalidInputError,
    PeerUnreachableError,
    StorageError,
)
from edge_sdk.protocol import check_device_id
from edge_sdk.store import BLOBS_KEPT, BUNDLES_KEPT, DeviceStore, default_store


@pytest.fixture
def store(tmp_path):
    with DeviceStore.open(tmp_path / "store") as opened:
        yield opened


def copying(source):
    """A fetch that copies manifest and head, and counts its calls."""

    def fetch(folder):
        fetch.calls += 1
        for name in ("head.tflite", "manifest.json"):
            if (source / name).exists():
                shutil.copy(source / name, folder / name)
        return 123

    fetch.calls = 0
    return fetch


def variant(source, number):
    """The same bundle under another digest."""
    path = source / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"cumulative_bytes":', b'"cumulative_bytes":%d' % number))
    return Bundle.open(source).digest


def test_an_installed_bundle_is_whole_and_fetched_once(store, prebuilt_bundles):
    source = prebuilt_bundles / "whole"
    digest = Bundle.open(source).digest
    fetch = copying(source)
    assert store.bundle(digest) is None
    bundle, fetched_bytes = store.install(digest, fetch)
    assert (bundle.digest, fetched_bytes) == (digest, 123)
    assert bundle.path == store.path / "bundles" / digest
    assert store.install(digest, fetch)[1] == 0
    assert fetch.calls == 1
    assert store.bundle(digest).manifest == bundle.manifest


def test_a_fetch_that_breaks_off_leaves_no_bundle_and_is_taken_up_again(store, prebuilt_bundles):
    digest = Bundle.open(prebuilt_bundles / "whole").digest
    seen = []

    def break_off(folder):
        seen.append(sorted(path.name for path in folder.iterdir()))
        (folder / "head.tflite.part").write_bytes(b"some")
        raise PeerUnreachableError("gone")

    for _ in range(2):
        with pytest.raises(PeerUnreachableError):
            store.install(digest, break_off)
    assert store.bundle(digest) is None
    assert seen == [[], ["head.tflite.part"]]


@pytest.mark.parametrize("name", ["head.tflite", "manifest.json"])
def test_what_arrives_damaged_is_never_installed(store, bundles, name):
    digest = Bundle.open(bundles / "whole").digest
    path = bundles / "whole" / name
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"whole"', b'"w"') + b" " if name == "head.tflite" else data[:-1])
    with pytest.raises(BundleError):
        store.install(digest, copying(bundles / "whole"))
    assert store.bundle(digest) is None


def test_another_bundle_than_the_one_asked_for(store, prebuilt_bundles):
    with pytest.raises(IntegrityError, match="was asked for"):
        store.install("a" * 64, copying(prebuilt_bundles / "whole"))
    assert not (store.path / "incoming" / ("a" * 64)).exists()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"x")])
@pytest.mark.parametrize("name", ["head.tflite", "manifest.json"])
def test_a_bundle_that_decays_is_fetched_again(store, prebuilt_bundles, name, damage):
    source = prebuilt_bundles / "whole"
    digest = Bundle.open(source).digest
    fetch = copying(source)
    bundle, _ = store.install(digest, fetch)
    damage(bundle.path / name)
    assert store.bundle(digest) is None
    assert store.install(digest, fetch)[1] == 123
    assert store.bundle(digest) is not None


def test_the_newest_and_the_active_are_kept(store, bundles):
    source = bundles / "whole"
    digests = []
    for number in range(1, BUNDLES_KEPT + 4):
        digests.append(variant(source, number))
        bundle, _ = store.install(digests[-1], copying(source))
        os.utime(bundle.path, (number, number))
        if number == 1:
            store.activate(digests[0])
    kept = {path.name for path in (store.path / "bundles").iterdir()}
    assert digests[0] in kept
    assert set(digests[-BUNDLES_KEPT:]) <= kept
    assert len(kept) == BUNDLES_KEPT + 1
    assert store.active == digests[0]


def test_active_survives_a_restart_while_the_bundle_does(tmp_path, prebuilt_bundles):
    source = prebuilt_bundles / "whole"
    digest = Bundle.open(source).digest
    with DeviceStore.open(tmp_path) as store:
        assert store.active is None
        bundle, _ = store.install(digest, copying(source))
        store.activate(digest)
    with DeviceStore.open(tmp_path) as store:
        assert store.active == digest
        shutil.rmtree(bundle.path)
        assert store.active is None


def test_a_bundle_that_broke_off_goes_with_the_next_install(store, prebuilt_bundles):
    stale = store.path / "incoming" / ("b" * 64)
    stale.mkdir()
    source = prebuilt_bundles / "whole"
    store.install(Bundle.open(source).digest, copying(source))
    assert not stale.exists()


def test_blobs_are_fetched_once_and_old_ones_go(store):
    def put(data):
        def fetch(path):
            path.write_bytes(data)
            fetch.calls += 1

        fetch.calls = 0
        return hashlib.sha256(data).hexdigest(), fetch

    for number in range(BLOBS_KEPT + 3):
        sha256, fetch = put(b"%d" % number)
        path = store.blob(sha256, fetch)
        store.blob(sha256, fetch)
        assert fetch.calls == 1
        assert path.read_bytes() == b"%d" % number
        os.utime(path, (number, number))
    assert len(list((store.path / "blobs").iterdir())) == BLOBS_KEPT


def writing(data):
    """A fetch of a blob that counts its calls."""

    def fetch(path):
        fetch.calls += 1
        return path.write_bytes(data)

    fetch.calls = 0
    return hashlib.sha256(data).hexdigest(), fetch


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("damaged", [b"validation inputS", b"validation", b"", None])
def test_a_blob_that_decays_is_fetched_again(tmp_path, restarted, damaged):
    sha256, fetch = writing(b"validation inputs")
    with DeviceStore.open(tmp_path) as store:
        path = store.blob(sha256, fetch)
        if not restarted:
            path.unlink() if damaged is None else path.write_bytes(damaged)
            assert store.blob(sha256, fetch).read_bytes() == b"validation inputs"
    if restarted:
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with DeviceStore.open(tmp_path) as store:
            assert store.blob(sha256, fetch).read_bytes() == b"validation inputs"
    assert fetch.calls == 2


def test_a_blob_is_hashed_once_while_it_does_not_change(store, monkeypatch):
    hashed = []

    def count(path):
        hashed.append(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr("edge_sdk.store.file_sha256", count)
    sha256, fetch = writing(b"inputs")
    with_another_process = store.path / "blobs" / f"{sha256}.npy"
    with_another_process.write_bytes(b"inputs")
    for _ in range(3):
        store.blob(sha256, fetch)
    assert (len(hashed), fetch.calls) == (1, 0)


def full(folder):
    """A fetch into a disk that is full half way."""

    def fetch(path):
        (path / "head.tflite.part" if path.is_dir() else path.with_name(path.name + ".part")).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    return fetch


def files_of(store):
    return [path for path in store.path.rglob("*") if path.is_file() and path.name not in ("lock", "active")]


@pytest.mark.parametrize("kind", ["bundle", "blob"])
def test_a_full_disk_is_told_and_what_it_took_is_given_back(store, kind):
    """Else the part that came would fill it for ever."""
    store.blob(*writing(b"other inputs"))
    with pytest.raises(StorageError, match="No space left on device"):
        (store.install if kind == "bundle" else store.blob)("a" * 64, full(store.path))
    assert files_of(store) == []


def test_what_broke_off_goes_when_something_else_comes(store, prebuilt_bundles):
    def break_off(path):
        path.with_name(path.name + ".part").write_bytes(b"half")
        raise PeerUnreachableError("gone")

    def left():
        return [path.name for path in files_of(store) if path.suffix == ".part"]

    for sha256 in ("a" * 64, "b" * 64, "b" * 64):
        with pytest.raises(PeerUnreachableError):
            store.blob(sha256, break_off)
        assert left() == [f"{sha256}.npy.part"]
    source = prebuilt_bundles / "whole"
    store.install(Bundle.open(source).digest, copying(source))
    assert left() == []


def test_a_store_that_is_removed_meanwhile_is_made_anew(store, prebuilt_bundles):
    source = prebuilt_bundles / "whole"
    digest = Bundle.open(source).digest
    store.install(digest, copying(source))
    store.activate(digest)
    sha256, fetch = writing(b"inputs")
    store.blob(sha256, fetch)
    shutil.rmtree(store.path)
    assert store.active is None
    assert store.bundle(digest) is None
    assert store.blob(sha256, fetch).read_bytes() == b"inputs"
    shutil.rmtree(store.path)
    assert store.install(digest, copying(source))[1] == 123
    store.activate(digest)
    assert store.active == digest


def test_a_store_that_is_no_folder_any_more(store, prebuilt_bundles):
    shutil.rmtree(store.path)
    store.path.write_text("a file in its place")
    source = prebuilt_bundles / "whole"
    digest = Bundle.open(source).digest
    assert store.active is None
    for attempt in (
        lambda: store.install(digest, copying(source)),
        lambda: store.blob(*writing(b"inputs")),
        lambda: store.activate(digest),
    ):
        with pytest.raises(StorageError, match="--store"):
            attempt()


def test_a_store_that_takes_nothing_any_more_gives_what_it_has(store, prebuilt_bundles, monkeypatch):
    source = prebuilt_bundles / "whole"
    digest = Bundle.open(source).digest
    store.install(digest, copying(source))
    sha256, fetch = writing(b"inputs")
    store.blob(sha256, fetch)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert store.install(digest, copying(source))[1] == 0
    assert store.blob(sha256, fetch).read_bytes() == b"inputs"
    with pytest.raises(StorageError, match="Read-only file system"):
        store.install("a" * 64, copying(source))


def test_the_made_up_id_stays(tmp_path):
    with DeviceStore.open(tmp_path) as store:
        first = store.device_id()
        assert check_device_id(first) == first
    with DeviceStore.open(tmp_path) as store:
        assert store.device_id() == first
        (tmp_path / "device-id").write_text("not an id\n")
        with pytest.raises(ConfigError, match="device-id: cannot be used: 'not an id'"):
            store.device_id()


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "ä", "a" * 65, "a\n"])
def test_ids_that_are_none(name):
    with pytest.raises(ConfigError, match="is not a device id"):
        check_device_id(name)


def test_one_at_a_time(store):
    with pytest.raises(ConfigError, match="another splitfleet-edge"):
        DeviceStore.open(store.path)


def test_a_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--store"):
        DeviceStore.open(tmp_path / "file")


def test_a_digest_that_is_none_leads_nowhere(store):
    with pytest.raises(InvalidInputError, match="not a bundle digest"):
        store.bundle("../..")
    with pytest.raises(InvalidInputError, match="not a SHA-256"):
        store.blob("../../x", lambda path: path.write_bytes(b""))


def test_the_default_place(monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.delenv("SPLITFLEET_EDGE_STORE", raising=False)
    assert default_store() == Path("/data/splitfleet-edge")
    monkeypatch.setenv("SPLITFLEET_EDGE_STORE", "/mnt/store")
    assert default_store() == Path("/mnt/store")
