"""The store over SQLite and PostgreSQL: what is kept, what is refused, and who wins when several want the same."""

import sqlite3
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from small_boards import SECRET, deal, definition, episode, submitted
from sqlalchemy import text, update
from sqlalchemy.exc import DBAPIError

from turngym_leaderboard.store import (
    LeaseLost,
    LimitReached,
    NotFound,
    StoreError,
    Taken,
    WrongState,
    boards,
    episodes,
    open_store,
    owners,
    submissions,
    work,
)
from turngym_leaderboard.store.models import SubmissionRow, Table
from turngym_leaderboard.store.values import Kind, Role, State, SubmissionFile, Visibility

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)
LATER = NOW + timedelta(seconds=60)
KINDS = (Kind.SCRIPTED, Kind.CHECKPOINT)


@pytest.fixture
def board(store):
    return boards.create(store, definition(), SECRET, [deal()])


@pytest.fixture
def ann(store):
    return owners.create(store, "ann")


def claim(store, holder="one", kinds=(Kind.CHECKPOINT,), now=NOW):
    return work.claim(store, holder, kinds, now=now, until=now + timedelta(seconds=60))


def commit(store, lease, board, played, now=NOW):
    return work.commit(store, lease, board.environments[0], played, showcase=False, sealed=False, now=now)


def test_the_migrated_tables_are_those_of_the_models(store):
    with store.reading() as session:
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        assert compare_metadata(context, Table.metadata) == []


def test_a_database_is_opened_again_as_it_was_left(store, board, database_url, tmp_path):
    with open_store(tmp_path / "data", database_url) as again:
        assert boards.every(again) == [board]


def test_several_processes_make_the_tables_once(database_url, tmp_path):
    code = (
        "import sys; from pathlib import Path; from turngym_leaderboard.store import boards, open_store\n"
        "with open_store(Path(sys.argv[1]), sys.argv[2]) as store: assert boards.every(store) == []"
    )
    command = [sys.executable, "-c", code, tmp_path / "data", database_url]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    assert [(process.communicate()[1], process.returncode) for process in processes] == [(b"", 0)] * 2


def test_a_database_of_a_newer_turngym_is_left_alone(store, database_url, tmp_path):
    with store.writing() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreError, match="was made by a newer turngym"), open_store(tmp_path / "data", database_url):
        pass


def test_sqlite_is_for_its_owner_alone_and_survives_a_crash(tmp_path):
    with open_store(tmp_path / "data") as store:
        owners.create(store, "ann")
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "data").iterdir()}
        assert modes == {"board.sqlite": 0o600, "board.sqlite-wal": 0o600, "board.sqlite-shm": 0o600}
        assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
        with store.reading() as session:
            told = [session.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "foreign_keys")]
            assert told == ["wal", 1]
            assert session.execute(text("PRAGMA synchronous")).scalar() == 2


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("mysql://ann:geheim@host/board", "of kind 'mysql': expected postgresql"),
        ("geheim", "the database's URL cannot be read"),
        ("postgresql://ann:geheim@127.0.0.1:1/board", r"ann:\*\*\*@127.0.0.1:1/board cannot be opened: .*refused"),
    ],
)
def test_what_is_no_database_is_told_in_a_line_without_its_password(tmp_path, url, told):
    with pytest.raises(StoreError, match=told) as refused, open_store(tmp_path, url):
        pass
    assert "geheim" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "board.sqlite").write_text("no database, but a text that is long enough to be one" * 20)
    with (
        pytest.raises(StoreError, match=r"board\.sqlite cannot be opened: file is not a database"),
        open_store(tmp_path),
    ):
        pass


def test_tokens_are_known_by_their_text_until_revoked_or_expired(store, ann):
    submit, admin = (owners.add_token(store, ann, role) for role in (Role.SUBMIT, Role.ADMIN))
    short = owners.add_token(store, ann, Role.SUBMIT, expires=LATER)
    assert [owners.token(store, t, now=NOW).role for t in (submit, admin, short)] == ["submit", "admin", "submit"]
    assert owners.token(store, submit, now=NOW).owner == ann
    assert owners.token(store, short, now=LATER) is None
    for stranger in (submit[:-1], submit + "x", "", "\ud800", ann.name):
        assert owners.token(store, stranger, now=NOW) is None
    owners.revoke(store, owners.token(store, submit, now=NOW).id)
    assert owners.token(store, submit, now=NOW) is None
    assert len(owners.tokens(store, ann)) == 3
    with pytest.raises(Taken, match="'ann'"):
        owners.create(store, "ann")
    with pytest.raises(NotFound):
        owners.find(store, "bob")
    with pytest.raises(NotFound):
        owners.revoke(store, 999)


