"""The board's worker against a real server: plays, is killed, goes on, and comes to the same scores."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from server_process import ServerProcess
from small_boards import dealt_board, everything, new_slot, play_out, submitted
from sqlalchemy import text

from turngym.sealed import read_seal_key
from turngym_client import connect
from turngym_leaderboard import playing, scoring, slot
from turngym_leaderboard.agents import AgentOverran, Fault, Reply, confined_checkpoint
from turngym_leaderboard.agents.checkpoint import CheckpointAgent
from turngym_leaderboard.agents.scripted import RandomAgent
from turngym_leaderboard.anew import TOLD
from turngym_leaderboard.intake import IntakeLimits
from turngym_leaderboard.playing import CannotPlay, ServersGone, check_board, due_parts, parts, play_submission
from turngym_leaderboard.protocol import select_instances
from turngym_leaderboard.runner import play
from turngym_leaderboard.slot import agent_of
from turngym_leaderboard.store import boards, episodes, open_store, owners, submissions, work
from turngym_leaderboard.store.values import Kind, State, SubmissionFile
from turngym_trainer.policy import load_policy

LAKE = {"id": "frozen_lake", "instances": 6, "attempts": 2, "showcase": 2}
SMALL = {"batch": 5, "environments": [LAKE], "max_response_tokens": 8}


@pytest.fixture(scope="module")
def client(server):
    with connect(server) as connected:
        yield connected


@pytest.fixture
def small(store, client):
    return dealt_board(store, client, **SMALL)


@pytest.fixture(scope="module")
def novice():
    """A policy that has learned nothing."""
    return load_policy("tiny")


def upload(store, submission, policy):
    folder = store.folder(submission.public_id)
    policy.save(folder)
    return folder


def claimed(store, name="by hand", kinds=(Kind.CHECKPOINT,)):
    now = datetime.now(UTC)
    return work.claim(store, name, kinds, now=now, until=now + timedelta(minutes=5))


def test_scripted_rows_are_played_as_an_evaluation_plays_them(store, small, client):
    play_out(store, client)
    told = everything(store, small)
    assert {name: state for name, (state, _, _) in told.items()} == {"random": "scored", "oracle": "scored"}
    protocol = small.environments[0].definition.protocol(boards.secret(store, small))
    alone = play(client, protocol, select_instances(client, protocol), RandomAgent())
    _, kept, [(label, statistics, unavailable)] = told["random"]
    scored = [(record, trajectory.turns) for _, showcase, record, trajectory in kept if not showcase]
    assert scored == [(played.record, played.turns) for played in alone]
    assert sum(showcase for _, showcase, _, _ in kept) == 2
    assert (label, unavailable, statistics.episodes, statistics.unresolved) == ("frozen_lake", "", 12, 0)
    assert statistics.score.floor_source == "exact"
    assert statistics.pass_at == {}
    oracle = told["oracle"][2][0][1]
    assert oracle.success.rate > statistics.success.rate


def test_parts_have_fixed_members_and_are_due_while_anything_is_missing(store, small):
    [environment] = small.environments
    deal = boards.deal(store, environment.id)
    whole = list(parts(environment, deal, 5))
    assert [(part.showcase, len(part.keys)) for part in whole] == [(True, 2), (False, 5), (False, 5), (False, 2)]
    draws = [instance.draw for instance in deal.scored.instances]
    assert [key for part in whole[1:] for key in part.keys] == [(draw, k) for draw in draws for k in range(2)]
    done = {key: "played" for part in whole for key in part.keys}
    assert due_parts(iter(whole), done) == []
    assert due_parts(iter(whole), {}) == whole
    failed = whole[3].keys[1]
    assert due_parts(iter(whole), {**done, failed: "unresolved"}) == [whole[3]]
    assert due_parts(iter(whole), {**done, whole[1].keys[0]: "agent_fault"}) == []
    del done[whole[2].keys[4]]
    assert due_parts(iter(whole), done) == [whole[2]]


def test_a_checkpoint_that_answers_garbage_is_scored(store, small, client, novice):
    submission = submitted(store, small, owners.create(store, "ann"))
    upload(store, submission, novice)
    play_out(store, client)
    state, kept, [(_, statistics, _)] = everything(store, small)["tiny"]
    assert state == "scored"
    assert len(kept) == 14
    assert {record.outcome for _, _, record, _ in kept} == {"played"}
    assert statistics.unparsed_rate == 1.0
    assert statistics.pass_at.keys() == {1, 2}
    finished = submissions.find(store, submission.public_id)
    assert (finished.episodes, finished.total) == (14, 14)
    assert finished.started < finished.finished
    assert (finished.description["kind"], finished.description["context"]) == ("checkpoint", "all turns")
    assert str(store.data) not in str(finished)


def test_an_interrupted_checkpoint_comes_to_the_scores_of_an_undisturbed_one(tmp_path, client, novice, monkeypatch):
    class Cut(BaseException):
        pass

    def in_this_process(store, board, submission, config):
        if submission.kind is Kind.SCRIPTED:
            return agent_of(store, board, submission, config)
        folder, most = store.folder(submission.public_id), board.definition.max_response_tokens
        return nullcontext(CheckpointAgent(folder, name="tiny", threads=1, most_tokens=most))

    # Quicker than a process for each of six evaluations.
    monkeypatch.setattr(slot, "agent_of", in_this_process)

    def evaluation(name, cuts):
        with open_store(tmp_path / name) as store:
            board = dealt_board(store, client, **SMALL)
            upload(store, submitted(store, board, owners.create(store, "ann")), novice)
            commit, committed = work.commit, []

            def cut_off(*arguments, **keywords):
                told = commit(*arguments, **keywords)
                committed.append(told)
                assert told.differing == ()
                if len(committed) in cuts:
                    raise Cut
                return told

            with monkeypatch.context() as patch:
                patch.setattr(playing.work, "commit", cut_off)
                for _ in cuts:
                    with pytest.raises(Cut):
                        play_out(store, client, lease_seconds=0.01)
                    time.sleep(0.02)
                play_out(store, client)
            assert sum(told.new for told in committed) == 3 * 14
            return everything(store, board)

    assert evaluation("cut", cuts=(3, 9, 17, 20)) == evaluation("whole", cuts=())


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x04garbage"), "cannot be loaded"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"model": 5}'), "cannot be loaded"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_fails_with_the_reason(tmp_path, client, novice, harm, told):
    with open_store(tmp_path / "data") as store:
        board = dealt_board(store, client, **SMALL)
        submission = submitted(store, board, owners.create(store, "ann"))
        harm(upload(store, submission, novice))
        play_out(store, client)
        failed = submissions.find(store, submission.public_id)
        assert failed.state == "failed"
        assert told in failed.reason


def test_a_checkpoint_that_hangs_fails_with_the_reason_and_the_slot_goes_on(tmp_path, client, novice, monkeypatch):
    """Its template is as it should be wherever the examination's instructions stand."""
    monkeypatch.setattr(confined_checkpoint, "START_SECONDS", 1.0)
    with open_store(tmp_path / "data") as store:
        board = dealt_board(store, client, **SMALL)
        submission = submitted(store, board, owners.create(store, "ann"))
        template = upload(store, submission, novice) / "chat_template.jinja"
        nested = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
        template.write_text(
            f"{{% if 'Answer Up or Down.' not in messages[0].content %}}{nested}{{% endif %}}" + template.read_text()
        )
        play_out(store, client)
        failed = submissions.find(store, submission.public_id)
        assert (failed.state, failed.reason) == (
            "failed",
            "3 times it overran: it did not answer within 1 s; try it with `leaderboard evaluate`",
        )
        kept = episodes.records(store, submission, board.environments[0].id)
        assert {(record.outcome, record.fault) for record in kept} == {
            ("agent_fault", "overran: it did not answer within 1 s")
        }
        assert failed.episodes == 2 + 5 + 5
        assert [row.state for row in submissions.of_board(store, board)] == ["scored", "scored", "failed"]


