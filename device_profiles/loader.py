"""Finds profiles: in directories of the user first, then among those that are shipped."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from device_profiles.document import read_document
from device_profiles.schema import Profile
from edge_sdk.errors import ConfigError

SHIPPED = Path(__file__).parent / "profiles"
SUFFIXES = (".yaml", ".yml", ".json")


def search_path(directories: Iterable[Path | str] = ()) -> list[Path]:
    """Where profiles are looked for: ``directories``, then ``$SPLITFLEET_PROFILES``, then the shipped ones.

    Raises :class:`ConfigError` for one that is no directory.
    """
    named = [Path(directory) for directory in directories]
    named += [Path(part) for part in os.environ.get("SPLITFLEET_PROFILES", "").split(os.pathsep) if part]
    for directory in named:
        if not directory.is_dir():
            raise ConfigError(f"{directory}: is no directory with profiles (--profiles-dir or $SPLITFLEET_PROFILES)")
    return [*named, SHIPPED]


def _files(directories: Iterable[Path | str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for directory in search_path(directories):
        for path in sorted(directory.iterdir()):
            if path.suffix in SUFFIXES and path.is_file():
                found.setdefault(path.stem, path)
    return found


def names(directories: Iterable[Path | str] = ()) -> list[str]:
    """Names of all profiles, sorted. A user's file shadows a shipped one of the same name."""
    return sorted(_files(directories))


def load(name_or_path: str | Path, directories: Iterable[Path | str] = ()) -> Profile:
    """The profile of that name, or in that file (anything with a directory or one of the suffixes).

    Raises :class:`ConfigError` naming file, line and key of what is wrong, or the names there are.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or os.sep in text or text.endswith(SUFFIXES):
        return read_document(name_or_path).build(Profile)
    files = _files(directories)
    if text not in files:
        raise ConfigError(f"there is no profile {text!r}; there are: {', '.join(sorted(files))}")
    document = read_document(files[text])
    profile = document.build(Profile)
    if profile.name != text:
        raise ConfigError(
            document.complaint(("name",), f"must be the file's name, {text!r}; received {profile.name!r}")
        )
    return profile
