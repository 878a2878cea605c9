"""Bring a database to the schema of this code, in one transaction, whoever else opens it meanwhile."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import ProgrammingError

from cloud_server.registry.engine import WRITES, shown
from cloud_server.registry.schema import Base
from edge_sdk.errors import ConfigError

MIGRATIONS = Path(__file__).parent / "migrations"


def migrate(engine: sa.Engine) -> None:
    """Create or upgrade the tables.

    Raises :class:`ConfigError` when the database was made by a newer splitfleet, or holds tables of someone else.
    """
    try:
        _migrate(engine)
    except ProgrammingError:
        # Two processes opened a new database at once, and the other one made the tables first.
        _migrate(engine)


def _migrate(engine: sa.Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    head = scripts.get_current_head()
    with engine.connect() as connection:
        current = MigrationContext.configure(connection).get_current_revision()
    if current == head:
        return
    with engine.execution_options(**WRITES).begin() as connection:
        # Once more, now that nobody else can write.
        current = MigrationContext.configure(connection).get_current_revision()
        if current is None:
            foreign = set(sa.inspect(connection).get_table_names()) & set(Base.metadata.tables)
            if foreign:
                raise ConfigError(
                    f"{shown(engine.url)} is not a registry, but has tables named {', '.join(sorted(foreign))}; "
                    "name another database"
                )
        elif current not in {script.revision for script in scripts.walk_revisions()}:
            raise ConfigError(
                f"{shown(engine.url)} was made by a newer splitfleet: its schema is {current!r}, "
                f"this one knows up to {head!r}; upgrade splitfleet on this machine"
            )
        if current != head:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
