"""What workers find counts instead of how they end; and when a submission was examined."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # In batches alembic would drop the table, which SQLite refuses while others refer to it.
    op.execute("ALTER TABLE submissions RENAME COLUMN idle_claims TO failures")
    op.execute("UPDATE submissions SET failures = 0")
    op.add_column("submissions", sa.Column("examined", sa.DateTime(timezone=True), nullable=True))