def test_no_error_tells_what_was_to_be_written(store):
    with pytest.raises(DBAPIError) as refused, store.writing() as session:
        session.execute(text("INSERT INTO tokens (sha256) VALUES (:hash)"), {"hash": "a secret's hash"})
    assert "a secret's hash" not in str(refused.value)


def test_no_token_and_no_secret_lies_in_the_file_readable(tmp_path):
    with open_store(tmp_path) as store:
        token = owners.add_token(store, owners.create(store, "ann"), Role.ADMIN)
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"ann" in content
    assert token.encode() not in content


def test_a_board_is_kept_with_its_instances_and_scripted_rows(store, board):
    assert boards.find(store, "lakes-one") == boards.of_id(store, board.id) == board
    assert board.definition == definition()
    [environment] = board.environments
    assert (environment.label, environment.version, environment.split_epoch) == ("frozen_lake", "1.0", 1)
    assert boards.deal(store, environment.id) == deal()
    assert boards.secret(store, board) == SECRET
    rows = submissions.of_board(store, board)
    assert [(row.name, row.kind, row.state, row.total, row.owner) for row in rows] == [
        ("random", "scripted", "queued", 5, None),
        ("oracle", "scripted", "queued", 5, None),
    ]
    with pytest.raises(Taken, match="lakes-one"):
        boards.create(store, definition(title="Other lakes"), SECRET, [deal()])
    assert len(submissions.of_board(store, board)) == 2
    with pytest.raises(NotFound, match="'lakes-two'"):
        boards.find(store, "lakes-two")


def test_the_secret_is_told_when_the_season_is_closed(store, board, ann):
    assert board.secret is None
    assert str(SECRET) not in repr(board)
    assert board.secret_hash == boards.hash_of(str(SECRET))
    part, whole = (SubmissionFile(name="a", size=2, sha256="0" * 64, received=received) for received in (1, 2))
    early = submissions.create(store, board, ann, name="early", kind=Kind.CHECKPOINT, files=[part])
    arrived = submissions.create(store, board, ann, name="arrived", kind=Kind.CHECKPOINT, files=[whole])
    with pytest.raises(
        WrongState, match=r"a worker has still to finish random \(\w+, queued\), oracle .*, arrived .*uploaded"
    ):
        boards.close(store, "lakes-one")
    with pytest.raises(WrongState, match="season of lakes-one is ending"):
        submissions.create(store, board, ann, name="late", kind=Kind.CHECKPOINT)
    with pytest.raises(WrongState, match="takes no more files"):
        submissions.set_received(store, early.public_id, "a", 2)
    assert boards.find(store, "lakes-one").secret is None
    for state in (State.VALIDATED, State.QUEUED):  # It arrived in time, and is still played.
        submissions.set_state(store, arrived.public_id, state)
    for row in submissions.of_board(store, board):
        if row.state is not State.FAILED:
            submissions.set_state(store, row.public_id, State.FAILED)
    closed = boards.close(store, "lakes-one")
    assert closed.secret == str(SECRET)
    assert boards.hash_of(closed.secret) == board.secret_hash
    assert boards.close(store, "lakes-one").closed == closed.closed
    assert submissions.find(store, early.public_id).reason == "the season ended before all of it had arrived"
    with pytest.raises(WrongState, match="season of lakes-one is over"):
        submissions.create(store, board, ann, name="late", kind=Kind.CHECKPOINT)
    with pytest.raises(WrongState, match="season of lakes-one is over"):
        submissions.set_state(store, early.public_id, State.QUEUED)


