"""Paths that are no plain files: pipes and devices, which would be waited for or never end, and folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Told = Callable[..., str]

PIPE = "is a pipe or a device"


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe that nobody writes to."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_pipe_is_no_model(error: Told, pipe: Path) -> None:
    assert PIPE in error("cuts", pipe)
    assert PIPE in error("cuts", "/dev/zero")
    assert PIPE in error("models", "add", "mine", pipe, "--task", "fashion-mnist")


def test_a_pipe_is_no_data(error: Told, files: Path, bundle: Path, pipe: Path, tmp_path: Path) -> None:
    assert PIPE in error(
        "split", files / "narrow.keras", "--cut", "1", "--calibration", pipe, "--out", tmp_path / "out"
    )
    assert PIPE in error("verify", bundle, "--data", pipe)
    for name in ("validation", "calibration", "test"):
        sets = {each: files / f"{each}.npz" for each in ("validation", "calibration", "test")} | {name: pipe}
        options = [word for each, path in sets.items() for word in (f"--{each}", path)]
        assert PIPE in error("tasks", "add", "halves", *options)


def test_a_pipe_is_no_manifest(error: Told, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    assert PIPE in error("verify", tmp_path)


def test_a_folder_is_no_model(error: Told, tmp_path: Path) -> None:
    assert "is a folder; expected a .keras or a legacy .h5/.hdf5 file" in error("cuts", tmp_path)
    (tmp_path / "saved_model.pb").touch()
    assert "is a TensorFlow SavedModel; expected" in error("cuts", tmp_path)


def test_a_folder_is_no_data(error: Told, files: Path, bundle: Path, tmp_path: Path) -> None:
    split = ("split", files / "narrow.keras", "--cut", "1", "--out", tmp_path / "out")
    assert "it is a folder" in error(*split, "--calibration", tmp_path)
    assert "is a directory" in error("verify", bundle, "--data", tmp_path)


def test_another_archive_is_no_data(error: Told, files: Path, bundle: Path) -> None:
    message = error("verify", bundle, "--data", files / "narrow.keras")
    assert "narrow.keras: is no .npz file of plain arrays (it holds 'metadata.json', which is no array)" in message
