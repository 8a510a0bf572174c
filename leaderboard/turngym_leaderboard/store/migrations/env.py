"""Run by alembic with the connection that `store.database` gives it, in the transaction that it has begun."""

from alembic import context
from sqlalchemy import Connection

from turngym_leaderboard.store.models import Table

connection: Connection = context.config.attributes["connection"]
# SQLite can undo changes of tables, which alembic does not count on.
context.configure(connection=connection, target_metadata=Table.metadata, transactional_ddl=True, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
