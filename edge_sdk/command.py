"""What both command lines share: commands that are imported when called, and errors without a traceback.

``--help`` answers fast because a command's module is imported only when that command runs or is asked for help.
"""

from __future__ import annotations

import importlib
import io
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from edge_sdk.endpoints import check_endpoint
from edge_sdk.errors import SplitfleetError
from edge_sdk.sizes import parse_size

DEBUG_VARIABLE = "SPLITFLEET_DEBUG"
CLOUD_MODULES = frozenset({"alembic", "keras", "pydantic", "rich", "sqlalchemy", "tensorflow", "yaml"})


class LazyGroup(click.Group):
    """A group whose commands are ``name -> ("module:attribute", short help)``."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self._lazy:
            return None
        module, attribute = self._lazy[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._lazy[name][1]) for name in sorted(self._lazy)])


def keys_options(function: Any) -> Any:
    """Add ``--key`` and ``--server-key``; the command gets ``key`` and ``server_key``, for ``CurveKeys.load_both``."""
    path = click.Path(dir_okay=False, path_type=Path)
    server_key = click.option(
        "--server-key", metavar="FILE", type=path, help="Public key of the server, where it has CURVE on."
    )
    return click.option("--key", metavar="FILE", type=path, help="Own secret key, for a server with CURVE on.")(
        server_key(function)
    )


class FiniteRange(click.FloatRange):
    """A range of numbers that NaN, which is neither below nor above anything, is no part of."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class CheckedText(click.ParamType[str]):
    """Text that ``check`` takes; what it raises for another is told as a wrong option."""

    def __init__(self, name: str, check: Callable[[str], str]) -> None:
        self.name = name
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return self._check(str(value))
        except SplitfleetError as error:
            self.fail(error.message, param, ctx)


ENDPOINT = CheckedText("endpoint", check_endpoint)


class SizeType(click.ParamType[int]):
    """A click parameter such as ``8MB``; its value is in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except SplitfleetError as error:
            self.fail(error.message, param, ctx)


def run(command: click.Command, program: str) -> None:
    """Run ``command`` on ``sys.argv`` and exit: an error becomes one line on stderr and its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A path need not be text, and not every terminal knows every letter.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        command.main(prog_name=program, standalone_mode=True)
    except SplitfleetError as error:
        fail(error.message, error.exit_code)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in CLOUD_MODULES:
            _unforeseen(error, program)
        fail(
            f"{program} needs the package {missing!r}, which the extra 'cloud' brings: "
            "pip install '.[cloud]' in a clone",
            1,
        )
    except (MemoryError, OSError) as error:
        # What the machine lacks is no fault of the program.
        if os.environ.get(DEBUG_VARIABLE):
            raise
        fail(_of_the_machine(error), 1)
    except Exception as error:
        _unforeseen(error, program)


def _of_the_machine(error: MemoryError | OSError) -> str:
    if isinstance(error, MemoryError):
        return f"the memory of this machine does not suffice{f' ({error})' if str(error) else ''}"
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else reason


def _unforeseen(error: Exception, program: str) -> None:
    if os.environ.get(DEBUG_VARIABLE):
        raise error
    fail(
        f"{program} failed in an unforeseen way, {type(error).__name__}: {error}. This is a fault of splitfleet: "
        f"please report it with what {DEBUG_VARIABLE}=1 in the environment shows",
        1,
    )


def fail(message: str, exit_code: int) -> None:
    """Print ``message`` to stderr and exit."""
    click.echo(f"error: {printable(message)}", err=True)
    sys.exit(exit_code)


def printable(text: str) -> str:
    """``text`` with its control characters written out, but line feeds: names come from strangers' files, and a
    terminal does what such a character tells it.
    """
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
