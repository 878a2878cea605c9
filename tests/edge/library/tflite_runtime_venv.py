"""A venv with tflite-runtime, which needs numpy 1 and so cannot be installed beside TensorFlow.

It is kept outside the tree, keyed by what is in it, and used again, by tests and benchmarks.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = [
    "tflite-runtime==2.14.0",
    "numpy<2",
    "click>=8.5",
    "msgpack>=1.0.8",
    "pyzmq>=26",
    "pytest>=8.2",
    "pytest-timeout>=2.3",
]
ROOT = Path(__file__).parents[3]


def python_of_the_venv() -> Path:
    """The interpreter of the venv, which is made first if need be. Raises ``RuntimeError`` with pip's words."""
    key = hashlib.sha256(repr((sys.version_info[:3], sys.base_prefix, REQUIREMENTS)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "splitfleet-tests"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"tflite-runtime-{key}"
    complete = folder / "complete"
    # Several test runs may come here at once.
    with (cache / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            venv.create(folder, clear=True, with_pip=True)
            install = [folder / "bin/python", "-m", "pip", "install", "--quiet", *REQUIREMENTS]
            done = subprocess.run(install, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr[-4000:])
            complete.touch()
    return folder / "bin/python"


def environment_of_the_venv() -> dict[str, str]:
    """Variables for that interpreter, with this tree to import from."""
    unwanted = ("PYTHONPATH", "SPLITFLEET_RUNTIME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in unwanted} | {"PYTHONPATH": str(ROOT)}