def test_a_submission_goes_from_upload_to_queue(store, board, ann):
    told = SubmissionFile(name="model.safetensors", size=2**40, sha256="ab" * 32, received=0)
    created = submissions.create(
        store, board, ann, name="tiny", kind=Kind.CHECKPOINT, description={"made_by": "ann"}, files=[told]
    )
    assert (created.state, created.visibility, created.total) == ("uploaded", "private", 5)
    assert submissions.find(store, created.public_id) == created
    assert submissions.of_owner(store, ann) == [created]
    submissions.set_received(store, created.public_id, told.name, 2**33)
    assert [file.received for file in submissions.files(store, created.public_id)] == [2**33]
    with pytest.raises(NotFound, match=r"no file 'config.json'"):
        submissions.set_received(store, created.public_id, "config.json", 1)
    with pytest.raises(WrongState, match="is uploaded; it cannot become queued"):
        submissions.set_state(store, created.public_id, State.QUEUED)
    submissions.set_state(store, created.public_id, State.VALIDATED)
    with pytest.raises(WrongState, match="takes no more files"):
        submissions.set_received(store, created.public_id, told.name, 2**34)
    for given in (State.RUNNING, State.SCORED, State.INCOMPLETE):
        with pytest.raises(WrongState):
            submissions.set_state(store, created.public_id, given)
    failed = submissions.set_state(store, created.public_id, State.FAILED, reason="NaN\0 in \ud800")
    assert (failed.state, failed.reason) == ("failed", "NaN\ufffd in ?")
    # Else `retry` would lead past the examination.
    with pytest.raises(WrongState, match=r"was never found sound: .*; submit it anew"):
        submissions.set_state(store, created.public_id, State.QUEUED)
    public = submissions.set_visibility(store, created.public_id, Visibility.PUBLIC)
    assert public.visibility == "public"


def test_an_owner_has_so_many_scored_submissions_a_season(store, board, ann):
    first, _ = (submitted(store, board, ann) for _ in range(2))
    with pytest.raises(LimitReached, match="2 submissions of an owner"):
        submissions.create(store, board, ann, name="third", kind=Kind.CHECKPOINT)
    assert submissions.left_in_season(store, board, ann) == 0
    submissions.set_state(store, first.public_id, State.FAILED, reason="its endpoint has no key")
    assert submissions.left_in_season(store, board, ann) == 1
    assert submissions.set_state(store, first.public_id, State.QUEUED).queued == first.queued
    assert submissions.left_in_season(store, board, ann) == 0
    submissions.set_state(store, first.public_id, State.FAILED, reason="its endpoint has no key")
    third = submitted(store, board, ann)
    with pytest.raises(LimitReached, match="2 submissions of an owner"):
        submissions.set_state(store, first.public_id, State.QUEUED)
    with store.writing() as session:  # An episode of it was played.
        session.execute(update(SubmissionRow).where(SubmissionRow.id == third.id).values(episodes=1))
    submissions.set_state(store, third.public_id, State.FAILED, reason="withdrawn")
    assert submissions.left_in_season(store, board, ann) == 0
    submissions.set_state(store, third.public_id, State.QUEUED)
    submitted(store, board, owners.create(store, "bob"))


def test_those_queued_at_the_same_time_do_not_exceed_the_number(store, board, ann):
    waiting = [submissions.create(store, board, ann, name=f"{k}", kind=Kind.CHECKPOINT) for k in range(6)]
    for each in waiting:
        submissions.set_state(store, each.public_id, State.VALIDATED)
    barrier = threading.Barrier(6)

    def queue(submission):
        barrier.wait()
        try:
            submissions.set_state(store, submission.public_id, State.QUEUED)
        except LimitReached:
            return False
        return True

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(queue, waiting)) == 2


def test_scripted_rows_are_played_first_and_then_in_the_order_of_the_queue(store, board, ann):
    own = [submitted(store, board, ann, name).name for name in ("first", "second")]
    assert [claim(store, f"{k}", KINDS).submission.name for k in range(4)] == ["random", "oracle", *own]
    assert claim(store, "5", KINDS) is None
    assert work.unfinished(store, KINDS) == 4
    assert work.unfinished(store, [Kind.CHECKPOINT]) == 2
    assert work.unfinished(store, KINDS, without=[board.id]) == 0


def test_one_submission_is_claimed_by_one_worker(store, board, ann):
    names = {submitted(store, board, owners.create(store, f"owner {k}"), f"{k}").name for k in range(6)}
    barrier = threading.Barrier(12)

    def take(holder):
        barrier.wait()
        return claim(store, f"{holder}")

    with ThreadPoolExecutor(12) as threads:
        leases = [lease for lease in threads.map(take, range(12)) if lease is not None]
    assert sorted(lease.submission.name for lease in leases) == sorted(names)


def test_a_dead_workers_submission_is_taken_over_and_the_dead_one_can_do_no_more(store, board, ann):
    submission = submitted(store, board, ann)
    instances = deal().scored.instances
    dead = claim(store, "dead")
    assert commit(store, dead, board, [episode(instances[0])]).new == 1
    assert claim(store, "early", now=LATER - timedelta(seconds=1)) is None
    heir = claim(store, "heir", now=LATER)
    assert heir.submission.public_id == submission.public_id
    for act in (
        lambda: commit(store, dead, board, [episode(instances[1])]),
        lambda: work.extend(store, dead, until=LATER),
        lambda: work.release(store, dead, now=LATER),
        lambda: work.finish(store, dead, State.SCORED, results=[], now=LATER),
    ):
        with pytest.raises(LeaseLost):
            act()
    assert work.done(store, submission.id, board.environments[0].id) == {(0, 0): "played"}
    work.extend(store, heir, until=LATER + timedelta(hours=1))
    assert claim(store, "third", now=LATER + timedelta(minutes=59)) is None
    work.release(store, heir, now=LATER)
    assert claim(store, "third", now=LATER).submission.episodes == 1


