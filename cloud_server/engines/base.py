"""The contract of a tail engine: load, warm, run a batch, close.

An engine computes; it does not queue, check features or know of requests. Which tails are loaded, and whose turn it
is, is decided in :mod:`cloud_server.tails`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy.typing as npt

from edge_sdk.bundle import Bundle
from edge_sdk.resources import Machine

Arrays = Mapping[str, npt.NDArray[Any]]
# A batch of a few samples does not keep more threads busy than this.
_MOST_THREADS = 8


def engine_threads() -> int:
    """How many threads an engine has at most: one for each core that this process may use, within reason."""
    return min(Machine().cores(), _MOST_THREADS)


class TailEngine(ABC):
    """One loaded tail. Its methods are called from one thread at a time, not always the same one.

    An engine may start threads of its own; these inherit the priority of the thread that loads it.
    """

    name: ClassVar[str]
    reason: str = ""
    """Why it is this engine that runs the tail, for the log and for whoever asked for the load."""

    @classmethod
    @abstractmethod
    def load(cls, bundle: Bundle) -> Self:
        """The tail in ``bundle``, whose files are verified.

        Raises :class:`~edge_sdk.errors.BundleError` when the files hold no such tail.
        """

    @abstractmethod
    def warm(self, features: Arrays) -> None:
        """Run ``features`` until a further run is as fast as runs get."""

    @abstractmethod
    def run(self, features: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Outputs of a batch, by signature key (``output_j``), first axis as long as that of ``features``.

        ``features`` are read-only arrays (batch, *shape) by signature key (``feature_i``), names, dtypes and shapes as
        the manifest says. Any exception means that this batch failed; the tail stays usable.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; nothing else is called afterwards."""
