"""Who is told how an allocation goes on. The base class hears all and says nothing."""

from __future__ import annotations

from collections.abc import Sequence

from cloud_server.allocation.settings import AllocationSettings
from cloud_server.allocation.trial import Draw, Trial
from edge_sdk.protocol import DeviceState


class Observer:
    """Override what is of interest. Methods are called from several threads and must be quick."""

    def waiting(self) -> None:
        """No device is there yet."""

    def run_started(
        self, run_id: int, settings: AllocationSettings, devices: Sequence[DeviceState], models: Sequence[str]
    ) -> None:
        """The run is in the registry; ``devices`` are those online now."""

    def round_started(self, number: int, draws: Sequence[Draw]) -> None:
        """These are tried in this round."""

    def trial_started(self, draw: Draw) -> None:
        """A draw of the round, or another one in place of one that does not fit."""

    def progress(self, device_id: str, doing: str) -> None:
        """What is being done for a device now, in a few words."""

    def trial_ended(self, trial: Trial) -> None:
        """A trial was judged."""

    def phase_started(self, name: str) -> None:
        """Something after the rounds: the test set, the baselines."""

    def warned(self, message: str) -> None:
        """Something that the user should know and that stops nothing."""
