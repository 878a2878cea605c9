"""The precision of each trial's head, and why it is no smaller one. All heads before were int8."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("trials", sa.Column("precision", sa.String(255)))
    op.add_column("trials", sa.Column("precision_reason", sa.Text))
    op.execute("UPDATE trials SET precision = 'int8', precision_reason = '' WHERE bundle IS NOT NULL")


def downgrade() -> None:
    op.drop_column("trials", "precision_reason")
    op.drop_column("trials", "precision")
