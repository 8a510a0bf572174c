"""What can be checked of a board's submissions: records that are played again, and samples that are played anew."""

import subprocess
import sys
from pathlib import Path

import pytest
from server_process import ServerProcess
from small_boards import SECRET, dealt_board, play_out, submitted
from sqlalchemy import select, update
from typer.testing import CliRunner

from turngym.sealed import read_seal_key
from turngym_client import connect
from turngym_leaderboard import record as records
from turngym_leaderboard.anew import SHARE, TOLD, Anew, drawn
from turngym_leaderboard.board_record import board_records
from turngym_leaderboard.cli import app
from turngym_leaderboard.record import EpisodeRecord
from turngym_leaderboard.store import WrongState, boards, open_store, owners, submissions
from turngym_leaderboard.store.models import EpisodeRow
from turngym_leaderboard.verify import unchecked, verify
from turngym_trainer.policy import load_policy

LAKE = {"id": "frozen_lake", "instances": 4, "attempts": 2, "showcase": 1}
SMALL = {"batch": 3, "environments": [LAKE], "max_response_tokens": 8}


def leaderboard(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def client(server):
    with connect(server) as connected:
        yield connected


@pytest.fixture(scope="module")
def played(client, tmp_path_factory):
    """A board on which a checkpoint has been played that has learned nothing, and the checkpoint."""
    data = tmp_path_factory.mktemp("data")
    with open_store(data) as store:
        board = dealt_board(store, client, **SMALL)
        submission = submitted(store, board, owners.create(store, "ann"), name="oracle")
        load_policy("tiny").save(store.folder(submission.public_id))
        play_out(store, client)
        yield store, board, submissions.find(store, submission.public_id)


@pytest.fixture(scope="module")
def record(played):
    [found] = board_records(*played)
    return found.record, list(found.trajectories())


def test_a_submission_is_written_as_records_that_stand(played, server, tmp_path):
    store, _, submission = played
    done = leaderboard("board", "record", store.data, submission.public_id, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "hold the secret of a season that still lasts" in done.output
    [folder] = records.find(tmp_path)
    found = records.load(folder)
    mine = f"oracle ({submission.public_id})"
    assert [row.agent for row in found.rows] == ["random", mine, "oracle"]
    assert found.rows[1].description["folder"] == ""
    assert found.protocol.seed == SECRET
    policy = ("--policy", store.folder(submission.public_id), "--sample", 2, "--threads", 1)
    checked = leaderboard("verify", folder, "--server", server, *policy)
    assert checked.exit_code == 0, checked.output
    assert "the record stands: 24 episodes were played again" in checked.output
    assert f"{mine}: its policy chose again in 2 of 8 episodes" in checked.output
    shown = leaderboard("show", folder)
    assert mine in shown.output


def reward(episode):
    return {"rewards": (episode.rewards[0] + 1, *episode.rewards[1:])}


def action(episode):
    return {"actions": (("Left",), *episode.actions[1:])}


def seed(episode):
    return {"noise_seed": episode.noise_seed ^ 1}


def digest(episode):
    return {"digest": "0" * 64}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (reward, "reward: the record says"),
        (action, "actions: the record says"),
        (seed, "noise_seed: the record says"),
        (digest, "digest: the record says"),
    ],
)
def test_what_was_changed_in_an_episode_is_found(client, record, change, told):
    whole, trajectories = record
    row = whole.rows[0]
    episodes = [*row.episodes]
    episodes[3] = episodes[3].model_copy(update=change(episodes[3]))
    faults = verify(client, with_episodes(whole, episodes), trajectories=trajectories)
    at = f"random, draw {row.episodes[3].draw}, attempt {row.episodes[3].attempt}"
    assert any(fault.startswith(at) and told in fault for fault in faults), faults


def test_episodes_that_are_missing_or_in_another_order_are_found(client, record):
    whole, _ = record
    episodes = whole.rows[0].episodes
    missing = verify(client, with_episodes(whole, episodes[1:]))
    assert any("the record lacks this episode" in fault for fault in missing)
    swapped = verify(client, with_episodes(whole, [episodes[1], episodes[0], *episodes[2:]]))
    assert any("it is episode 0 of the record, where" in fault for fault in swapped)


def with_episodes(whole, episodes):
    first = whole.rows[0].model_copy(update={"episodes": tuple(episodes)})
    return whole.model_copy(update={"rows": (first, *whole.rows[1:])})


