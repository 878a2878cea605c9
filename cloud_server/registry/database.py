"""An open database: brought to the schema of this code, read and written in small transactions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from sqlalchemy.orm import Session

from cloud_server.registry.engine import WRITES, make_engine, shown, told_errors
from cloud_server.registry.migrate import migrate


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
        with told_errors(self._engine.url), Session(self._engine) as session:
            yield session

    @contextmanager
    def _write(self) -> Iterator[Session]:
        with told_errors(self._engine.url), Session(self._writing) as session, session.begin():
            yield session
