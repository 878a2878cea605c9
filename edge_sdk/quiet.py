"""Keeps what a library announces as it starts off the terminal, where C++ code writes it past ``sys.stderr``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Lock
from typing import BinaryIO

_turn = Lock()


@contextmanager
def without_lines(beginning: bytes) -> Iterator[None]:
    """Keep lines of that ``beginning`` off file descriptor 2; all else that is written to it comes out at the end.

    It is everybody's descriptor, so one at a time, and for as short as can be. Does nothing where the system has no
    files in memory, or the process no such descriptor.
    """
    with _turn, ExitStack() as stack:
        with suppress(OSError, AttributeError):
            caught = stack.enter_context(os.fdopen(os.memfd_create("stderr"), "rb"))
            kept = stack.enter_context(os.fdopen(os.dup(2), "wb", buffering=0))
            os.dup2(caught.fileno(), 2)
            stack.callback(_give_back, caught, kept, beginning)
        yield


def _give_back(caught: BinaryIO, kept: BinaryIO, beginning: bytes) -> None:
    os.dup2(kept.fileno(), 2)
    caught.seek(0)
    for line in caught:
        if not line.startswith(beginning):
            kept.write(line)
