"""What a user sees while a command waits: a line on stderr, which moves in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cloud_server.cli.output import stderr


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say ``what`` is being waited for, until the block ends."""
    console = stderr()
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(f"{what} …")
        yield