def test_a_checkpoint_that_never_comes_to_a_turn_has_failed_on_a_board_of_any_size(
    tmp_path, client, novice, monkeypatch
):
    monkeypatch.setattr(confined_checkpoint, "START_SECONDS", 0.5)
    with open_store(tmp_path / "data") as store:
        board = dealt_board(store, client, batch=5, environments=[{**LAKE, "instances": 2, "attempts": 1}])
        submission = submitted(store, board, owners.create(store, "ann"))
        template = upload(store, submission, novice) / "chat_template.jinja"
        template.write_text("{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4 + template.read_text())
        play_out(store, client)
        failed = submissions.find(store, submission.public_id)
        assert failed.state == "failed"
        assert failed.reason == (
            "none of its scored episodes got to a single turn; most often: overran: it did not answer within 0.5 s; "
            "try it with `leaderboard evaluate`"
        )
        assert TOLD not in failed.description


def test_overruns_count_when_a_sample_is_played_anew(tmp_path, client, monkeypatch):
    class Overruns(Says):
        """In its third part, and whenever it is started after that."""

        started = 0

        def start(self, seats, decoding):
            self.started += 1
            if self.started >= 3:
                raise AgentOverran("overran: it ate")

    agent = Overruns("Right")
    monkeypatch.setattr(slot, "agent_of", lambda store, board, submission, config: nullcontext(agent))
    monkeypatch.setattr(slot, "PLAYED", (Kind.CHECKPOINT,))
    monkeypatch.setattr(work, "MOST_FAILURES", 2)
    with open_store(tmp_path / "data") as store:
        board = dealt_board(store, client, batch=2, environments=[{**LAKE, "instances": 4, "attempts": 1}])
        submission = submitted(store, board, owners.create(store, "ann"))
        # One part of the showcase and two of two scored episodes; anew the part in which it chose.
        monkeypatch.setattr(slot, "play_anew", partial(slot.play_anew, share=1.0))
        play_out(store, client)
        failed = submissions.find(store, submission.public_id)
        assert (failed.state, failed.reason[:22]) == ("failed", "2 times it overran: it")


def test_what_an_agent_raises_tells_its_owner_nothing_of_what_it_read(tmp_path, faulty):
    with open_store(tmp_path / "data") as store:
        board = dealt_board(store, faulty, environments=[FAULTY])
        state, reason, _, _ = played_by(Says(ValueError("level: #_#")), store, faulty, board)
        assert state is State.FAILED
        assert reason == (
            "none of its scored episodes got to a single turn; most often: ValueError; "
            "try it with `leaderboard evaluate`"
        )


def test_a_submission_on_which_the_worker_itself_fails_is_not_played_for_ever(tmp_path, client, monkeypatch):
    def broken(store, board, submission, config):
        raise ZeroDivisionError

    monkeypatch.setattr(slot, "agent_of", broken)
    with open_store(tmp_path) as store:
        board = dealt_board(store, client, **SMALL)
        play_out(store, client)
        assert {(row.state, row.reason[:65]) for row in submissions.of_board(store, board)} == {
            ("failed", "the board's worker failed on it 3 times (ZeroDivisionError); its ")
        }


def test_what_arrives_is_examined_between_the_parts_of_a_play(tmp_path, client):
    with open_store(tmp_path) as store:
        board = dealt_board(store, client, **SMALL)
        config = SubmissionFile(name="config.json", size=2_000, sha256="0" * 64, received=2_000)
        arrived = submissions.create(
            store, board, owners.create(store, "ann"), name="large", kind=Kind.CHECKPOINT, files=[config]
        )
        store.folder(arrived.public_id).mkdir(parents=True)
        (store.folder(arrived.public_id) / "config.json").write_bytes(b" " * 2_000)
        play_out(store, client, intake=IntakeLimits(max_bytes=1_000))
        refused = submissions.find(store, arrived.public_id)
        assert "config.json has 2000 bytes; at most 1000 are allowed" in refused.reason
        assert refused.finished < min(row.finished for row in submissions.of_board(store, board) if row.owner is None)


class Says(RandomAgent):
    """Answers with what it is given for each turn, or raises or returns that."""

    name = "says"
    wants_legal_actions = False

    def __init__(self, *turns):
        self.turns = turns

    def act(self, views):
        return [self.answer(self.turns[min(view.turn, len(self.turns) - 1)]) for view in views]

    def answer(self, turn):
        if isinstance(turn, Exception):
            raise turn
        return turn if isinstance(turn, Fault) else Reply(text=turn, reasoning=turn, actions=(turn,))


@pytest.fixture(scope="module")
def faulty():
    arguments = ("--env", "faulty:Faulty", "--env", "frozen_lake", "--splits", "all,held_out")
    with ServerProcess(*arguments, path=Path(__file__).parent) as running, connect(running.address) as connected:
        yield connected


FAULTY = {"id": "faulty", "split": "all", "instances": 4, "showcase": 0, "limits": {"max_turns": 0, "max_actions": 0}}
FAULTY["limits"]["max_actions_per_turn"] = 0


def played_by(agent, store, client, board):
    """What one more submission comes to, whose episodes this agent plays."""
    submission = submitted(store, board, owners.create(store, "ann"))
    lease = claimed(store)
    unavailable = play_submission(client, store, lease, board, agent, lambda environment: None)
    results = scoring.numbers(store, board, submission, unavailable)
    state, reason = scoring.ending(store, board, submission, results)
    kept = episodes.records(store, submission, board.environments[0].id)
    return state, reason, kept, results[0]


@pytest.mark.parametrize(
    ("turn", "outcome", "fault"),
    [
        ("win", "played", ""),
        ("stumble", "played", ""),
        ("crash", "environment_fault", "EnvironmentFailed"),
        (IndexError("out of reach"), "agent_fault", "IndexError: out of reach"),
        (Fault("refused: \ud800"), "agent_fault", "refused: ?"),
        ("w" * 2_000_000, "agent_fault", "too long: an answer of 2000000 characters; at most 1048576"),
        ("a \ud800 lone \0 surrogate", "played", ""),
    ],
)
def test_what_an_agent_does_is_its_own_result(tmp_path, faulty, turn, outcome, fault):
    with open_store(tmp_path / "data") as store:
        board = dealt_board(store, faulty, environments=[FAULTY])
        state, reason, kept, result = played_by(Says("wait", turn), store, faulty, board)
        told = fault.partition(":")[0]
        blamed = f"4 of 4 scored episodes were ended by a fault of the agent's, most often: {told}"
        assert (state, reason) == (State.SCORED, blamed if outcome == "agent_fault" else "")
        assert {record.outcome for record in kept} == {outcome}
        assert all(record.fault.startswith(fault) for record in kept)
        assert result.statistics.success.rate == float(turn in ("win", "stumble"))


def test_what_the_server_leaves_unresolved_makes_a_submission_incomplete_and_is_played_again(tmp_path, faulty):
    with open_store(tmp_path / "data") as store:
        board = dealt_board(store, faulty, environments=[FAULTY])
        agent = Says("shrug")
        state, reason, kept, result = played_by(agent, store, faulty, board)
        assert (state, reason) == (State.INCOMPLETE, "4 of 4 episodes could not be played: the servers failed")
        assert {record.outcome for record in kept} == {"unresolved"}
        assert (result.statistics.ranked, result.statistics.low_bound, result.statistics.high_bound) == (
            False,
            0.0,
            1.0,
        )
        [submission] = [each for each in submissions.of_board(store, board) if each.owner]
        assert submission.episodes == 0
        lease = work.Lease(submission, "by hand")
        agent.turns = ("win",)
        play_submission(faulty, store, lease, board, agent, lambda environment: None)
        again = episodes.records(store, submission, board.environments[0].id)
        assert {(record.outcome, record.success) for record in again} == {("played", True)}
        assert submissions.find(store, submission.public_id).episodes == 4


def test_scripted_rows_that_cannot_play_an_environment_say_why(tmp_path, faulty):
    with open_store(tmp_path / "data") as store:
        mixed = dealt_board(store, faulty, "mixed", environments=[{**LAKE, "instances": 2}, FAULTY])
        alone = dealt_board(store, faulty, "alone", environments=[FAULTY])
        play_out(store, faulty)
        told = everything(store, mixed)
        assert [state for state, _, _ in told.values()] == ["scored", "scored"]
        assert "its legal actions cannot be listed" in told["random"][2][1][2]
        assert "it advises nothing" in told["oracle"][2][1][2]
        assert told["oracle"][2][0][1].episodes == 4
        random, oracle = submissions.of_board(store, alone)
        assert (random.state, oracle.state) == ("failed", "failed")
        assert "its legal actions cannot be listed" in random.reason


def test_numbers_follow_when_the_rows_they_are_measured_by_are_played_later(tmp_path, client, monkeypatch):
    monkeypatch.setattr(slot, "agent_of", lambda store, board, submission, config: nullcontext(Says("Right")))
    with open_store(tmp_path / "data") as store:
        board = dealt_board(store, client, **SMALL)
        with store.writing() as session:
            session.execute(text("UPDATE instances SET floor = NULL, ceiling = NULL"))
        submission = submitted(store, board, owners.create(store, "ann"))
        with monkeypatch.context() as patch:
            patch.setattr(slot, "PLAYED", (Kind.CHECKPOINT,))
            play_out(store, client)
        [early] = episodes.results(store, board)[submission.id]
        assert early.statistics.score_missing == "0 instances have a floor and a ceiling; a normalised score needs 2"
        monkeypatch.undo()
        play_out(store, client)
        [late] = episodes.results(store, board)[submission.id]
        assert (late.statistics.score.floor_source, late.statistics.score.ceiling_source) == ("played", "played")
        assert late.statistics.success == early.statistics.success
        assert scoring.refresh(store, board) == 0


def test_a_board_that_the_servers_do_not_serve_is_left_to_other_workers(store, small, faulty, server):
    with ServerProcess("--env", "sokoban", "--splits", "held_out") as other, connect(other.address) as stranger:
        left = play_out(store, stranger)
    assert left.unplayable == {small.id}
    assert {row.state for row in submissions.of_board(store, small)} == {State.QUEUED}
    told = boards.of_id(store, small.id)
    assert {row.reason_on(told) for row in submissions.of_board(store, small)} == {
        "waits: the environment server does not serve frozen_lake with the board's options"
    }
    with connect(server) as able:
        assert play_out(store, able).unplayable == set()
    assert {row.state for row in submissions.of_board(store, small)} == {State.SCORED}
    assert boards.of_id(store, small.id).waits == ""


def test_a_board_that_could_not_be_played_is_looked_at_again_later_and_later(tmp_path, client, monkeypatch, caplog):
    monkeypatch.setattr(slot, "_AGAIN_SECONDS", 0.4)
    caplog.set_level("INFO", logger="turngym_leaderboard")

    def serve(store, version):
        with store.writing() as session:
            session.execute(text(f"UPDATE board_environments SET version = '{version}'"))

    def states(store, board):
        return {row.state for row in submissions.of_board(store, board)}

    with open_store(tmp_path) as store:
        board = dealt_board(store, client, **SMALL)
        serve(store, "0.0")
        once = play_out(store, client)
        time.sleep(0.45)
        once.run()
        serve(store, board.environments[0].version)
        time.sleep(0.45)
        once.run()
        assert (once.unplayable, states(store, board)) == ({board.id}, {State.QUEUED})
        time.sleep(0.45)
        once.run()
        assert (once.unplayable, states(store, board)) == (set(), {State.SCORED})
    said = [record.getMessage() for record in caplog.records if board.slug in record.getMessage()]
    assert [message.partition("; ")[2] for message in said] == [
        "its submissions are left to other workers, and it is looked at again",
        "",
    ]
    assert said[1] == f"{board.slug} can be played again"


def test_a_board_that_another_worker_plays_does_not_wait(tmp_path, client):
    with open_store(tmp_path) as store:
        board = dealt_board(store, client, **SMALL)
        lease = claimed(store, kinds=(Kind.SCRIPTED,))
        boards.note_waiting(store, board.id, "the server is another one", now=datetime.now(UTC))
        assert boards.of_id(store, board.id).waits == ""
        work.release(store, lease, now=datetime.now(UTC))
        boards.note_waiting(store, board.id, "the server is another one", now=datetime.now(UTC))
        reasons = {row.reason_on(boards.of_id(store, board.id)) for row in submissions.of_board(store, board)}
        assert reasons == {"waits: the server is another one"}


def test_a_server_that_refuses_an_episode_is_not_quoted_to_everybody(client):
    with pytest.raises(CannotPlay) as refused, playing.servers_errors("frozen_lake"):
        client.environment("level 4711")
    assert "level 4711" in str(refused.value)
    assert "4711" not in refused.value.public


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("version", "'0.0'", "was dealt from frozen_lake of version 0.0, the environment server's is "),
        ("split_epoch", "99", "of split epoch 99, the environment server's is 1"),
        ("options_json", "'{}'", r"of options {}, the environment server's is \{"),
    ],
)
def test_a_board_is_played_only_on_what_it_was_dealt_from(tmp_path, client, column, value, told):
    with open_store(tmp_path) as store:
        board = dealt_board(store, client, **SMALL)
        check_board(client, board)
        with store.writing() as session:
            session.execute(text(f"UPDATE board_environments SET {column} = {value}"))
        with pytest.raises(CannotPlay, match=told):
            check_board(client, boards.find(store, board.slug))


