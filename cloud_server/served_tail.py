"""One tail as the server knows it: its queue, which worker has it, and what becomes of it when that one dies."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum

from cloud_server.batches import Batcher, BatchLimits, Done
from cloud_server.loop import Loop
from cloud_server.tail_signature import Features, TailSignature
from cloud_server.workers.worker import Loaded, Worker, death
from edge_sdk.errors import FeatureMismatchError, SplitfleetError, TailFailedError

# In so many deaths of its worker in a row a tail is taken for their cause.
MOST_DEATHS = 3


class State(Enum):
    """Of a tail that is served. While it comes its requests wait; one that is away comes with the next request."""

    COMING = "coming"
    READY = "ready"
    AWAY = "away"
    FAILED = "failed"


class ServedTail:
    """The tail of bundle ``digest``. It is coming until :meth:`arrive`."""

    def __init__(self, digest: str, limits: BatchLimits, loop: Loop) -> None:
        self.digest = digest
        self.batcher = Batcher(f"tail {digest[:12]}", limits, loop)
        self.state = State.COMING
        self.worker: Worker | None = None
        self.loaded: Loaded | None = None
        self.arrived_at = 0.0
        self.used_at = 0.0
        # Why it is not served, once it failed.
        self.failure = ""
        self._loop = loop
        self._signature: TailSignature | None = None
        self._deaths = 0
        self._completed = 0

    def submit(self, caller: Hashable, features: Features, *, begin: Callable[[], None], done: Done) -> None:
        """Queue a request. Raises :class:`TailFailedError`, and what :meth:`TailSignature.check` and
        :meth:`Batcher.submit` do.
        """
        if self.state is State.FAILED:
            raise TailFailedError(self.failure)
        if self._signature is not None:
            self._signature.check(features)
        self.used_at = self._loop.clock()
        self.batcher.submit(caller, features, begin=begin, done=done)

    def know(self, signature: TailSignature) -> None:
        """What it takes is known: of what waits, the rest is refused."""
        if self._signature is None:
            self._signature = signature

            def mismatch(features: Features) -> Exception | None:
                try:
                    signature.check(features)
                except FeatureMismatchError as error:
                    return error
                return None

            self.batcher.refuse(mismatch)

    def arrive(self, worker: Worker, loaded: Loaded, signature: TailSignature) -> None:
        """A worker has loaded it."""
        self.know(signature)
        self.worker, self.loaded = worker, loaded
        self.state = State.READY
        self.arrived_at = self.used_at = self._loop.clock()
        self.batcher.attach(loaded.line.run)

    def leave(self) -> None:
        """It makes room for others; nothing of it is under way."""
        self.state = State.AWAY
        self.worker = self.loaded = None
        self.batcher.detach(RuntimeError("nothing is under way"))

    def lose(self, worker: Worker, ending: str) -> None:
        """Its worker died: what it was at fails, what waits goes on waiting, unless this happens again and again."""
        if self.state is not State.READY:
            return
        self.state = State.COMING
        self.loaded = None
        was_running = self.batcher.running
        if self.batcher.completed > self._completed:
            self._deaths = 0
            self._completed = self.batcher.completed
        self.batcher.detach(death(worker, ending, f"was running the tail of bundle {self.digest[:12]}"))
        if was_running:
            self.suspect(worker, ending)

    def suspect(self, worker: Worker, ending: str) -> None:
        """Its worker died of it, perhaps."""
        self._deaths += 1
        if self._deaths >= MOST_DEATHS:
            self.fail(
                f"the tail of bundle {self.digest[:12]} was under way {self._deaths} times in a row as its worker died "
                f"(at last {worker} {ending}), so it is not served until it is loaded anew"
            )

    def fail(self, reason: str) -> None:
        """Refuse its requests from now on."""
        self._deaths = 0
        self.state = State.FAILED
        self.failure = reason
        self.worker = self.loaded = None
        self.refuse(TailFailedError(reason))

    def refuse(self, error: SplitfleetError) -> None:
        """End all that waits."""
        self.batcher.refuse(lambda _: error)
