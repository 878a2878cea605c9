"""The examples of docs/models.md do what the page says, in the order in which it has them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cloud_server.cli import cli

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_examples_of_the_page_are_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPLITFLEET_HOME", str(tmp_path / "home"))
    (program,) = blocks("python")
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    said = []
    for line in "".join(blocks("sh")).splitlines():
        name, *arguments = shlex.split(line)
        assert name == "splitfleet"
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, (line, result.output, result.exception)
        said.append(result.stdout)
    cuts, document, split, verified, _, _, models, registered = said
    assert "chosen" in cuts
    assert json.loads(document)["chosen"] == 4
    assert "2 of 4, after second" in split
    assert "100.0%" in verified
    assert "registry:mine" in models
    assert "smallest feature" in registered