def test_a_withdrawn_submission_stops_its_worker(store, board, ann):
    submission = submitted(store, board, ann)
    lease = claim(store)
    submissions.set_state(store, submission.public_id, State.FAILED, reason="withdrawn by its owner")
    with pytest.raises(LeaseLost):
        commit(store, lease, board, [episode(deal().scored.instances[0])])


def test_an_episode_is_counted_once_and_stays_as_it_was(store, board, ann):
    submission = submitted(store, board, ann)
    one, other = deal().scored.instances
    first = commit(store, claim(store), board, [episode(one), episode(one, 1, success=False)])
    assert (first.new, first.differing) == (2, ())
    lease = claim(store, "two", now=LATER)
    again = commit(
        store,
        lease,
        board,
        [episode(one), episode(one, 1, success=True, digest="d1"), episode(other, outcome="unresolved")],
    )
    assert (again.new, again.differing) == (0, ((0, 1),))
    kept = episodes.records(store, submission, board.environments[0].id)
    assert [(e.draw, e.attempt, e.success, e.outcome) for e in kept] == [
        (0, 0, True, "played"),
        (0, 1, False, "played"),
        (2, 0, None, "unresolved"),
    ]
    assert submissions.find(store, submission.public_id).episodes == 2
    resolved = commit(store, lease, board, [episode(other), episode(one, outcome="unresolved")])
    assert (resolved.new, resolved.differing) == (1, ())
    assert submissions.find(store, submission.public_id).episodes == 3
    assert episodes.outcomes(store, board) == {submission.id: {"frozen_lake": {0: [True, False], 2: [True]}}}


def test_workers_that_are_killed_say_nothing_of_a_submission_and_what_they_find_is_kept(store, board, ann):
    submission = submitted(store, board, ann)
    now = NOW
    for k in range(20):
        assert claim(store, f"{k}", now=now)
        now += timedelta(hours=1)
    assert work.count_failure(store, claim(store, "one", now=now)) == 1
    now += timedelta(hours=1)
    lease = claim(store, "other", now=now)
    assert work.count_failure(store, lease) == 2
    work.finish(store, lease, State.FAILED, results=[], reason="it hangs", now=now)
    submissions.set_state(store, submission.public_id, State.QUEUED)
    assert work.count_failure(store, claim(store, "anew", now=now)) == 1


def test_an_older_database_is_brought_up_to_date(tmp_path):
    with open_store(tmp_path) as store:
        made = boards.create(store, definition(), SECRET, [deal()])
        submission = submitted(store, made, owners.create(store, "ann"))
        commit(store, claim(store), made, [episode(deal().scored.instances[0])])
        with store.writing() as session:
            for statement in (
                "ALTER TABLE submissions RENAME COLUMN failures TO idle_claims",
                "ALTER TABLE submissions DROP COLUMN examined",
                "ALTER TABLE boards DROP COLUMN closing",
                "ALTER TABLE boards DROP COLUMN waits",
                "ALTER TABLE submissions DROP COLUMN hidden",
                "UPDATE submissions SET idle_claims = 4",
                "UPDATE alembic_version SET version_num = '0002'",
            ):
                session.execute(text(statement))
    with open_store(tmp_path) as store:
        assert submissions.find(store, submission.public_id).episodes == 1
        assert boards.find(store, made.slug).waits == ""
        assert work.count_failure(store, claim(store, now=LATER)) == 1


def test_an_owner_has_so_many_refused_a_day(store, board, ann):
    def refused():
        created = submissions.create(store, board, ann, name="mine", kind=Kind.CHECKPOINT)
        submissions.begin_examination(store, created.public_id)
        return submissions.set_state(store, created.public_id, State.FAILED, reason="hostile")

    for _ in range(submissions.MOST_REFUSED):
        first = refused()
    withdrawn = submissions.create(store, board, owners.create(store, "bob"), name="mine", kind=Kind.CHECKPOINT)
    submissions.set_state(store, withdrawn.public_id, State.FAILED, reason="withdrawn")
    with pytest.raises(LimitReached, match="10 of your submissions failed within a day before an episode was played"):
        submissions.create(store, board, ann, name="mine", kind=Kind.CHECKPOINT)
    with pytest.raises(WrongState, match="is failed; it is not examined any more"):
        submissions.begin_examination(store, first.public_id)
    with store.writing() as session:
        yesterday = {"then": datetime.now(UTC) - submissions.REFUSED_WITHIN, "id": first.id}
        session.execute(text("UPDATE submissions SET examined = :then WHERE id = :id"), yesterday)
    refused()