def test_a_board_whose_batch_the_server_has_no_room_for_is_not_played(tmp_path):
    with (
        ServerProcess("--env", "frozen_lake", "--splits", "held_out", "--max-sessions", "4") as running,
        connect(running.address) as narrow,
        open_store(tmp_path) as store,
    ):
        board = dealt_board(store, narrow, **SMALL)
        with pytest.raises(CannotPlay, match="plays 5 episodes at once, but the environment server holds 4 sessions"):
            check_board(narrow, board)


def test_a_server_that_is_gone_costs_no_episode(tmp_path):
    arguments = ("--env", "frozen_lake", "--splits", "held_out")
    with ServerProcess(*arguments) as running, open_store(tmp_path) as store:
        hasty = connect(running.address, deadline=2.0, patience=1.0, failover=0.2)
        with hasty, connect(running.address) as patient:
            board = dealt_board(store, patient, **SMALL)
            running.kill()
            lease = claimed(store, kinds=(Kind.SCRIPTED,))
            with pytest.raises(ServersGone):
                check_board(hasty, board)
            with pytest.raises(ServersGone):
                play_submission(hasty, store, lease, board, RandomAgent(), lambda environment: None)
            work.release(store, lease, now=datetime.now(UTC))
            running.start()
            play_out(store, patient)
            told = everything(store, board)
            assert [state for state, _, _ in told.values()] == ["scored", "scored"]
            assert {record.outcome for _, kept, _ in told.values() for _, _, record, _ in kept} == {"played"}


