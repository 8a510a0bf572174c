"""The database of a board: what is kept of boards, owners, submissions, episodes and results.

    with open_store(Path("DATA")) as store:
        submissions.find(store, "7f3a…")

`models` are the tables, `values` what callers give and get; `boards`, `owners`, `submissions`, `work` and `episodes`
are the transactions, each whole or not at all. Nothing else of turngym_leaderboard sees a session or a table. Knows
nothing of HTTP, of servers, or of how episodes are played.
"""

from turngym_leaderboard.store.database import Store, open_store
from turngym_leaderboard.store.errors import LeaseLost, LimitReached, NoRoom, NotFound, StoreError, Taken, WrongState

__all__ = [
    "LeaseLost",
    "LimitReached",
    "NoRoom",
    "NotFound",
    "Store",
    "StoreError",
    "Taken",
    "WrongState",
    "open_store",
]
