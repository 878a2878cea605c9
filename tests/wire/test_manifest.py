"""A manifest reads back as it was written, its digest is stable, and a wrong one is refused as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, IntegrityError
from edge_sdk.manifest import (
    CrossingSpec,
    Cut,
    FileEntry,
    InputSpec,
    Manifest,
    ModelRef,
    OutputSpec,
    SelfCheck,
    parse,
)

HEAD = FileEntry(path="head.tflite", sha256=hashlib.sha256(b"head").hexdigest(), size_bytes=4)
TAIL = FileEntry(path="tail/saved_model.pb", sha256=hashlib.sha256(b"tail").hexdigest(), size_bytes=4)
TAIL_TFLITE = FileEntry(path="tail.tflite", sha256=hashlib.sha256(b"lite").hexdigest(), size_bytes=4)
MANIFEST = Manifest(
    task="fashion-mnist",
    model=ModelRef(name="résnet", sha256="ab" * 32),
    cut=Cut(k=2, n=5, name="stage_1"),
    precision="int8",
    inputs=(InputSpec(name="image", shape=(28, 28, 1), dtype="float32", scale=1.0, zero_point=-128),),
    crossing=(
        CrossingSpec(name="feature_0", source="stage_1", shape=(7, 7, 8), dtype="int8", scale=0.1, zero_point=3),
    ),
    outputs=(OutputSpec(name="probabilities", side="tail", shape=(10,), dtype="float32"),),
    files=(HEAD, TAIL),
    self_check=SelfCheck(seed=1, expected={"feature_0": (1.0, -2.0)}),
    cumulative_bytes=4711,
    versions={"tensorflow": "2.21.0"},
)
EDGE_ONLY = dataclasses.replace(
    MANIFEST,
    cut=Cut(k=5, n=5, name="probabilities"),
    crossing=(),
    outputs=(OutputSpec(name="p", side="head", shape=(10,), dtype="float32", scale=0.5, zero_point=0),),
    files=(HEAD,),
)
CLOUD_ONLY = dataclasses.replace(
    MANIFEST,
    cut=Cut(k=0, n=5, name="image"),
    crossing=(
        CrossingSpec(name="feature_0", source="image", shape=(28, 28, 1), dtype="int8", scale=1.0, zero_point=-128),
    ),
    files=(TAIL,),
    self_check=None,
)


@pytest.mark.parametrize("manifest", [MANIFEST, EDGE_ONLY, CLOUD_ONLY])
def test_a_manifest_reads_back_as_it_was_written(manifest: Manifest) -> None:
    assert parse(manifest.canonical()) == manifest
    assert manifest.digest == hashlib.sha256(manifest.canonical()).hexdigest()


def test_the_digest_of_version_1_does_not_change() -> None:
    assert MANIFEST.digest == "70352c3d3487fd1de6ee885b32b4da5d5d43c88f55138b4ea37d069f3a4dcfbc"


def test_what_it_tells_of_its_halves() -> None:
    assert (MANIFEST.has_head, MANIFEST.has_tail, MANIFEST.feature_bytes) == (True, True, 392)
    assert (EDGE_ONLY.has_head, EDGE_ONLY.has_tail, EDGE_ONLY.feature_bytes) == (True, False, 0)
    assert (CLOUD_ONLY.has_head, CLOUD_ONLY.has_tail, CLOUD_ONLY.feature_bytes) == (False, True, 784)
    assert MANIFEST.head_files == (HEAD,)
    assert not MANIFEST.has_tail_tflite
    both = dataclasses.replace(MANIFEST, files=(HEAD, TAIL, TAIL_TFLITE))
    assert both.has_tail_tflite
    assert both.head_files == (HEAD,)


def test_an_edge_only_bundle_has_no_tail_in_any_form() -> None:
    with pytest.raises(BundleError, match=r"a tail\.tflite, but no output of a tail"):
        dataclasses.replace(EDGE_ONLY, files=(HEAD, TAIL_TFLITE))
    with pytest.raises(BundleError, match="tail_tflite_reason is for a tail"):
        dataclasses.replace(EDGE_ONLY, tail_tflite_reason="none")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema_version": 2}, "schema_version 2"),
        ({"cut": Cut(k=6, n=5, name="x")}, "k=6 of n=5"),
        ({"inputs": ()}, "inputs is empty"),
        ({"outputs": ()}, "outputs is empty"),
        ({"crossing": ()}, "come together or not at all"),
        ({"files": (TAIL,)}, "head.tflite"),
        ({"files": (HEAD,)}, "under tail/"),
        (
            {"files": (HEAD, TAIL, TAIL_TFLITE), "tail_tflite_reason": "none"},
            "tail_tflite_reason is for a tail without",
        ),
        ({"files": (HEAD, TAIL, TAIL)}, "listed twice"),
        ({"files": (HEAD, TAIL, dataclasses.replace(TAIL, path="tail/../../etc/passwd"))}, "plain relative path"),
        ({"files": (HEAD, TAIL, dataclasses.replace(TAIL, path="/etc/passwd"))}, "plain relative path"),
        ({"files": (HEAD, TAIL, dataclasses.replace(TAIL, path="manifest.json"))}, "plain relative path"),
        ({"files": (HEAD, dataclasses.replace(TAIL, sha256="xyz"))}, "not a SHA-256"),
        ({"files": (HEAD, dataclasses.replace(TAIL, size_bytes=-1))}, "negative size"),
        ({"model": ModelRef(name="x", sha256="AB" * 32)}, "not a SHA-256"),
        ({"crossing": (dataclasses.replace(MANIFEST.crossing[0], name="x"),)}, "must be named 'feature_0'"),
        ({"crossing": (dataclasses.replace(MANIFEST.crossing[0], dtype="object"),)}, "dtype 'object'"),
        ({"crossing": (dataclasses.replace(MANIFEST.crossing[0], shape=(0, 1)),)}, "shape"),
        ({"crossing": (dataclasses.replace(MANIFEST.crossing[0], zero_point=None),)}, "come together"),
        ({"crossing": (dataclasses.replace(MANIFEST.crossing[0], scale=-1.0),)}, "positive number"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BundleError, match=says):
        dataclasses.replace(MANIFEST, **changes)


def changed(path: str, value: Any) -> bytes:
    document = json.loads(MANIFEST.canonical())
    target = document
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in parents:
        target = target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "nested deeper"),
        (b"[]", "schema_version None"),
        (changed("schema_version", 99), "schema_version 99"),
        (changed("task", ...), "missing or unknown fields: 'task'"),
        (changed("taks", "x"), "'taks'"),
        (changed("task", 3), "manifest.task: expected str, got int"),
        (changed("cut.k", True), "manifest.cut.k: expected int, got bool"),
        (changed("cut", []), "manifest.cut: expected an object"),
        (changed("inputs", {}), "manifest.inputs: expected a list"),
        (changed("inputs.0.shape.1", "28"), r"manifest.inputs\[0\].shape\[1\]: expected int, got str"),
        (changed("precision", "int4"), "'int4' is not one of"),
        (changed("outputs.0.side", "middle"), "'middle' is not one of"),
        (changed("versions", []), "manifest.versions: expected an object"),
        (MANIFEST.canonical() + b"\n", "canonical"),
        (json.dumps(json.loads(MANIFEST.canonical())).encode(), "canonical"),
    ],
)
def test_a_wrong_document_is_refused_by_field(data: bytes, says: str) -> None:
    with pytest.raises(BundleError, match=says):
        parse(data)


@given(st.data())
def test_no_damage_goes_unnoticed(data: st.DataObject) -> None:
    """A flipped byte is refused, or changes the digest: it is never the same bundle."""
    damaged = bytearray(MANIFEST.canonical())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(BundleError):
        assert parse(bytes(damaged)).digest != MANIFEST.digest


def write_bundle(folder: Path) -> Bundle:
    (folder / "tail").mkdir(parents=True)
    (folder / "manifest.json").write_bytes(MANIFEST.canonical())
    (folder / "head.tflite").write_bytes(b"head")
    (folder / "tail" / "saved_model.pb").write_bytes(b"tail")
    return Bundle.open(folder)


def test_a_bundle_opens_and_verifies(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path)
    assert bundle.digest == MANIFEST.digest
    bundle.verify()


@pytest.mark.parametrize("name", ["head.tflite", "tail/saved_model.pb"])
@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read"), (b"hea", "has 3 bytes"), (b"daeh", "SHA-256 is")]
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    bundle = write_bundle(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(IntegrityError, match=says) as caught:
        bundle.verify()
    assert name in caught.value.message


def test_a_device_verifies_only_what_it_stores(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path)
    (tmp_path / "tail" / "saved_model.pb").unlink()
    bundle.verify(bundle.manifest.head_files)


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no bundle"):
        Bundle.open(tmp_path)