def test_episodes_are_listed_filtered_and_read(store, board, ann):
    submission = submitted(store, board, ann)
    lease, (one, other) = claim(store), deal().scored.instances
    strange = "<b>\0\u202e 🧊"
    commit(store, lease, board, [episode(one, text=strange), episode(one, 1, success=False), episode(other)])
    [shown] = deal().showcase
    work.commit(store, lease, board.environments[0], [episode(shown)], showcase=True, sealed=True, now=NOW)
    lines, total = episodes.listing(store, submission)
    assert total == 4
    assert [(line.draw, line.attempt, line.showcase, line.sealed) for line in lines] == [
        (0, 0, False, False),
        (0, 1, False, False),
        (2, 0, False, False),
        (4, 0, True, True),
    ]
    assert lines[0].finished == NOW

    def found(**wanted):
        lines, total = episodes.listing(store, submission, episodes.Filter(**wanted))
        assert total == len(lines)
        return [(line.draw, line.attempt) for line in lines]

    assert found(success=False) == [(0, 1)]
    assert found(showcase=True) == [(4, 0)]
    assert found(draw=0) == [(0, 0), (0, 1)]
    assert found(outcome="agent_fault") == found(environments=["sokoban"]) == []
    part, total = episodes.listing(store, submission, offset=1, limit=2)
    assert ([line.draw for line in part], total) == ([0, 2], 4)
    whole = episodes.read(store, submission, lines[0].id)
    assert (whole.record, whole.trajectory) == episode(one, text=strange)
    assert len(episodes.records(store, submission, board.environments[0].id)) == 3
    with pytest.raises(NotFound):
        episodes.read(store, submissions.of_board(store, board)[0], lines[0].id)


def test_a_transaction_that_fails_leaves_nothing(store, board, ann):
    submission = submitted(store, board, ann)
    lease, [one, other] = claim(store), deal().scored.instances
    stranger = deal(instances=5).scored.instances[4]
    with pytest.raises(Exception, match=r"(?i)foreign key"):
        commit(store, lease, board, [episode(one), episode(other), episode(stranger)])
    assert work.done(store, submission.id, board.environments[0].id) == {}
    assert submissions.find(store, submission.public_id).episodes == 0


def test_a_reader_waits_for_no_writer(tmp_path):
    with open_store(tmp_path) as store, store.writing() as session:
        session.execute(text("CREATE TABLE held (x INTEGER)"))
        assert owners.every(store) == []
        other = sqlite3.connect(tmp_path / "board.sqlite", timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.close()


def test_owners_are_examined_in_turns_and_who_was_refused_comes_last(store, board, ann):
    whole = SubmissionFile(name="config.json", size=1, sha256="ab" * 32, received=1)

    def uploaded(owner, name):
        return submissions.create(store, board, owner, name=name, kind=Kind.CHECKPOINT, files=[whole])

    def waiting():
        return [each.name for each in submissions.arrived(store)]

    bob, eve = owners.create(store, "bob"), owners.create(store, "eve")
    bad = [uploaded(ann, f"bad {k}") for k in range(2)]
    fine = [uploaded(bob, f"fine {k}") for k in range(2)]
    first = uploaded(eve, "first")
    assert waiting() == ["bad 0", "bad 1", "fine 0", "fine 1", "first"]
    submissions.begin_examination(store, bad[0].public_id)
    submissions.set_state(store, bad[0].public_id, State.FAILED, reason="hostile")
    assert waiting() == ["fine 0", "fine 1", "first", "bad 1"]
    submissions.begin_examination(store, fine[0].public_id)
    submissions.set_state(store, fine[0].public_id, State.VALIDATED)
    assert waiting() == ["fine 0", "first", "fine 1", "bad 1"]
    submissions.set_state(store, fine[0].public_id, State.QUEUED)
    assert waiting() == ["first", "fine 1", "bad 1"]
    assert [submissions.examined_after(store, each) for each in (first, bad[1])] == [0, 2]
    assert submissions.examined_after(store, submissions.find(store, fine[0].public_id)) is None
