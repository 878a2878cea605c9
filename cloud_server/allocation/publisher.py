"""Which bundles of a run the server holds: each is published once, and unloaded when no allocation uses it.

Another allocator on the same server may unload a tail that this run is still at: it is published once more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TypeVar

from cloud_server.allocation.fleet import Fleet
from edge_sdk.bundle import Bundle
from edge_sdk.errors import SplitfleetError, UnknownBundleError

T = TypeVar("T")


class Publisher:
    """Publishes over a fleet. Thread-safe."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()
        self._closed = False
        self._published: dict[str, Future[None]] = {}

    def publish(self, bundle: Bundle) -> None:
        """Return when the bundle is in the repository and its tail is warm; who comes second waits for the first.

        Raises what :meth:`Fleet.publish` raises; the next one tries again.
        """
        with self._lock:
            if self._closed:
                raise SplitfleetError("the run is being ended: nothing more is published")
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

    def using(self, bundle: Bundle, action: Callable[[], T]) -> T:
        """What ``action`` returns with the bundle published; it is done again, once, if the server lost the tail."""
        self.publish(bundle)
        with self._lock:
            published = self._published.get(bundle.digest)
        try:
            return action()
        except UnknownBundleError:
            with self._lock:
                # Unless another device noticed first, and it is published anew already.
                if self._published.get(bundle.digest) is published:
                    self._published.pop(bundle.digest, None)
            self.publish(bundle)
            return action()

    def close(self) -> None:
        """Publish nothing more; what is published can still be unloaded."""
        with self._lock:
            self._closed = True

    def unload_all_but(self, used: Collection[str], *, more: Collection[str] = ()) -> None:
        """Unload the tails of what was published, and of ``more``, that are not in ``used``."""
        with self._lock:
            published = set(self._published)
        for digest in sorted((published | set(more)) - set(used)):
            self._fleet.unload(digest)
            with self._lock:
                self._published.pop(digest, None)
