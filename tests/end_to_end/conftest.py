"""Real commands as real processes. What a test started must be gone when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
COMMAND_TIMEOUT_S = 280.0
MARK = "SPLITFLEET_TEST_RUN"


class Commands:
    """Runs the command lines, marked by an environment variable that all their descendants inherit."""

    cloud = (sys.executable, "-c", "from cloud_server.cli import main; main()")
    edge = (sys.executable, "-c", "from edge_sdk.cli import main; main()")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.mark = uuid.uuid4().hex
        self._environment = os.environ | {MARK: self.mark, "SPLITFLEET_HOME": str(self.home)}
        self._started: list[subprocess.Popen[bytes]] = []

    def run(self, program: tuple[str, ...], *arguments: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run to the end; fails unless it ends with ``exit_code``."""
        result = subprocess.run(
            [*program, *arguments],
            env=self._environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert result.returncode == exit_code, f"{arguments}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.stderr
        return result

    def json(self, program: tuple[str, ...], *arguments: str) -> Any:
        """The one document that a command with ``--json`` prints."""
        return json.loads(self.run(program, *arguments, "--json").stdout)

    def start(self, program: tuple[str, ...], *arguments: str, log: str) -> subprocess.Popen[bytes]:
        """Start a command that runs until it is stopped."""
        with (self.folder / log).open("ab") as file:
            process = subprocess.Popen(
                [*program, *arguments], env=self._environment, cwd=self.folder, stdout=file, stderr=file
            )
        self._started.append(process)
        return process

    def serve(self) -> tuple[subprocess.Popen[bytes], str]:
        """A server on a free port, and its endpoint."""
        ready = self.folder / f"ready-{len(self._started)}.json"
        process = self.start(
            self.cloud, "serve", "--bind", "tcp://127.0.0.1:*", "--ready-file", str(ready), log="serve.log"
        )
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not ready.exists():
            assert process.poll() is None, (self.folder / "serve.log").read_text()
            assert time.monotonic() < deadline, "the server was not ready in time"
            time.sleep(0.02)
        return process, json.loads(ready.read_text())["endpoint"]

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        """SIGTERM, and the exit code."""
        process.terminate()
        return process.wait(STOP_TIMEOUT_S)

    def descendants(self) -> list[psutil.Process]:
        """Whatever still runs of all that was started here, however deep."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    try:
        yield commands
        assert commands.descendants() == []
    finally:
        commands.end()
