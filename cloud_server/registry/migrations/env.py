"""What Alembic runs to migrate: on the connection that ``cloud_server.registry.migrate`` hands over."""

from alembic import context

from cloud_server.registry.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # SQLite cannot alter a table in place; Alembic then copies it.
    render_as_batch=True,
)
context.run_migrations()
