"""The sign of life of a run, over a registry that has its troubles."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cloud_server.allocation.lease import Lease
from edge_sdk.errors import ConfigError, RegistryUnreachableError, SplitfleetError


@pytest.mark.parametrize(
    "trouble", [RegistryUnreachableError("locked"), ConfigError("malformed"), SplitfleetError("?")]
)
def test_a_registry_in_trouble_is_asked_again(monkeypatch: pytest.MonkeyPatch, trouble: SplitfleetError) -> None:
    monkeypatch.setattr("cloud_server.allocation.lease.RENEW_EVERY_S", 0.001)
    told = threading.Event()

    class Troubled:
        asked = 0

        def renew_run(self, *_: Any, **__: Any) -> bool:
            self.asked += 1
            if self.asked < 3:
                raise trouble
            return False

    troubled: Any = Troubled()
    with Lease(troubled, 1, on_loss=told.set) as lease:
        assert told.wait(60)
    assert lease.lost
    assert troubled.asked == 3
