"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# A deadline is a stopwatch: on a shared machine it fails for no fault of ours.
settings.register_profile("splitfleet", deadline=None)
settings.load_profile("splitfleet")
