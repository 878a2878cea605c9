"""The versions of what makes a bundle. They are part of every cache key: another converter, another head."""

from __future__ import annotations

from importlib import metadata

PACKAGES = ("splitfleet", "tensorflow", "keras", "numpy")


def versions() -> dict[str, str]:
    """Package -> version, without importing any of them. One that runs from its source tree is ``source``."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "source"
    return found
