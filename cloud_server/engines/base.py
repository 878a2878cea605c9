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

Arrays = Mapping[str, npt.NDArray[Any]]


class TailEngine(ABC):
    """One loaded tail. Its methods are called from one thread at a time, not always the same one."""

    name: ClassVar[str]

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