def test_sealed_seeds_tell_the_server_no_seed_and_play_the_same(tmp_path):
    key = tmp_path / "board.key"
    subprocess.run([sys.executable, "-m", "turngym_server.access.new_seal_key", key], check=True)
    arguments = ("--env", "frozen_lake", "--splits", "held_out", "--seal-key", str(key))
    with ServerProcess(*arguments) as running, connect(running.address) as client:
        told = []
        for name, seal_key in (("open", None), ("sealed", read_seal_key(key))):
            with open_store(tmp_path / name) as store:
                board = dealt_board(store, client, **SMALL)
                play_out(store, client, seal_key=seal_key)
                told.append(everything(store, board))
                lines = {
                    row.name: {line.sealed for line in episodes.listing(store, row)[0]}
                    for row in submissions.of_board(store, board)
                }
                assert lines == {"random": {seal_key is not None}, "oracle": {False}}
    openly, sealed = told
    assert openly["oracle"] == sealed["oracle"]
    assert openly["random"][2] == sealed["random"][2]
    pairs = zip(openly["random"][1], sealed["random"][1], strict=True)
    for (_, _, one, trajectory), (_, _, other, same) in pairs:
        assert one.digest != other.digest
        assert one.model_copy(update={"digest": other.digest}) == other
        assert trajectory == same


