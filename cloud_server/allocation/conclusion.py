"""What follows the rounds: the test set, the floating point beside it, the baselines, and order on devices and server.

None of it changes an allocation: what goes wrong here is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from cloud_server.allocation.evaluator import Labelled, publish
from cloud_server.allocation.loop import Deployed, Loop
from cloud_server.allocation.means import Means
from edge_sdk.errors import PeerUnreachableError, RegistryUnreachableError, SplitfleetError

T = TypeVar("T")


class Conclusion:
    """The end of a run whose rounds are over."""

    def __init__(self, loop: Loop, means: Means) -> None:
        self._loop = loop
        self._fleet = means.fleet
        self._candidates = means.candidates
        self._registry = means.registry
        self._data = means.data
        self._observer = means.observer

    def measure_test(self, pool: ThreadPoolExecutor) -> None:
        """Accuracy of each accepted split on the test set, if there is one, and of its whole model on the validation
        set.
        """
        if not self._loop.accepted:
            return
        self._observer.phase_started("measuring the accepted models on the test set")
        floats = pool.submit(self._float_accuracies)
        if self._data.test is not None:
            test = publish(self._fleet, self._data.test)
            self._each(pool, self._loop.accepted.values(), "test set", partial(self._test, test))
        floats.result()

    def measure_baselines(self, pool: ThreadPoolExecutor) -> None:
        """Cloud-only beside each accepted split, then the split installed again.

        Edge-only needs no measuring: where the whole model fits the budget, the memory model has chosen just that.
        """
        splits = [deployed for deployed in self._loop.accepted.values() if deployed.bundle.manifest.has_head]
        if not splits:
            return
        self._observer.phase_started("measuring the baselines beside the accepted models")
        deployed = self._each(pool, splits, "cloud-only", self._deploy_cloud_only)
        self._loop.with_quiet_cores(pool, self._measure_cloud_only, deployed)
        self._each(pool, splits, "installing the split again", self._install_again)

    def restore(self, device_ids: Iterable[str]) -> None:
        """Devices without an accepted trial get back what the registry says that they have."""
        active = {each.device_id: each.bundle for each in self._registry.active_allocations()}
        for device_id in device_ids:
            if device_id in active:
                with self._warning(device_id, "installing its earlier allocation again"):
                    self._fleet.install(device_id, active[device_id])

    def unload(self, *, before: Iterable[str]) -> None:
        """Unload the tails that no allocation uses: of this run's trials, and of the allocations ``before`` it."""
        with self._warning("the server", "unloading tails"):
            self._loop.publisher.unload_all_but(self._registry.active_bundles(), more=set(before))

    def _test(self, test: Labelled, deployed: Deployed) -> None:
        measured = self._loop.measure_test(deployed, test)
        self._registry.record_test(deployed.trial_id, accuracy=measured.accuracy, samples=measured.samples)

    def _float_accuracies(self) -> None:
        """One model after another: a prediction takes all cores."""
        validation = self._data.validation
        for deployed in self._loop.accepted.values():
            name = deployed.bundle.manifest.model.name
            with self._warning(name, "accuracy in floating point"):
                scores = self._data.metric(self._candidates.predict(name, validation), validation.labels)
                self._registry.record_float_accuracy(deployed.trial_id, float(scores.mean()))

    def _deploy_cloud_only(self, split: Deployed) -> Deployed:
        bundle = self._candidates.build_cloud_only(split.bundle.manifest.model.name)
        return self._loop.deploy(split.device_id, split.trial_id, bundle)

    def _measure_cloud_only(self, deployed: Deployed) -> None:
        with self._warning(deployed.device_id, "cloud-only"):
            self._registry.add_baseline(
                deployed.trial_id,
                "cloud-only",
                bundle=deployed.bundle.digest,
                k=0,
                evaluation=self._loop.measure(deployed),
            )

    def _install_again(self, split: Deployed) -> None:
        self._fleet.install(split.device_id, split.bundle.digest)

    def _each(
        self,
        pool: ThreadPoolExecutor,
        items: Iterable[Deployed],
        what: str,
        action: Callable[[Deployed], T],
    ) -> list[T]:
        """``action`` of all items side by side; the results of those that did not fail."""

        def guarded(item: Deployed) -> list[T]:
            with self._warning(item.device_id, what):
                return [action(item)]
            return []

        return [result for results in pool.map(guarded, items) for result in results]

    @contextmanager
    def _warning(self, who: str, what: str) -> Iterator[None]:
        try:
            yield
        except (PeerUnreachableError, RegistryUnreachableError):
            raise
        except SplitfleetError as error:
            self._observer.warned(f"{who}: {what}: {error.message}")
