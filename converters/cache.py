"""What was made before, by content: outlines by the recipe's fingerprint, bundles by what determines them.

::

    outlines/<key>.json     an outline, and the hash of the calibration data of that recipe
    bundles/<key>/          a bundle's folder
    refusals/<key>          why such a bundle cannot be made
    locks/<key>             who holds the lock of an entry makes it; others wait, then find it
    work/                   temporary files of the processes at work

An entry appears by one rename, whole or not at all. Processes on one machine may share a cache. A bundle whose files do
not match its manifest any more is made anew. Where the folder cannot be used, that is a
:class:`StorageError`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from converters.outline import Outline
from converters.precision import Attempt
from converters.recipe import Recipe
from converters.versions import versions
from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, StorageError

# To be raised by whoever changes what a build makes of the same model.
BUILD_FORMAT = 14


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a recipe's contents."""

    outline: Outline
    calibration_sha256: str


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A folder of finished work; it is created when the first entry is."""

    folder: Path

    def known(self, recipe: Recipe) -> Known | None:
        """What was found out before of a recipe with a fingerprint; ``None`` where that is nothing, or unreadable."""
        path = self._outline_path(recipe)
        if path is None:
            return None
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            return Known(
                outline=Outline.from_json(document["outline"]), calibration_sha256=document["calibration_sha256"]
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def remember(self, recipe: Recipe, known: Known) -> None:
        """Keep what was found out of a recipe, if it has a fingerprint to find it by again."""
        path = self._outline_path(recipe)
        if path is None:
            return
        document = {"outline": known.outline.to_json(), "calibration_sha256": known.calibration_sha256}
        with self._usable():
            _write(path, json.dumps(document))

    def bundle(self, key: str) -> Path | None:
        """The folder of a finished and undamaged bundle, or ``None``."""
        folder = self._bundle_path(key)
        with self._usable():
            if not folder.is_dir():
                return None
            try:
                Bundle.open(folder).verify()
            except BundleError:
                return None
        return folder

    def make_bundle(self, key: str, build: Callable[[Path], object]) -> Path:
        """The folder of a bundle: the one that is there, else what ``build`` puts into the empty folder it is given."""
        with self._usable(), self._lock(key):
            ready = self.bundle(key)
            if ready is not None:
                return ready
            folder = self._bundle_path(key)
            unfinished = folder.with_name(f"{key}.unfinished")
            # Left by a process that died: the lock tells that nobody works on it.
            for stale in (unfinished, folder):
                if stale.exists():
                    shutil.rmtree(stale)
            unfinished.mkdir(parents=True)
            try:
                build(unfinished)
                unfinished.rename(folder)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            return folder

    def refusal(self, key: str) -> str:
        """Why a bundle cannot be made, if that was found out before, else empty."""
        try:
            return self._refusal_path(key).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return ""

    def refuse(self, key: str, reason: str) -> None:
        """Keep why a bundle cannot be made: to find that out takes as long as to make one."""
        with self._usable():
            _write(self._refusal_path(key), reason)

    def _refusal_path(self, key: str) -> Path:
        return self.folder / "refusals" / key

    def _bundle_path(self, key: str) -> Path:
        return self.folder / "bundles" / key

    def _outline_path(self, recipe: Recipe) -> Path | None:
        if recipe.fingerprint is None:
            return None
        key = _sha256(["outline", recipe.task, recipe.model_name, recipe.fingerprint])
        return self.folder / "outlines" / f"{key}.json"

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self.folder
            raise StorageError(
                f"{where}: the folder of conversions cannot be used ({error.strerror or error}); make room or set its "
                "permissions right, or name another home with --home"
            ) from error

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        path = self.folder / "locks" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def bundle_key(recipe: Recipe, known: Known, attempt: Attempt) -> str:
    """The name of a bundle in the cache: a hash of everything that determines it."""
    return _sha256(
        [
            "bundle",
            recipe.task,
            recipe.model_name,
            known.outline.model_sha256,
            attempt.k,
            attempt.precision,
            attempt.max_error,
            attempt.before,
            known.calibration_sha256,
        ]
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sha256(parts: list[str | float]) -> str:
    return hashlib.sha256(json.dumps([BUILD_FORMAT, versions(), *parts], sort_keys=True).encode()).hexdigest()
