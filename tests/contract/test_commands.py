"""How both command lines end: one line and an exit code, never a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import click
from edge_sdk.command import run
from edge_sdk.errors import InfeasibleError

@click.command()
def command():
    {body}

run(command, "splitfleet")
"""


def end_of(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize(
    ("body", "exit_code", "says"),
    [
        ("raise InfeasibleError('nothing fits')", 3, "error: nothing fits"),
        ("import tensorflow_that_is_missing", 1, "error: splitfleet failed in an unforeseen way, ModuleNotFoundError"),
        ("raise ModuleNotFoundError('x', name='sqlalchemy.orm')", 1, "pip install '.[cloud]'"),
        ("1 / 0", 1, "error: splitfleet failed in an unforeseen way, ZeroDivisionError"),
        ("raise PermissionError(13, 'Permission denied', 'there.npz')", 1, "error: there.npz: Permission denied\n"),
        ("raise MemoryError('4 TiB')", 1, "error: the memory of this machine does not suffice (4 TiB)\n"),
        ("raise InfeasibleError('a \\x1b[2J model')", 3, "error: a \\x1b[2J model\n"),
        ("raise KeyboardInterrupt", 1, "Aborted!"),
        ("raise click.UsageError('which?')", 2, "which?"),
    ],
)
def test_an_end_is_told_in_words(body: str, exit_code: int, says: str) -> None:
    result = end_of(body)
    assert result.returncode == exit_code
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_traceback_is_shown_to_whoever_asks_for_it() -> None:
    assert "ZeroDivisionError" in end_of("1 / 0", SPLITFLEET_DEBUG="1").stderr.splitlines()[-1]
