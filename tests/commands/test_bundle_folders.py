"""Where `splitfleet split` may put a bundle: found out before anything is converted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloud_server.bundle_copy import check_free
from edge_sdk.errors import ConfigError


def test_a_new_or_an_empty_folder_is_free(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "new", tmp_path / "several" / "levels" / "deep"):
        check_free(folder)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path, told in ((tmp_path, "is not empty"), (tmp_path / "file", "is a file"), (tmp_path / "dangling", "file")):
        with pytest.raises(ConfigError, match=told):
            check_free(path)


def test_what_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, told in ((tmp_path / "file" / "deep", "Not a directory"), (tmp_path / ("x" * 300), "name too long")):
        with pytest.raises(ConfigError, match=f"the bundle cannot be written there .*{told}"):
            check_free(path)


def test_a_folder_that_may_not_be_written_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever runs the tests may be allowed everything.
    asked = []
    monkeypatch.setattr(os, "access", lambda *arguments: asked.append(arguments))
    with pytest.raises(ConfigError, match="Permission denied"):
        check_free(tmp_path / "several" / "levels")
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]