def test_slots_beside_each_other_play_each_episode_once(store, database_url, client, server):
    made = [dealt_board(store, client, f"lakes{k}", **SMALL) for k in range(3)]
    commit, counted, lock = work.commit, [], threading.Lock()

    def count(*arguments, **keywords):
        told = commit(*arguments, **keywords)
        with lock:
            counted.append(told.new)
        return told

    def work_away():
        with open_store(store.data, database_url) as own, connect(server) as connected:
            play_out(own, connected)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(playing.work, "commit", count)
        threads = [threading.Thread(target=work_away) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(counted) == 3 * 2 * 14
    first, *others = (everything(store, board) for board in made)
    assert len(first["random"][1]) == 14
    assert others == [first, first]


def worker(server, data, url="", *arguments):
    command = [sys.executable, "-m", "turngym_leaderboard.cli", "worker", data, "--server", server, *arguments]
    environment = {**os.environ, "TURNGYM_BOARD_DATABASE": url}
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_episodes(store, board, running):
    """Until more are played than now."""
    before = sum(row.episodes for row in submissions.of_board(store, board))
    while sum(row.episodes for row in submissions.of_board(store, board)) == before:
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.05)


def test_a_worker_killed_again_and_again_loses_nothing(store, database_url, client, server, tmp_path):
    fields = {"batch": 8, "environments": [{**LAKE, "instances": 64, "attempts": 4}]}
    board = dealt_board(store, client, **fields)
    # Twice over SQLite, once over PostgreSQL; experiments/board_kills.py kills more often.
    pauses = np.random.Generator(np.random.Philox(key=7)).uniform(0.0, 1.0, 1 if database_url else 2)
    for pause in pauses:
        running = worker(server, store.data, database_url, "--lease", "1", "--slots", "2")
        wait_for_episodes(store, board, running)
        time.sleep(pause)
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    assert work.unfinished(store, slot.PLAYED) > 0
    running = worker(server, store.data, database_url, "--lease", "1", "--until-idle")
    said = running.communicate()[1]
    assert running.returncode == 0, said
    assert "came out otherwise" not in said
    with open_store(tmp_path / "undisturbed") as other:
        same = dealt_board(other, client, **fields)
        play_out(other, client)
        assert everything(store, board) == everything(other, same)


