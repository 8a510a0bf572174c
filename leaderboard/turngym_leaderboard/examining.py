"""Examines submissions whose files have all arrived, and queues what is sound: what a worker does beside playing.

One at a time on a board's disk, whatever the number of workers. A submission that cannot be examined, because this
machine cannot, stays where it is; one that is refused has failed with the reason, and its files are removed.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Final

from turngym_leaderboard.intake import Accepted, IntakeLimits, Refused
from turngym_leaderboard.intake.examination import CannotExamine, EndedUnexpectedly, examine
from turngym_leaderboard.lifecycle import State
from turngym_leaderboard.store import LimitReached, Store, WrongState, submissions
from turngym_leaderboard.store.values import Submission

MOST_FAILURES: Final = 3
"""So often an examination may end by itself without a verdict."""
UPLOADED_WITHIN: Final = timedelta(days=2)
"""After which the upload of a submission is given up."""
_LOCK: Final = "examining.lock"
_log: Final = logging.getLogger(__name__)


def discard(store: Store, public_id: str) -> None:
    """Removes the files of a submission that will not be played."""
    shutil.rmtree(store.folder(public_id), ignore_errors=True)


def examine_next(store: Store, limits: IntakeLimits | None = None, *, device: str = "cpu") -> Submission | None:
    """Examines one submission, and gives up uploads that have come to a standstill.

    Args:
        device: where it would play.

    Returns:
        The submission as it stands now; None: none waits, or somebody else examines one.
    """
    with _alone(store.data) as alone:
        if not alone:
            return None
        for submission in submissions.abandoned(store, UPLOADED_WITHIN):
            with suppress(WrongState):
                _fail(store, submission, f"its files did not arrive in {UPLOADED_WITHIN.days} days; submit it again")
        for submission in submissions.arrived(store):
            try:
                return _examine(store, submission, limits or IntakeLimits(), device)
            except EndedUnexpectedly as error:
                _log.error("submission %s: %s", submission.public_id, error)
                if submissions.count_failure(store, submission.public_id) >= MOST_FAILURES:
                    return _fail(store, submission, f"{MOST_FAILURES} examinations of it ended before they were over")
            except CannotExamine as error:
                _log.error("submission %s cannot be examined here: %s", submission.public_id, error)
            except WrongState as error:
                _log.info("submission %s has changed meanwhile: %s", submission.public_id, error)
    return None


def _examine(store: Store, submission: Submission, limits: IntakeLimits, device: str) -> Submission:
    if submission.state is State.UPLOADED:
        submissions.begin_examination(store, submission.public_id)
        try:
            accepted = examine(store.folder(submission.public_id), limits, device=device)
        except Refused as refusal:
            return _fail(store, submission, str(refusal))
        submissions.describe(store, submission.public_id, _facts(accepted))
        submissions.set_state(store, submission.public_id, State.VALIDATED)
    try:
        return submissions.set_state(store, submission.public_id, State.QUEUED)
    except LimitReached as refusal:
        return _fail(store, submission, str(refusal))


def _fail(store: Store, submission: Submission, reason: str) -> Submission:
    failed = submissions.set_state(store, submission.public_id, State.FAILED, reason=reason)
    discard(store, submission.public_id)
    return failed


def _facts(accepted: Accepted) -> dict[str, str]:
    return {
        "kind": "checkpoint",
        "model_type": accepted.model_type,
        "parameters": str(accepted.parameters),
        "vocabulary": str(accepted.vocabulary),
        "bytes": str(accepted.bytes),
    }


@contextmanager
def _alone(data: Path) -> Generator[bool]:
    """Whether nobody else on this disk examines meanwhile."""
    lock = os.open(data / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        held = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = False
        yield held
    finally:
        os.close(lock)
