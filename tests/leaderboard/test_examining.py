"""From the last byte of an upload to the queue: what is sound gets there, what is not is told why and removed."""

import hashlib
import json
import shutil
import subprocess
from contextlib import ExitStack
from datetime import timedelta

import pytest
from small_boards import SECRET, deal, definition

from turngym_leaderboard import confined, examining
from turngym_leaderboard.examining import examine_next
from turngym_leaderboard.intake import names
from turngym_leaderboard.intake.examination import EndedUnexpectedly
from turngym_leaderboard.lifecycle import Kind, State
from turngym_leaderboard.store import boards, open_store, owners, submissions
from turngym_leaderboard.store.values import SubmissionFile
from turngym_trainer.policy import load_policy


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "sound"
    load_policy("tiny").save(folder)
    return folder


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def board(store):
    return boards.create(store, definition(submissions_per_owner=1), SECRET, [deal()])


@pytest.fixture
def ann(store):
    return owners.create(store, "ann")


def arrived(store, board, owner, source, *, missing=0):
    """A submission whose files lie where an upload leaves them, `missing` bytes of the weights excepted."""
    files = []
    for path in sorted(source.iterdir()):
        size, sha256 = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
        received = size - (missing if path.name == names.WEIGHTS else 0)
        files.append(SubmissionFile(name=path.name, size=size, sha256=sha256, received=received))
    submission = submissions.create(store, board, owner, name="mine", kind=Kind.CHECKPOINT, files=files)
    shutil.copytree(source, store.folder(submission.public_id))
    return submission


def test_what_is_sound_is_queued_with_what_was_found(store, board, ann, sound):
    submission = arrived(store, board, ann, sound)
    queued = examine_next(store)
    assert (queued.public_id, queued.state, queued.reason) == (submission.public_id, State.QUEUED, "")
    assert queued.description | {"bytes": ""} == {
        "kind": "checkpoint",
        "model_type": "llama",
        "parameters": "783872",
        "vocabulary": "995",
        "bytes": "",
    }
    assert store.folder(submission.public_id).is_dir()
    assert examine_next(store) is None
    # Another one that had been begun in time has no place left.
    first = submissions.find(store, submission.public_id)
    assert submissions.left_in_season(store, board, first.owner) == 0


def test_what_is_hostile_has_failed_with_the_reason_and_is_gone(store, board, ann, sound, tmp_path):
    hostile = shutil.copytree(sound, tmp_path / "hostile")
    config = json.loads((hostile / names.CONFIG).read_text())
    (hostile / names.CONFIG).write_text(json.dumps(config | {"auto_map": {"AutoConfig": "evil.Evil"}}))
    submission = arrived(store, board, ann, hostile)
    failed = examine_next(store)
    assert (failed.state, failed.reason[:35]) == (State.FAILED, "config.json: 'auto_map' is set, but")
    assert failed.queued is None
    assert not store.folder(submission.public_id).exists()


def test_what_has_not_arrived_waits_and_is_given_up_after_its_time(store, board, ann, sound, monkeypatch):
    submission = arrived(store, board, ann, sound, missing=1)
    assert examine_next(store) is None
    assert submissions.find(store, submission.public_id).state is State.UPLOADED
    monkeypatch.setattr(examining, "UPLOADED_WITHIN", timedelta(0))
    assert examine_next(store) is None
    failed = submissions.find(store, submission.public_id)
    assert (failed.state, failed.reason) == (State.FAILED, "its files did not arrive in 0 days; submit it again")
    assert not store.folder(submission.public_id).exists()


def test_one_examines_at_a_time(store, board, ann, sound):
    arrived(store, board, ann, sound)
    with examining._alone(store.data) as alone:
        assert alone
        assert examine_next(store) is None


def test_what_is_started_meanwhile_does_not_keep_the_others_out(store, tmp_path):
    with ExitStack() as stack:
        with examining._alone(store.data):
            asleep = ["-n", "1", "-r", "1", "import time; time.sleep(60)"]
            running = stack.enter_context(confined.start("timeit", asleep, str(tmp_path), stdout=subprocess.DEVNULL))
            stack.callback(running.kill)
        with examining._alone(store.data) as alone:
            assert alone
        assert running.poll() is None


def test_an_examination_that_ends_again_and_again_is_given_up(store, board, ann, sound, monkeypatch):
    def killed(*arguments, **keywords):
        raise EndedUnexpectedly("signal SIGKILL")

    submission = arrived(store, board, ann, sound)
    monkeypatch.setattr(examining, "examine", killed)
    assert [examine_next(store) for _ in range(examining.MOST_FAILURES - 1)] == [None, None]
    assert submissions.find(store, submission.public_id).state is State.UPLOADED
    assert examine_next(store).reason == "3 examinations of it ended before they were over"


def test_one_that_was_left_between_two_states_is_queued(store, board, ann, sound):
    submission = arrived(store, board, ann, sound)
    submissions.set_state(store, submission.public_id, State.VALIDATED)
    assert examine_next(store).state is State.QUEUED
