"""What is shown of strangers' files, and where there is no room or no such letter."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from cloud_server.cli import cli, output
from cloud_server.cli.output import Group, grouped_table, print_facts

GROUPS = (Group(("name", "kind")), Group(("small", "large"), ("s", "l"), right=True), Group(("reason",), text=True))
ROWS = [(("first", "this"), ("1", "22"), ("because it is so " * 4,))]


def lines(width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(grouped_table(GROUPS, ROWS, width=width))
    return [" ".join(line.split()) for line in console.export_text().splitlines() if line.strip()]


def test_columns_are_beside_each_other_where_there_is_room() -> None:
    title, _, row, *_ = lines(100)
    assert title == "name kind small large reason"
    assert row.startswith("first this 1 22 because")


def test_else_those_that_belong_together_are_stacked_and_nothing_is_cut_off() -> None:
    top, bottom, _, row, second, *rest = lines(40)
    assert (top, bottom) == ("name s", "kind l reason")
    assert row.startswith("first 1 because")
    assert second.startswith("this 22")
    assert " ".join([row, second, *rest]).count("because") == 4


def test_control_characters_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "red\x1b[31m\x07 \u202e[bold]"
    output.stdout().print(evil)
    table = grouped_table((Group(("name",)),), [((evil,),)], width=80)
    output.stdout().print(table)
    print_facts({"model": evil})
    shown = capsys.readouterr().out
    assert shown.count(r"red\x1b[31m\x07 \u202e[bold]") == 3
    assert not set("\x1b\x07\u202e") & set(shown)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_file_whose_name_is_no_text_or_is_of_another_alphabet(tmp_path: Path, encoding: str) -> None:
    program = "from cloud_server.cli import main; main()"
    for name in (b"bad\xff.yaml", "имя.yaml".encode()):
        path = os.path.join(os.fsencode(tmp_path), name)  # noqa: PTH118
        Path(os.fsdecode(path)).write_text("name: [")
        done = subprocess.run(
            [sys.executable, "-c", program, "profiles", "validate", path, "--json"],
            capture_output=True,
            env=os.environ | {"PYTHONIOENCODING": encoding},
            check=False,
        )
        assert done.returncode == 1, done.stderr
        (found,) = json.loads(done.stdout)["files"]
        assert os.fsencode(found["file"]) == path
        assert b"unforeseen" not in done.stderr


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("zoo", ("vision-transformer", "fashion-mnist", "accuracy")),
        ("profiles", ("raspberry-pi-zero-2-w", "RTT ms")),
        ("models", ("zoo:vision-transformer", "53.9 kB")),
        ("tasks", ("fashion-mnist", "1000")),
    ],
)
def test_lists_fit_eighty_columns_and_only_words_are_folded(
    command: str, parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "WIDTH_OF_A_FILE", 80)
    monkeypatch.setenv("SPLITFLEET_HOME", str(tmp_path))
    text = CliRunner().invoke(cli, [command, "list"]).stdout
    assert max(map(len, text.splitlines())) <= 80
    for part in parts:
        assert part in text