@pytest.mark.parametrize(
    ("number", "everybody", "more", "code"),
    [
        (signal.SIGTERM, False, (), 0),
        (signal.SIGTERM, True, ("--until-idle",), 143),  # As systemd stops a service; it was to play all.
        (signal.SIGINT, True, (), 130),  # Ctrl-C.
        (signal.SIGHUP, True, (), 129),  # The terminal is closed.
    ],
)
def test_a_worker_that_is_stopped_puts_its_submission_back_at_once(
    tmp_path, client, server, number, everybody, more, code
):
    with open_store(tmp_path) as store:
        board = dealt_board(store, client, batch=2, environments=[{**LAKE, "instances": 200, "attempts": 4}])
        running = worker(server, tmp_path, "", *more)
        wait_for_episodes(store, board, running)
        os.killpg(running.pid, number) if everybody else running.send_signal(number)
        said = running.communicate()[1]
        assert running.returncode == code, said
        assert "Traceback" not in said
        assert {row.state for row in submissions.of_board(store, board)} == {State.QUEUED}, said


def test_a_slot_that_somebody_stops_is_started_again(tmp_path, client, server):
    with open_store(tmp_path) as store:
        board = dealt_board(store, client, batch=2, environments=[{**LAKE, "instances": 200, "attempts": 4}])
        running = worker(server, tmp_path)
        wait_for_episodes(store, board, running)
        [first] = children(running.pid)
        os.kill(first, signal.SIGTERM)
        while children(running.pid) in ([], [first]):
            assert running.poll() is None, running.stderr.read()
            time.sleep(0.05)
        running.terminate()
        said = running.communicate()[1]
        assert running.returncode == 0, said
        assert "was stopped; it is started again" in said


