"""Episodes that agents play through the board's service."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "remote_episodes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("public_id", sa.String(length=32), nullable=False),
        sa.Column("submission_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("draw", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("showcase", sa.Boolean(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("dealt", sa.DateTime(timezone=True), nullable=True),
        sa.Column("start", sa.Text(), nullable=True),
        sa.Column("due", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.Column("fault", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["environment_id", "draw"],
            ["instances.environment_id", "instances.draw"],
            name=op.f("fk_remote_episodes_environment_id_draw"),
        ),
        sa.ForeignKeyConstraint(["submission_id"], ["submissions.id"], name=op.f("fk_remote_episodes_submission_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_remote_episodes")),
        sa.UniqueConstraint("public_id", name=op.f("uq_remote_episodes_public_id")),
        sa.UniqueConstraint(
            "submission_id",
            "environment_id",
            "draw",
            "attempt",
            name=op.f("uq_remote_episodes_submission_id_environment_id_draw_attempt"),
        ),
    )
    op.create_index(op.f("ix_remote_episodes_submission_id_place"), "remote_episodes", ["submission_id", "place"])
    op.create_index(op.f("ix_remote_episodes_due"), "remote_episodes", ["due"])
    op.create_table(
        "remote_turns",
        sa.Column("episode_id", sa.Integer(), nullable=False),
        sa.Column("turn", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("answered", sa.DateTime(timezone=True), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["episode_id"], ["remote_episodes.id"], name=op.f("fk_remote_turns_episode_id")),
        sa.PrimaryKeyConstraint("episode_id", "turn", name=op.f("pk_remote_turns")),
    )
