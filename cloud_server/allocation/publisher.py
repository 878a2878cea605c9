"""Which bundles of a run the server holds: each is published once, and unloaded when no allocation uses it."""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future

from cloud_server.allocation.fleet import Fleet
from edge_sdk.bundle import Bundle


class Publisher:
    """Publishes over a fleet. Thread-safe."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()
        self._published: dict[str, Future[None]] = {}

    def publish(self, bundle: Bundle) -> None:
        """Return when the bundle is in the repository and its tail is warm; who comes second waits for the first.

        Raises what :meth:`Fleet.publish` raises; the next one tries again.
        """
        with self._lock:
            future = self._published.get(bundle.digest)
            mine = future is None
            if future is None:
                future = self._published[bundle.digest] = Future()
        if mine:
            try:
                self._fleet.publish(bundle)
            except BaseException as error:
                with self._lock:
                    del self._published[bundle.digest]
                future.set_exception(error)
            else:
                future.set_result(None)
        future.result()

    def unload_all_but(self, used: Collection[str], *, more: Collection[str] = ()) -> None:
        """Unload the tails of what was published, and of ``more``, that are not in ``used``."""
        for digest in sorted((self._published.keys() | set(more)) - set(used)):
            self._fleet.unload(digest)
            self._published.pop(digest, None)
