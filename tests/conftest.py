"""Settings of all tests."""

from __future__ import annotations

from importlib.util import find_spec

# The environment of the second TFLite runtime holds only what its tests need.
if find_spec("hypothesis") is not None:
    from hypothesis import settings

    # A deadline is a stopwatch: on a shared machine it fails for no fault of ours.
    settings.register_profile("splitfleet", deadline=None)
    settings.load_profile("splitfleet")
