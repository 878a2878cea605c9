"""Profiles: the facts of device kinds, as YAML files with their sources, and how to read them."""

from device_profiles.loader import load, names
from device_profiles.schema import Link, Profile

__all__ = ["Link", "Profile", "load", "names"]
