"""Since when nothing more is submitted to a board whose season ends."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("boards", sa.Column("closing", sa.DateTime(timezone=True), nullable=True))
    op.execute("UPDATE boards SET closing = closed")
