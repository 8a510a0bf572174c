"""Who may see what of a board: the only place that says so.

| what | everybody | its owner | admins |
|---|---|---|---|
| a public submission, its numbers, its showcase episodes | yes | yes | yes |
| it in the board's list, where it failed | no | yes | yes |
| a private submission, or one that the operator hides | no | yes | yes |
| scored episodes of a sealed board, while the season lasts | no | no | yes |
| scored episodes of an open board, or after the season | as the submission | as the submission | yes |

Knows nothing of tokens or pages.
"""

from dataclasses import dataclass

from turngym_leaderboard.store.values import Board, State, Submission


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks. `owner_id`: None of somebody without a token."""

    owner_id: int | None = None
    admin: bool = False


EVERYBODY = Viewer()


def may_see_submission(viewer: Viewer, submission: Submission) -> bool:
    """Its name, state, numbers and showcase."""
    return submission.public or may_change(viewer, submission)


def may_see_listed(viewer: Viewer, submission: Submission) -> bool:
    """It among a board's submissions, where those that failed would only be in the way of others."""
    listed = submission.state is not State.FAILED or may_change(viewer, submission)
    return listed and may_see_submission(viewer, submission)


def may_change(viewer: Viewer, submission: Submission) -> bool:
    """Upload to it, publish it, withdraw it. The board's own rows are for admins."""
    owned = submission.owner is not None and submission.owner.id == viewer.owner_id
    return viewer.admin or owned


def may_see_episode(viewer: Viewer, board: Board, submission: Submission, *, showcase: bool) -> bool:
    """What was played, seeds included. Who had seen a sealed board's scored worlds could train on them."""
    open_to_all = showcase or not board.definition.sealed or board.closed is not None
    return viewer.admin or (open_to_all and may_see_submission(viewer, submission))
