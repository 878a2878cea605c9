"""Which cores the server and the clients have."""

from __future__ import annotations

import os
from dataclasses import dataclass

LAYOUTS = ("apart", "shared")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Cores by number."""

    name: str
    server: frozenset[int]
    clients: frozenset[int]


def layout(name: str) -> Layout:
    """``apart`` or ``shared``, on the first two cores that this process may use.

    Raises :class:`RuntimeError` when there is one only.
    """
    first, second, *_ = (*sorted(os.sched_getaffinity(0)), None, None)
    if first is None or second is None:
        raise RuntimeError("the benchmark takes two cores, this process may use one")
    if name == "apart":
        return Layout(name=name, server=frozenset({first}), clients=frozenset({second}))
    both = frozenset({first, second})
    return Layout(name=name, server=both, clients=both)
