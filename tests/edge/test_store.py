"""The device's store: whole bundles or none, repair, what is kept and what goes."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, ConfigError, IntegrityError, PeerUnreachableError
from edge_sdk.store import BLOBS_KEPT, BUNDLES_KEPT, DeviceStore, check_device_id, default_store


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
    with pytest.raises(ConfigError, match="not a bundle digest"):
        store.bundle("../..")


def test_the_default_place(monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.delenv("SPLITFLEET_EDGE_STORE", raising=False)
    assert default_store() == Path("/data/splitfleet-edge")
    monkeypatch.setenv("SPLITFLEET_EDGE_STORE", "/mnt/store")
    assert default_store() == Path("/mnt/store")
