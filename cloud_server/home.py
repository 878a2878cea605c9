"""Where a server, an allocator and a demo keep their things: one folder, the *home*.

``--home``, else ``$SPLITFLEET_HOME``, else ``$XDG_DATA_HOME/splitfleet`` (``~/.local/share/splitfleet``).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_sdk.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Home:
    """The paths under one home folder."""

    path: Path

    @classmethod
    def at(cls, path: Path | str | None = None) -> Home:
        """The home at ``path`` or at the default place; it is created when missing."""
        if path is None:
            data = os.environ.get("XDG_DATA_HOME") or Path("~/.local/share").expanduser()
            path = os.environ.get("SPLITFLEET_HOME") or Path(data) / "splitfleet"
        folder = Path(path).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder}: cannot be made the home folder ({error.strerror}); name another with --home"
            ) from None
        return cls(path=folder)

    @contextmanager
    def claim(self, what: str) -> Iterator[None]:
        """Be the only ``what`` of this home, such as its server: two would overwrite each other's files.

        Raises :class:`ConfigError` naming the process that is. The claim ends with the process at the latest.
        """
        with (self.path / f"{what}.lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise ConfigError(
                    f"{self.path} has a {what} already, process {file.read().strip() or 'unknown'}: stop it, or name "
                    "another folder with --home"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    @property
    def registry_file(self) -> Path:
        return self.path / "registry.db"

    @property
    def registry_url(self) -> str:
        return f"sqlite:///{self.registry_file}"

    @property
    def repository(self) -> Path:
        return self.path / "repository"

    @property
    def conversions(self) -> Path:
        """Cache of built bundles."""
        return self.path / "conversions"

    @property
    def library(self) -> Path:
        """Models and labelled data that users brought. Unlike the repository, no device ever gets anything of it."""
        return self.path / "library"

    @property
    def keys(self) -> Path:
        """The server's own key, and the keys that it allows."""
        return self.path / "keys"

    @property
    def allowed_keys(self) -> Path:
        return self.keys / "allowed"

    @property
    def tails(self) -> Path:
        """Bundles laid out for the tail engines."""
        return self.path / "tails"

    @property
    def engines(self) -> Path:
        """Which engine won the race for which bundle."""
        return self.path / "engines.json"
