"""Devices, runs, rounds, trials, evaluations, outcomes, allocations."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
NAME = sa.String(255)
DIGEST = sa.String(64)


def upgrade() -> None:
    op.create_table(
        "devices",
        sa.Column("id", NAME, nullable=False),
        sa.Column("profile", NAME),
        sa.Column("model_ram_bytes", sa.BigInteger, nullable=False),
        sa.Column("resources", sa.JSON, nullable=False),
        sa.Column("emulation", sa.JSON, nullable=False),
        sa.Column("version", NAME, nullable=False),
        sa.Column("first_seen", TIME, nullable=False),
        sa.Column("last_seen", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_devices"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("task", NAME, nullable=False),
        sa.Column("min_accuracy", sa.Double),
        sa.Column("max_latency_ms", sa.Double),
        sa.Column("latency_statistic", NAME, nullable=False),
        sa.Column("latency_samples", sa.Integer, nullable=False),
        sa.Column("redraw", NAME, nullable=False),
        sa.Column("memory_model", NAME, nullable=False),
        sa.Column("max_rounds", sa.Integer),
        sa.Column("device_timeout_s", sa.Double, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("devices", sa.JSON, nullable=False),
        sa.Column("baselines", sa.Boolean, nullable=False),
        sa.Column("state", NAME, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("ended_at", TIME),
        sa.Column("lease_until", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_index("ix_runs_state", "runs", ["state"])
    op.create_table(
        "rounds",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("ended_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_rounds"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_rounds_run_id_runs"),
        sa.UniqueConstraint("run_id", "number", name="uq_rounds_run_id_number"),
    )
    op.create_table(
        "trials",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("round_id", sa.Integer, nullable=False),
        sa.Column("device_id", NAME, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("model", NAME, nullable=False),
        sa.Column("memory_budget_bytes", sa.BigInteger, nullable=False),
        sa.Column("k", sa.Integer),
        sa.Column("n", sa.Integer),
        sa.Column("cut", sa.Text),
        sa.Column("predicted_bytes", sa.BigInteger),
        sa.Column("whole_bytes", sa.BigInteger),
        sa.Column("bundle", DIGEST),
        sa.Column("state", NAME, nullable=False),
        sa.Column("missed_accuracy", sa.Boolean, nullable=False),
        sa.Column("missed_latency", sa.Boolean, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("float_accuracy", sa.Double),
        sa.Column("test_accuracy", sa.Double),
        sa.Column("test_samples", sa.Integer),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("ended_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_trials"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_trials_run_id_runs"),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name="fk_trials_round_id_rounds"),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_trials_device_id_devices"),
        sa.UniqueConstraint("run_id", "device_id", "number", name="uq_trials_run_id_device_id_number"),
    )
    op.create_index("ix_trials_round_id", "trials", ["round_id"])
    op.create_index("ix_trials_device_id", "trials", ["device_id"])
    op.create_index("ix_trials_state", "trials", ["state"])
    op.create_table(
        "evaluations",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("trial_id", sa.Integer, nullable=False),
        sa.Column("variant", NAME, nullable=False),
        sa.Column("bundle", DIGEST, nullable=False),
        sa.Column("k", sa.Integer, nullable=False),
        sa.Column("tag", NAME, nullable=False),
        sa.Column("samples", sa.Integer, nullable=False),
        sa.Column("accuracy", sa.Double, nullable=False),
        sa.Column("latency_samples", sa.Integer, nullable=False),
        sa.Column("latency_mean_ms", sa.Double, nullable=False),
        sa.Column("latency_p50_ms", sa.Double, nullable=False),
        sa.Column("latency_p95_ms", sa.Double, nullable=False),
        sa.Column("edge_ms", sa.Double, nullable=False),
        sa.Column("transfer_ms", sa.Double, nullable=False),
        sa.Column("cloud_ms", sa.Double, nullable=False),
        sa.Column("sent_bytes", sa.Double, nullable=False),
        sa.Column("head_bytes", sa.BigInteger, nullable=False),
        sa.Column("measured_peak_bytes", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_evaluations"),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name="fk_evaluations_trial_id_trials"),
        sa.UniqueConstraint("trial_id", "variant", name="uq_evaluations_trial_id_variant"),
    )
    op.create_table(
        "outcomes",
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("device_id", NAME, nullable=False),
        sa.Column("state", NAME, nullable=False),
        sa.Column("trial_id", sa.Integer),
        sa.PrimaryKeyConstraint("run_id", "device_id", name="pk_outcomes"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_outcomes_run_id_runs"),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name="fk_outcomes_trial_id_trials"),
    )
    op.create_table(
        "allocations",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("device_id", NAME, nullable=False),
        sa.Column("trial_id", sa.Integer, nullable=False),
        sa.Column("bundle", DIGEST, nullable=False),
        sa.Column("activated_at", TIME, nullable=False),
        sa.Column("superseded_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_allocations"),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_allocations_device_id_devices"),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name="fk_allocations_trial_id_trials"),
    )
    op.create_index("ix_allocations_device_id", "allocations", ["device_id"])


def downgrade() -> None:
    for table in ("allocations", "outcomes", "evaluations", "trials", "rounds", "runs", "devices"):
        op.drop_table(table)
