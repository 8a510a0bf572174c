"""Why no worker plays a board."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("boards", sa.Column("waits", sa.Text(), nullable=False, server_default=""))
