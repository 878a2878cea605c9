"""Tasks and models that users bring: what is taken in, what is refused, and what is left of it when it is removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from cloud_server.home import Home

Command = Callable[..., Result]
Document = Callable[..., Any]
Told = Callable[..., str]


@pytest.fixture
def task(document: Document, files: Path) -> str:
    """The task of the tests, without models."""
    document("tasks", "add", "halves", *sets(files), "--test", files / "test.npz")
    return "halves"


def sets(folder: Path, **other: Path) -> tuple[object, ...]:
    """The options that name the sets, of which a test may replace one."""
    named = {name: other.get(name, folder / f"{name}.npz") for name in ("validation", "calibration")}
    return tuple(part for name, path in named.items() for part in (f"--{name}", path))


def test_a_task_is_listed_beside_the_zoo_s(task: str, document: Document, splitfleet: Command) -> None:
    listed = document("tasks", "list")["tasks"]
    assert [(each["name"], each["from"]) for each in listed] == [("fashion-mnist", "zoo"), ("halves", "user")]
    shown = document("tasks", "show", task)
    assert shown == listed[1]
    assert shown["inputs"] == {"picture": {"shape": [8, 8, 1], "dtype": "float32"}}
    assert (shown["validation_samples"], shown["calibration_samples"], shown["test_samples"]) == (60, 40, 50)
    assert shown["classes"] == 2
    assert "halves" in splitfleet("tasks", "list").stdout
    assert "picture 8×8×1 float32" in splitfleet("tasks", "show", task).stdout


def test_a_model_is_added_shown_and_removed(
    task: str, document: Document, splitfleet: Command, files: Path, home: Path
) -> None:
    added = document("models", "add", "mine", files / "narrow.keras", "--task", task)
    assert document("models", "show", "mine") == added
    assert (added["source"], added["operations"], added["parameters"]) == ("registry:mine", 5, 76)
    listed = document("models", "list")["models"]
    assert {each["from"] for each in listed} == {"zoo", "user"}
    assert document("models", "list", "--task", task)["models"] == [added]
    assert "registry:mine" in splitfleet("models", "list").stdout
    assert added["file_sha256"] in splitfleet("models", "show", "mine").stdout
    assert document("tasks", "show", task)["models"] == ["mine"]
    assert document("cuts", "registry:mine")["operations"] == 5
    library = Home.at(home).library
    assert list(library.rglob(f"{added['file_sha256']}*"))

    assert document("models", "remove", "mine") == {"removed": "mine"}
    assert document("models", "list", "--task", task)["models"] == []
    assert not list(library.rglob(f"{added['file_sha256']}*"))


def test_a_name_is_free_again_once_it_is_removed(task: str, document: Document, error: Told, files: Path) -> None:
    again = ("tasks", "add", task, *sets(files))
    assert "there is a task 'halves' already" in error(*again)
    document("models", "add", "mine", files / "narrow.keras", "--task", task)
    assert "there is a model 'mine' already" in error("models", "add", "mine", files / "wide.keras", "--task", task)
    assert "has the models mine; remove them first" in error("tasks", "remove", task)
    document("models", "remove", "mine")
    document("tasks", "remove", task)
    assert "there is no task 'halves'" in error("tasks", "show", task)
    document(*again)
    assert document("tasks", "show", task)["test_samples"] is None


def test_a_model_may_join_a_task_of_the_zoo(error: Told, files: Path) -> None:
    message = error("models", "add", "mine", files / "narrow.keras", "--task", "fashion-mnist")
    assert "its input 'image' takes samples of shape [8, 8, 1], the data of the task 'fashion-mnist' has" in message
    assert "there is a model 'mobile' already" in error(
        "models", "add", "mobile", files / "narrow.keras", "--task", "fashion-mnist"
    )


PICTURES = np.linspace(0, 1, 20 * 64, dtype=np.float32).reshape(20, 8, 8, 1)
LABELS = np.arange(20) % 2


@pytest.mark.parametrize(
    ("which", "arrays", "told"),
    [
        ("validation", {"picture": PICTURES}, "has no array 'labels'; it has: picture"),
        ("validation", {"labels": LABELS}, "has no inputs"),
        ("validation", {"picture": PICTURES, "labels": LABELS[:7]}, "the same number of samples"),
        ("validation", {"picture": PICTURES, "labels": LABELS / 2}, "must be whole numbers"),
        ("validation", {"picture": PICTURES, "labels": LABELS - 1}, "negative label -1"),
        ("validation", {"picture": PICTURES, "labels": np.eye(20)}, "must be whole numbers of shape"),
        ("validation", {"picture": PICTURES + np.float32("nan"), "labels": LABELS}, "NaN or infinity"),
        ("validation", {"picture": PICTURES.astype("U3"), "labels": LABELS}, "expected numbers"),
        ("validation", {"picture": PICTURES, "labels": LABELS.astype(object)}, "no .npz file of plain arrays"),
        ("calibration", {"image": PICTURES}, "has the inputs image; the validation set has picture"),
        ("calibration", {"picture": PICTURES[:, :4]}, "has samples of shape [4, 8, 1]"),
        ("calibration", {"picture": PICTURES * 255}, "preprocess both in the same way"),
        ("calibration", {"picture": PICTURES[:0]}, "at least one"),
    ],
)
def test_wrong_data_are_told_with_the_file(
    error: Told, files: Path, tmp_path: Path, which: str, arrays: dict[str, Any], told: str
) -> None:
    np.savez(tmp_path / "wrong.npz", **arrays)
    message = error("tasks", "add", "wrong", *sets(files, **{which: tmp_path / "wrong.npz"}))
    assert "wrong.npz" in message
    assert told in message


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"no archive at all" * 20])
def test_a_file_that_is_none_is_told(error: Told, files: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "wrong.npz").write_bytes(content)
    assert "no .npz file" in error("tasks", "add", "wrong", *sets(files, validation=tmp_path / "wrong.npz"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["../up"], "cannot be the name of a task"),
        (["fashion-mnist"], "there is a task 'fashion-mnist' already"),
        (["fine", "--metric", "beauty"], "there is no metric 'beauty'"),
        (["fine", "--test", "missing.npz"], "missing.npz: cannot be read"),
    ],
)
def test_a_task_that_cannot_be_is_told(error: Told, files: Path, arguments: list[str], told: str) -> None:
    assert told in error("tasks", "add", *arguments, *sets(files))


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("small.keras", "takes samples of shape"),
        ("missing.keras", "cannot be read"),
    ],
)
def test_a_model_of_another_task_is_refused(task: str, error: Told, files: Path, file: str, told: str) -> None:
    message = error("models", "add", "mine", files / file, "--task", task)
    assert told in message


def test_a_model_with_too_few_outputs_is_refused(document: Document, error: Told, files: Path, tmp_path: Path) -> None:
    with np.load(files / "validation.npz") as known:
        np.savez(tmp_path / "three.npz", picture=known["picture"], labels=known["labels"] + 1)
    document("tasks", "add", "thirds", *sets(files, validation=tmp_path / "three.npz"))
    message = error("models", "add", "mine", files / "narrow.keras", "--task", "thirds")
    assert "needs one number for each of its 3 classes" in message


def test_an_unknown_task_or_model_is_told_with_those_there_are(task: str, error: Told, files: Path) -> None:
    assert f"the tasks are: fashion-mnist, {task}" in error("models", "add", "m", files / "narrow.keras", "--task", "x")
    assert "the registry has no model 'x'" in error("models", "remove", "x")
    assert "the tasks are: fashion-mnist" in error("models", "list", "--task", "x")
