"""Make an environment for each peer that ``benchmarks/serving`` compares with.

    python benchmarks/peers/make_venvs.py [--folder DIR] [PEER ...]

Each gets what its ``PEER.txt`` pins, and TensorFlow and numpy in the versions of the environment that runs this. What
is there already, in the same versions, stays. Each takes about 2 GB. None of the peers asks for PyTorch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
PEERS = tuple(sorted(path.stem for path in HERE.glob("*.txt")))
_SAME = ("tensorflow", "numpy")
_DONE = "installed.txt"


def default_folder() -> Path:
    """Where environments and bundles of the benchmark are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "splitfleet-benchmarks"


def python_of(peer: str, folder: Path) -> Path | None:
    """The interpreter of a peer whose environment is complete and of the versions wanted."""
    at = folder / "venvs" / peer
    try:
        complete = (at / _DONE).read_text() == "\n".join(_wanted(peer))
    except OSError:
        return None
    return at / "bin" / "python" if complete else None


def make(peer: str, folder: Path) -> None:
    """Raises :class:`subprocess.CalledProcessError` when something cannot be installed."""
    at = folder / "venvs" / peer
    (at / _DONE).unlink(missing_ok=True)
    venv.create(at, with_pip=True, clear=True)
    wanted = _wanted(peer)
    subprocess.run([at / "bin" / "python", "-m", "pip", "install", "--quiet", *wanted], check=True, stdout=sys.stderr)
    (at / _DONE).write_text("\n".join(wanted))


def _wanted(peer: str) -> list[str]:
    same = [f"{name}=={importlib.metadata.version(name)}" for name in _SAME]
    return [*same, *(HERE / f"{peer}.txt").read_text().split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; all of them if none is named")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="[default: %(default)s]")
    options = parser.parse_args()
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    for peer in options.peers or PEERS:
        if python_of(peer, options.folder) is None:
            print(f"making the environment of {peer}", file=sys.stderr)
            make(peer, options.folder)
        print(f"{peer}: {python_of(peer, options.folder)}")


if __name__ == "__main__":
    main()
