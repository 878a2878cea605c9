"""The commands of splitfleet, as a user calls them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# The console script of this environment, and of the tree that is measured.
SPLITFLEET = (sys.executable, "-c", "from cloud_server.cli import main; main()")


def splitfleet(*arguments: str | Path) -> str:
    """Run it and give what it prints. Raises ``RuntimeError``."""
    done = subprocess.run([*SPLITFLEET, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"splitfleet {arguments[0]} failed:\n{done.stderr[-2000:]}")
    return done.stdout
