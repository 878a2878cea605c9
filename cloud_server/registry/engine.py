"""A database URL as an engine: what is special about SQLite, and what a driver's errors mean to a user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from edge_sdk.errors import ConfigError, RegistryUnreachableError

# How long a writer waits for another: the transactions here take milliseconds.
SQLITE_BUSY_TIMEOUT_S = 30.0
# An execution option: this transaction will write. SQLite then takes its write lock at the beginning, where it can wait
# for it; a reader that turns writer half way gets "database is locked" at once, whatever the timeout.
WRITES = {"splitfleet_writes": True}


def make_engine(text: str) -> sa.Engine:
    """An engine for the database URL ``text``; nothing is opened yet. Raises :class:`ConfigError` for a bad URL."""
    try:
        url = sa.make_url(text)
    except exc.ArgumentError:
        raise ConfigError(
            f"{text!r} is not a database URL; expected something like sqlite:////var/lib/splitfleet/registry.db "
            "or postgresql+psycopg://user@host/name"
        ) from None
    sqlite = url.get_backend_name() == "sqlite"
    if sqlite and (url.database in (None, "", ":memory:") or "mode=memory" in text):
        raise ConfigError(f"{text!r} is a database in memory, which no other process sees; name a file")
    try:
        if not sqlite:
            return sa.create_engine(url, pool_pre_ping=True)
        engine = sa.create_engine(url, connect_args={"timeout": SQLITE_BUSY_TIMEOUT_S})
    except exc.NoSuchModuleError:
        raise ConfigError(f"{shown(url)}: there is no database called {url.drivername!r}") from None
    except ModuleNotFoundError as error:
        raise ConfigError(f"{shown(url)}: its driver is missing: install the package {error.name!r}") from None
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def shown(url: sa.URL) -> str:
    """The URL as it may be printed: without its password."""
    return url.render_as_string(hide_password=True)


@contextmanager
def told_errors(url: sa.URL) -> Iterator[None]:
    """A driver's errors become :class:`RegistryUnreachableError`, or :class:`ConfigError` where waiting is no help."""
    try:
        yield
    except (exc.OperationalError, exc.InterfaceError, exc.TimeoutError) as error:
        raise RegistryUnreachableError(
            f"the registry {shown(url)} does not answer: {_cause(error)}; "
            "check that the path or server exists, and that you may use it"
        ) from error
    except exc.DatabaseError as error:
        # IntegrityError and the like have classes of their own; this one is SQLite on a file that is none of its.
        if type(error) is not exc.DatabaseError:
            raise
        raise ConfigError(f"{shown(url)} is not a registry: {_cause(error)}") from error


def _cause(error: exc.SQLAlchemyError) -> str:
    original = error.orig if isinstance(error, exc.DBAPIError) else error
    return str(original).strip().splitlines()[0] if str(original).strip() else type(original).__name__


def _prepare_sqlite(connection: Any, record: Any) -> None:  # noqa: ARG001
    # The driver would begin transactions by its own rules, and not at all before DDL.
    connection.isolation_level = None
    cursor = connection.cursor()
    try:
        cursor.execute("PRAGMA foreign_keys = ON")
        # Readers go on while one writes. The mode stays with the file; asking first spares a lock on each connection.
        if cursor.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = NORMAL")
    finally:
        cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("splitfleet_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