def test_what_is_not_played_to_its_end_has_no_record(tmp_path, client):
    with open_store(tmp_path) as store:
        board = dealt_board(store, client, **SMALL)
        [random, _] = submissions.of_board(store, board)
        with pytest.raises(WrongState, match=r"random \(.*\) is queued; a record is of what has ended"):
            list(board_records(store, board, random))


def test_a_scripted_row_that_cannot_play_says_so_in_the_record(tmp_path):
    words = {"max_turns": 0, "max_actions": 0, "max_actions_per_turn": 0}
    faulty = {"id": "faulty", "split": "all", "instances": 2, "showcase": 0, "limits": words}
    with (
        ServerProcess("--env", "faulty:Faulty", "--splits", "all", path=Path(__file__).parent) as running,
        connect(running.address) as client,
        open_store(tmp_path) as store,
    ):
        board = dealt_board(store, client, environments=[faulty])
        play_out(store, client)
        [found] = board_records(store, board, submissions.of_board(store, board)[0])
        random, oracle = found.record.rows
        assert "its legal actions cannot be listed" in random.unavailable
        assert "it advises nothing" in oracle.unavailable
        assert verify(client, found.record) == []


def test_sealed_episodes_are_checked_but_for_their_digests(tmp_path):
    key = tmp_path / "board.key"
    subprocess.run([sys.executable, "-m", "turngym_server.access.new_seal_key", key], check=True)
    arguments = ("--env", "frozen_lake", "--splits", "held_out", "--seal-key", str(key))
    with (
        ServerProcess(*arguments) as running,
        connect(running.address) as client,
        open_store(tmp_path / "data") as store,
    ):
        board = dealt_board(store, client, **SMALL)
        play_out(store, client, seal_key=read_seal_key(key))
        [random, _] = submissions.of_board(store, board)
        [found] = board_records(store, board, random)
        assert [{episode.sealed for episode in row.episodes} for row in found.record.rows] == [{True}, {False}]
        trajectories = list(found.trajectories())
        assert verify(client, found.record, trajectories=trajectories) == []
        told = unchecked(found.record, [], trajectories=True)
        assert "random: the digests of 8 episodes, whose server was given sealed seeds" in told
        episodes = [*found.record.rows[0].episodes]
        episodes[0] = episodes[0].model_copy(update=reward(episodes[0]))
        assert verify(client, with_episodes(found.record, episodes))


def test_a_sample_is_whole_parts_that_the_secret_draws(played):
    store, board, submission = played
    [environment] = board.environments
    deal = boards.deal(store, environment.id)

    def of(share, secret=SECRET, id=submission.public_id, size=3):
        return drawn(environment, deal, size, share, secret, id)

    assert [len(part.keys) for part in of(SHARE)] in ([3], [2])
    assert sorted(len(part.keys) for part in of(1.0)) == [2, 3, 3]
    assert of(0.0) == []
    assert of(0.6)[: len(of(SHARE))] == of(SHARE)
    assert not any(part.showcase for part in of(1.0))
    assert len({of(1.0, size=1, id=str(k))[0] for k in range(20)}) > 4
    assert len({of(1.0, size=1, secret=k)[0] for k in range(20)}) > 4


def test_a_checkpoint_is_played_anew_when_it_was_played_and_whenever_the_operator_wants(played, server):
    store, _, submission = played
    told = submission.description[TOLD]
    assert told.endswith("of 8 scored episodes, drawn by the board's secret: all came out the same")
    with store.writing() as session:
        of_it = EpisodeRow.submission_id == submission.id
        [first, *_] = session.scalars(select(EpisodeRow).where(of_it, EpisodeRow.showcase.is_(False)))
        kept, number = first.record, first.id
        changed = EpisodeRecord.model_validate_json(kept)
        first.record = changed.model_copy(update=action(changed)).model_dump_json()
    other = leaderboard("board", "replay", store.data, submission.public_id, "--server", server, "--share", 1)
    assert other.exit_code == 1, other.output
    assert str(Anew(8, 8, 1)) in other.output
    assert submissions.find(store, submission.public_id).description[TOLD] == str(Anew(8, 8, 1))
    with store.writing() as session:
        session.execute(update(EpisodeRow).where(EpisodeRow.id == number).values(record=kept))


def test_only_a_checkpoint_with_its_scores_is_played_anew(played, server):
    store, board, _ = played
    [random, *_] = submissions.of_board(store, board)
    done = leaderboard("board", "replay", store.data, random.public_id, "--server", server)
    assert (done.exit_code, "random is a scripted that is scored" in done.output) == (2, True)
