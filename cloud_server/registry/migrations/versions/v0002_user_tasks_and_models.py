"""Tasks and models that users bring."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
NAME = sa.String(255)
DIGEST = sa.String(64)
ACTIVE = sa.text("removed_at IS NULL")


def upgrade() -> None:
    op.create_table(
        "user_tasks",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("metric", NAME, nullable=False),
        sa.Column("inputs", sa.JSON, nullable=False),
        sa.Column("classes", sa.Integer, nullable=False),
        sa.Column("validation_sha256", DIGEST, nullable=False),
        sa.Column("validation_samples", sa.Integer, nullable=False),
        sa.Column("calibration_sha256", DIGEST, nullable=False),
        sa.Column("calibration_samples", sa.Integer, nullable=False),
        sa.Column("test_sha256", DIGEST),
        sa.Column("test_samples", sa.Integer),
        sa.Column("added_at", TIME, nullable=False),
        sa.Column("removed_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_user_tasks"),
    )
    _one_active("user_tasks")
    op.create_table(
        "user_models",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("task", NAME, nullable=False),
        sa.Column("file_sha256", DIGEST, nullable=False),
        sa.Column("file_bytes", sa.BigInteger, nullable=False),
        sa.Column("suffix", NAME, nullable=False),
        sa.Column("custom_objects", sa.JSON, nullable=False),
        sa.Column("input_shapes", sa.JSON, nullable=False),
        sa.Column("unsafe", sa.Boolean, nullable=False),
        sa.Column("model_sha256", DIGEST, nullable=False),
        sa.Column("operations", sa.Integer, nullable=False),
        sa.Column("parameters", sa.BigInteger, nullable=False),
        sa.Column("added_at", TIME, nullable=False),
        sa.Column("removed_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_user_models"),
    )
    op.create_index("ix_user_models_task", "user_models", ["task"])
    _one_active("user_models")


def downgrade() -> None:
    for table in ("user_models", "user_tasks"):
        op.drop_table(table)


def _one_active(table: str) -> None:
    op.create_index(
        f"ix_{table}_active_name", table, ["name"], unique=True, sqlite_where=ACTIVE, postgresql_where=ACTIVE
    )
