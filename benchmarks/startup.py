"""How long imports and ``--help`` take, beside a bare interpreter, in one run.

    python benchmarks/startup.py [--repeat N] [--json PATH]

Every figure is the least of N fresh processes: noise only ever adds. The ratio to the bare interpreter is what compares
between machines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

CASES = {
    "bare interpreter": ["-c", "pass"],
    "import numpy": ["-c", "import numpy"],
    "import edge_sdk": ["-c", "import edge_sdk"],
    "from edge_sdk import SplitClient": ["-c", "from edge_sdk import SplitClient"],
    "splitfleet --help": ["-c", "import cloud_server.cli as c; c.main()", "--help"],
    "splitfleet allocate --help": ["-c", "import cloud_server.cli as c; c.main()", "allocate", "--help"],
    "splitfleet serve --help": ["-c", "import cloud_server.cli as c; c.main()", "serve", "--help"],
    "splitfleet-edge --help": ["-c", "import edge_sdk.cli as c; c.main()", "--help"],
    "splitfleet-edge run --help": ["-c", "import edge_sdk.cli as c; c.main()", "run", "--help"],
}


def seconds(arguments: list[str], repeat: int) -> float:
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = {name: seconds(case, arguments.repeat) for name, case in CASES.items()}
    base = figures["bare interpreter"]
    print(f"{'case':36}{'ms':>8}{'× bare':>9}")
    for name, value in figures.items():
        print(f"{name:36}{value * 1000:8.0f}{value / base:9.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"seconds": figures, "repeat": arguments.repeat}, indent=2) + "\n")


if __name__ == "__main__":
    main()