def test_a_slot_that_is_stopped_in_a_long_turn_puts_its_submission_back_and_keeps_nothing_more(
    store, small, client, monkeypatch, caplog
):
    in_turn, over, act = threading.Event(), threading.Event(), RandomAgent.act

    def long_turn(agent, views):
        in_turn.set()
        assert over.wait(60)
        return act(agent, views)

    slot = new_slot(store, client)
    running = threading.Thread(target=slot.run)
    with monkeypatch.context() as patch:
        patch.setattr(RandomAgent, "act", long_turn)
        running.start()
        assert in_turn.wait(60)
        slot.stop()
        # At once, for the next worker, which need not wait for the turn nor for the lease.
        assert {row.state for row in submissions.of_board(store, small)} == {State.QUEUED}
        assert running.is_alive()
        over.set()
        running.join(60)
    assert not running.is_alive()
    assert sum(row.episodes for row in submissions.of_board(store, small)) == 0
    assert "no longer" not in caplog.text
    slot.run()  # It has been stopped for good.
    assert {row.state for row in submissions.of_board(store, small)} == {State.QUEUED}
    play_out(store, client)
    assert {row.state for row in submissions.of_board(store, small)} == {State.SCORED}


def test_a_slot_that_is_stopped_while_it_claims_puts_back_what_it_claimed(store, small, client, monkeypatch):
    claim, claims = work.claim, threading.Event()

    def slow_claim(*arguments, **fields):
        lease = claim(*arguments, **fields)
        claims.set()
        time.sleep(0.2)
        return lease

    slot = new_slot(store, client)
    monkeypatch.setattr(work, "claim", slow_claim)
    running = threading.Thread(target=slot.run)
    running.start()
    assert claims.wait(60)
    slot.stop()
    running.join(60)
    assert not running.is_alive()
    assert {row.state for row in submissions.of_board(store, small)} == {State.QUEUED}


def test_a_slot_that_dies_is_started_again_and_none_outlives_its_worker(tmp_path, client, server):
    with open_store(tmp_path) as store:
        board = dealt_board(store, client, batch=2, environments=[{**LAKE, "instances": 200, "attempts": 4}])

        running = worker(server, tmp_path, "", "--lease", "1")
        wait_for_episodes(store, board, running)
        [first] = children(running.pid)
        os.kill(first, signal.SIGKILL)
        wait_for_episodes(store, board, running)
        [second] = children(running.pid)
        assert first != second
        running.kill()
        assert "died (exit code -9); it is started again" in running.communicate()[1]
        for _ in range(200):
            if not Path(f"/proc/{second}").exists():
                break
            time.sleep(0.1)
        else:
            pytest.fail("the slot outlived its worker")
        assert {row.state for row in submissions.of_board(store, board)} == {State.QUEUED}


def children(pid):
    """Slots of a worker, without multiprocessing's own helper, and without one that ends just now."""
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with suppress(OSError):
            if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found
