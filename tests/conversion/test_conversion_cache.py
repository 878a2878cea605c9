"""The cache: what was made is found again, what is damaged is made anew, two at once do it once."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from converters.cache import Cache, Known, bundle_key
from converters.graph import Graph, Operation, TensorInfo
from converters.outline import Outline
from converters.precision import Attempt
from converters.recipe import Recipe
from edge_sdk.bundle import file_sha256
from edge_sdk.errors import StorageError
from edge_sdk.manifest import Cut, FileEntry, InputSpec, Manifest, ModelRef, OutputSpec

KEY = "a" * 64


def recipe(**changes):
    return dataclasses.replace(
        Recipe(task="task", model_name="model", load=dict, calibration=dict, fingerprint="one"), **changes
    )


def known(**changes):
    tensors = tuple(TensorInfo(name=name, source=name, shape=(2,), dtype="float32") for name in ("x", "op"))
    graph = Graph(
        name="model",
        tensors=tensors,
        inputs=(0,),
        operations=(Operation(name="op", kind="Any", layer=0, parameters=1, inputs=(0,), outputs=(1,)),),
        outputs=(1,),
        output_names=("op",),
    )
    outline = Outline.of(graph, changes.pop("model_sha256", "0" * 64))
    return Known(outline=outline, calibration_sha256=changes.pop("calibration_sha256", "1" * 64))


def build(folder: Path, text: str = "a head") -> None:
    """A minimal edge-only bundle."""
    (folder / "head.tflite").write_text(text)
    manifest = Manifest(
        task="task",
        model=ModelRef(name="model", sha256="0" * 64),
        cut=Cut(k=1, n=1, name="op"),
        precision="int8",
        inputs=(InputSpec(name="x", shape=(2,), dtype="float32", scale=1.0, zero_point=0),),
        crossing=(),
        outputs=(OutputSpec(name="op", side="head", shape=(2,), dtype="float32", scale=1.0, zero_point=0),),
        files=(FileEntry(path="head.tflite", sha256=file_sha256(folder / "head.tflite"), size_bytes=len(text)),),
        self_check=None,
        cumulative_bytes=3,
    )
    (folder / "manifest.json").write_bytes(manifest.canonical())


def never(folder: Path) -> None:
    raise AssertionError(f"built again: {folder}")


@pytest.fixture
def cache(tmp_path):
    return Cache(folder=tmp_path / "cache")


def test_a_bundle_is_made_once(cache):
    assert cache.bundle(KEY) is None
    folder = cache.make_bundle(KEY, build)
    assert cache.bundle(KEY) == folder
    assert cache.make_bundle(KEY, never) == folder


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "head.tflite").write_text("a heaD"),
        lambda folder: (folder / "head.tflite").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"),
        lambda folder: (folder / "manifest.json").unlink(),
    ],
    ids=["altered", "file gone", "manifest cut", "manifest binary", "manifest gone"],
)
def test_a_damaged_bundle_is_made_anew(cache, damage):
    folder = cache.make_bundle(KEY, build)
    damage(folder)
    assert cache.bundle(KEY) is None
    assert cache.make_bundle(KEY, build) == folder
    assert cache.bundle(KEY) == folder


def test_a_build_that_fails_leaves_nothing(cache):
    def fail(folder):
        (folder / "head.tflite").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cache.make_bundle(KEY, fail)
    assert cache.bundle(KEY) is None
    assert list((cache.folder / "bundles").iterdir()) == []


def test_what_a_dead_process_left_is_no_obstacle(cache):
    left = cache.folder / "bundles" / f"{KEY}.unfinished"
    left.mkdir(parents=True)
    (left / "rubbish").write_text("x")
    folder = cache.make_bundle(KEY, build)
    assert sorted(path.name for path in folder.iterdir()) == ["head.tflite", "manifest.json"]
    assert not left.exists()


def _racer(cache, ready, go, count):
    def counted(folder):
        with count.get_lock():
            count.value += 1
        build(folder)

    ready.release()
    go.wait()
    assert cache.make_bundle(KEY, counted) == cache.bundle(KEY)


def test_two_processes_and_two_threads_build_once(cache):
    context = multiprocessing.get_context("fork")
    ready, go, count = context.Semaphore(0), context.Event(), context.Value("i", 0)
    racers = [context.Process(target=_racer, args=(cache, ready, go, count)) for _ in range(2)]
    for racer in racers:
        racer.start()
    threads = [threading.Thread(target=_racer, args=(cache, ready, go, count)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        ready.acquire()
    go.set()
    for each in (*racers, *threads):
        each.join()
    assert [racer.exitcode for racer in racers] == [0, 0]
    assert count.value == 1


def test_outlines_are_found_by_the_fingerprint(cache):
    assert cache.known(recipe()) is None
    cache.remember(recipe(), known())
    assert cache.known(recipe()) == known()
    assert cache.known(recipe(fingerprint="two")) is None
    assert cache.known(recipe(model_name="other")) is None


def test_without_a_fingerprint_nothing_is_remembered(cache):
    cache.remember(recipe(fingerprint=None), known())
    assert cache.known(recipe(fingerprint=None)) is None
    assert not cache.folder.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", json.dumps({"outline": "{}", "calibration_sha256": ""})])
def test_a_damaged_outline_is_not_there(cache, text):
    cache.remember(recipe(), known())
    (path,) = (cache.folder / "outlines").iterdir()
    path.write_text(text)
    assert cache.known(recipe()) is None


FIRST = Attempt(k=1, precision="int8")


def test_a_key_follows_all_that_determines_a_bundle(monkeypatch):
    keys = {
        bundle_key(recipe(), known(), FIRST),
        bundle_key(recipe(), known(), Attempt(k=2, precision="int8")),
        bundle_key(recipe(), known(), Attempt(k=1, precision="float16")),
        bundle_key(recipe(), known(), Attempt(k=1, precision="int8", max_error=0.2)),
        bundle_key(recipe(), known(), Attempt(k=1, precision="int8", before="int4: none")),
        bundle_key(recipe(task="other"), known(), FIRST),
        bundle_key(recipe(model_name="other"), known(), FIRST),
        bundle_key(recipe(), known(model_sha256="2" * 64), FIRST),
        bundle_key(recipe(), known(calibration_sha256="2" * 64), FIRST),
    }
    assert bundle_key(recipe(fingerprint=None), known(), FIRST) in keys
    monkeypatch.setattr("converters.cache.versions", lambda: {"tensorflow": "0"})
    keys.add(bundle_key(recipe(), known(), FIRST))
    assert len(keys) == 10


def test_why_a_bundle_cannot_be_made_is_kept(cache):
    assert cache.refusal(KEY) == ""
    cache.refuse(KEY, "no such kernel – none")
    assert cache.refusal(KEY) == "no such kernel – none"
    assert cache.refusal("b" * 64) == ""
    assert cache.bundle(KEY) is None


def full_disk(folder: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "head.tflite"))


def test_a_full_disk_is_told_and_leaves_nothing(cache):
    with pytest.raises(StorageError, match=r"head\.tflite: the folder of conversions cannot be used \(No space left"):
        cache.make_bundle(KEY, full_disk)
    assert cache.bundle(KEY) is None
    assert list((cache.folder / "bundles").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("locks", lambda cache: cache.make_bundle(KEY, build)),
        ("bundles", lambda cache: cache.make_bundle(KEY, build)),
        ("outlines", lambda cache: cache.remember(recipe(), known())),
        ("refusals", lambda cache: cache.refuse(KEY, "why")),
    ],
)
def test_a_folder_that_is_none_is_told(cache, name, use):
    cache.folder.mkdir()
    (cache.folder / name).touch()
    with pytest.raises(StorageError, match="cannot be used"):
        use(cache)
