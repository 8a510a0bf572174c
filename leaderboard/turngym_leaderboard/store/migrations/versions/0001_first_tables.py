"""The first tables: boards, owners, submissions, episodes and results."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "boards",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("slug", sa.String(length=130), nullable=False),
        sa.Column("definition", sa.JSON(), nullable=False),
        sa.Column("secret", sa.String(length=80), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("closed", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_boards")),
        sa.UniqueConstraint("slug", name=op.f("uq_boards_slug")),
    )
    op.create_table(
        "owners",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_owners")),
        sa.UniqueConstraint("name", name=op.f("uq_owners_name")),
    )
    op.create_table(
        "board_environments",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("board_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("label", sa.String(length=64), nullable=False),
        sa.Column("version", sa.String(length=200), nullable=False),
        sa.Column("split_epoch", sa.Integer(), nullable=False),
        sa.Column("options_json", sa.Text(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("draws", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["board_id"], ["boards.id"], name=op.f("fk_board_environments_board_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_board_environments")),
        sa.UniqueConstraint("board_id", "label", name=op.f("uq_board_environments_board_id_label")),
        sa.UniqueConstraint("board_id", "position", name=op.f("uq_board_environments_board_id_position")),
    )
    op.create_table(
        "submissions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("public_id", sa.String(length=32), nullable=False),
        sa.Column("board_id", sa.Integer(), nullable=False),
        sa.Column("owner_id", sa.Integer(), nullable=True),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("visibility", sa.String(length=16), nullable=False),
        sa.Column("description", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("episodes", sa.Integer(), nullable=False),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("changed", sa.DateTime(timezone=True), nullable=False),
        sa.Column("queued", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_holder", sa.String(length=120), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("idle_claims", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["board_id"], ["boards.id"], name=op.f("fk_submissions_board_id")),
        sa.ForeignKeyConstraint(["owner_id"], ["owners.id"], name=op.f("fk_submissions_owner_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_submissions")),
        sa.UniqueConstraint("public_id", name=op.f("uq_submissions_public_id")),
    )
    op.create_index(op.f("ix_submissions_board_id_state"), "submissions", ["board_id", "state"])
    op.create_index(op.f("ix_submissions_owner_id_board_id"), "submissions", ["owner_id", "board_id"])
    op.create_index(op.f("ix_submissions_state_queued"), "submissions", ["state", "queued"])

    op.create_table(
        "tokens",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("owner_id", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["owner_id"], ["owners.id"], name=op.f("fk_tokens_owner_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("sha256", name=op.f("uq_tokens_sha256")),
    )
    op.create_table(
        "files",
        sa.Column("submission_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("received", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("received >= 0 AND received <= size", name=op.f("ck_files_received")),
        sa.ForeignKeyConstraint(["submission_id"], ["submissions.id"], name=op.f("fk_files_submission_id")),
        sa.PrimaryKeyConstraint("submission_id", "name", name=op.f("pk_files")),
    )
    op.create_table(
        "instances",
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("draw", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("showcase", sa.Boolean(), nullable=False),
        sa.Column("level_seed", sa.String(length=20), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("world_id", sa.Text(), nullable=False),
        sa.Column("floor", sa.Double[float](), nullable=True),
        sa.Column("ceiling", sa.Double[float](), nullable=True),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["board_environments.id"], name=op.f("fk_instances_environment_id")
        ),
        sa.PrimaryKeyConstraint("environment_id", "draw", name=op.f("pk_instances")),
    )
    op.create_table(
        "results",
        sa.Column("submission_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("statistics", sa.Text(), nullable=True),
        sa.Column("unavailable", sa.Text(), nullable=False),
        sa.Column("computed", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["environment_id"], ["board_environments.id"], name=op.f("fk_results_environment_id")),
        sa.ForeignKeyConstraint(["submission_id"], ["submissions.id"], name=op.f("fk_results_submission_id")),
        sa.PrimaryKeyConstraint("submission_id", "environment_id", name=op.f("pk_results")),
    )
    op.create_table(
        "episodes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("submission_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("draw", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("showcase", sa.Boolean(), nullable=False),
        sa.Column("outcome", sa.String(length=20), nullable=False),
        sa.Column("success", sa.Boolean(), nullable=True),
        sa.Column("total_reward", sa.Double[float](), nullable=False),
        sa.Column("turns", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=True),
        sa.Column("end_reason", sa.String(length=20), nullable=False),
        sa.Column("sealed", sa.Boolean(), nullable=False),
        sa.Column("finished", sa.DateTime(timezone=True), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["environment_id", "draw"],
            ["instances.environment_id", "instances.draw"],
            name=op.f("fk_episodes_environment_id_draw"),
        ),
        sa.ForeignKeyConstraint(["submission_id"], ["submissions.id"], name=op.f("fk_episodes_submission_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_episodes")),
        sa.UniqueConstraint(
            "submission_id",
            "environment_id",
            "draw",
            "attempt",
            name=op.f("uq_episodes_submission_id_environment_id_draw_attempt"),
        ),
    )
    op.create_table(
        "trajectories",
        sa.Column("episode_id", sa.Integer(), nullable=False),
        sa.Column("trajectory", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name=op.f("fk_trajectories_episode_id")),
        sa.PrimaryKeyConstraint("episode_id", name=op.f("pk_trajectories")),
    )
