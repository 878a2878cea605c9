"""What races found, remembered: a JSON file in the server's home.

::

    {"version": 1, "results": {"<key>": {"facts": {…}, "engine": "litert", "threads": 2, "reason": "…"}, …}}

The key is a hash of the facts: the bundle and all of this machine that a result depends on. Several processes may share
the file; it changes by one rename, and one that cannot be read counts as empty.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)
_VERSION = 1
# The oldest go first.
_MOST_RESULTS = 500

Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Which engine won, on how many threads, and why."""

    engine: str
    threads: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results in the file at ``path``, which need not be there."""

    path: Path

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Be the only process that races: two at a time would slow each other down, or do the same twice."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.with_name(f"{self.path.name}.lock").open("w")
        except OSError as error:
            _LOG.warning("%s: results of races cannot be kept there (%s)", self.path, error.strerror)
            yield
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def get(self, facts: Facts) -> Result | None:
        """What was found under the same facts."""
        entry = self._read().get(_key(facts))
        try:
            return None if entry is None else Result(**{name: entry[name] for name in ("engine", "threads", "reason")})
        except (KeyError, TypeError):
            return None

    def put(self, facts: Facts, result: Result) -> None:
        """Remember a result. A file that cannot be written is logged: the race is run again then."""
        results = self._read()
        results.pop(_key(facts), None)
        results[_key(facts)] = {"facts": dict(facts), **asdict(result)}
        kept = dict(list(results.items())[-_MOST_RESULTS:])
        written = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            written.write_text(json.dumps({"version": _VERSION, "results": kept}, indent=1) + "\n", encoding="utf-8")
            written.replace(self.path)
        except OSError as error:
            _LOG.warning("%s: the result of a race cannot be kept there (%s)", self.path, error.strerror)
            with suppress(OSError):
                written.unlink()

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            _LOG.warning("%s: the results of races cannot be read and are found anew (%s)", self.path, error)
            return {}
        results = document.get("results") if isinstance(document, dict) else None
        return results if isinstance(results, dict) and document.get("version") == _VERSION else {}


def _key(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
