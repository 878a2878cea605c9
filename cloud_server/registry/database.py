"""An open database: brought to the schema of this code, read and written in small transactions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import sqlalchemy as sa
from sqlalchemy.orm import Session

from cloud_server.registry.engine import WRITES, make_engine, shown, told_errors
from cloud_server.registry.migrate import migrate
from edge_sdk.errors import RegistryUnreachableError


class Database:
    """The database at a URL, such as ``sqlite:////srv/splitfleet/registry.db``.

    Opening it creates or upgrades its tables. Raises :class:`ConfigError` for a URL that names no usable database or
    one that a newer splitfleet made, :class:`RegistryUnreachableError` when it does not answer.
    """

    def __init__(self, url: str) -> None:
        self._engine = make_engine(url)
        self._writing = self._engine.execution_options(**WRITES)
        with told_errors(self._engine.url):
            migrate(self._engine)
        self._file = _identity(self._engine.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    @property
    def url(self) -> str:
        """Its URL without the password."""
        return shown(self._engine.url)

    @contextmanager
    def _read(self) -> Iterator[Session]:
        self._require_same_file()
        with told_errors(self._engine.url), Session(self._engine) as session:
            yield session

    @contextmanager
    def _write(self) -> Iterator[Session]:
        self._require_same_file()
        with told_errors(self._engine.url), Session(self._writing) as session, session.begin():
            yield session

    def _require_same_file(self) -> None:
        """SQLite goes on in a file that was deleted: what is written then is lost, and nobody is told."""
        if self._file is not None and _identity(self._engine.url) != self._file:
            raise RegistryUnreachableError(
                f"the file of the registry {self.url} was deleted or replaced while it was open; put it back where it "
                "was, or start anew"
            )


def _identity(url: sa.URL) -> tuple[int, int] | None:
    """Which file a SQLite URL leads to, ``(0, 0)`` for none; ``None`` for a database that is no plain file."""
    if url.get_backend_name() != "sqlite" or url.database is None or url.database.startswith("file:"):
        return None
    try:
        found = Path(url.database).stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino
