"""What a board is: definition, secret, instances, who may see what, and the commands that make and end one."""

import json
import re

import pytest
from small_boards import SECRET, dealt_board, definition, play_out, submitted
from typer.testing import CliRunner

from turngym_client import Limits, Split, connect
from turngym_leaderboard import seeds
from turngym_leaderboard.boards import WORLDS_PER_INSTANCE, BoardError, load_definition
from turngym_leaderboard.cli import app
from turngym_leaderboard.dealing import deal_board, new_secret
from turngym_leaderboard.evaluation import CannotEvaluate
from turngym_leaderboard.protocol import Decoding, select_instances
from turngym_leaderboard.store import boards, open_store, owners, submissions
from turngym_leaderboard.store.values import Kind, State, Visibility
from turngym_leaderboard.visibility import EVERYBODY, Viewer, may_change, may_see_episode, may_see_submission

TOML = """
name = "lakes"
title = "Lakes"
season = "one"
sealed = false

[[environments]]
id = "frozen_lake"
instances = 3
attempts = 2
showcase = 1
limits = { max_turns = 4 }

[[environments]]
id = "frozen_lake"
label = "frozen_lake-greedy"
instances = 3
showcase = 0
greedy = true
overall = false
"""


@pytest.fixture
def file(tmp_path):
    written = tmp_path / "board.toml"
    written.write_text(TOML)
    return written


@pytest.fixture(scope="module")
def client(server):
    with connect(server) as connected:
        yield connected


def test_a_definition_is_read_with_its_defaults(file):
    read = load_definition(file)
    assert (read.slug, read.episodes, read.submissions_per_owner) == ("lakes-one", 3 * 2 + 1 + 3, 10)
    sampled, greedy = read.environments
    assert (sampled.label, sampled.split, sampled.overall) == ("frozen_lake", Split.HELD_OUT, True)
    assert (greedy.decoding, sampled.decoding) == (Decoding(greedy=True), Decoding())
    protocol = sampled.protocol(SECRET, version="1.0")
    assert protocol.limits == Limits(max_turns=4, max_actions=10, max_actions_per_turn=5)
    assert (protocol.secret, protocol.version) == (str(SECRET).encode(), "1.0")
    assert type(read).model_validate(json.loads(read.model_dump_json())) == read


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("season", "seasons"), r"board\.toml defines no board: season: Field required"),
        (('"lakes"', '"../lakes"'), "name: String should match pattern"),
        (('"Lakes"', '"La\\nkes"'), "title: String should match pattern"),
        (("instances = 3", "instances = 1"), r"environments\.0\.instances: .*greater than or equal to 2"),
        (("attempts", "tries"), r"environments\.0\.tries: Extra inputs"),
        (("greedy = true", "temperature = 0"), "temperature 0 must be over 0"),
        (('label = "frozen_lake-greedy"', ""), "two environments are called 'frozen_lake'"),
        (("showcase = 1", "showcase = 1\noverall = false"), "no environment counts in the overall score"),
        (("[[environments]]", "[[environments"), "is no TOML"),
    ],
)
def test_a_definition_that_is_none_says_where(file, change, told):
    file.write_text(TOML.replace(*change))
    with pytest.raises(BoardError, match=told):
        load_definition(file)


def test_instances_follow_from_the_secret_and_the_showcase_holds_other_worlds(client):
    made = definition(environments=[{"id": "frozen_lake", "instances": 5, "showcase": 3}])
    [dealt] = deal_board(client, made, SECRET, sessions=7)
    [again] = deal_board(client, made, SECRET, sessions=128)
    assert dealt == again
    assert (len(dealt.scored.instances), len(dealt.showcase)) == (5, 3)
    for instance in (*dealt.scored.instances, *dealt.showcase):
        assert instance.level_seed == seeds.level_seed(str(SECRET).encode(), "frozen_lake", instance.draw)
    worlds = [instance.world_id for instance in (*dealt.scored.instances, *dealt.showcase)]
    assert len(set(worlds)) == 8
    assert dealt.scored == select_instances(client, made.environments[0].protocol(SECRET))
    [other] = deal_board(client, made, SECRET + 1)
    assert {i.level_seed for i in other.scored.instances}.isdisjoint(i.level_seed for i in dealt.scored.instances)
    assert new_secret() != new_secret()
    assert new_secret().bit_length() > 200


def test_a_sealed_board_needs_a_hundred_times_its_worlds(client):
    few = [{"id": "sokoban", "instances": 12}]
    worlds = client.environment("sokoban").splits[Split.HELD_OUT].worlds
    assert 200 < worlds < 1_200
    with pytest.raises(BoardError, match=r"'sokoban': a sealed board of 12 instances needs 1,200 worlds, but"):
        deal_board(client, definition(sealed=True, environments=few), SECRET)
    uncounted = [{"id": "bandit", "split": "all", "instances": 2}]
    with pytest.raises(BoardError, match=r"needs 200 worlds, but split all has 1; play fewer"):
        deal_board(client, definition(sealed=True, environments=uncounted), SECRET)
    with pytest.raises(BoardError, match="1 distinct worlds of split all were found, but 2 are to be scored"):
        deal_board(client, definition(environments=uncounted), SECRET)
    [dealt] = deal_board(client, definition(sealed=True, environments=[{"id": "sokoban", "instances": 2}]), SECRET)
    assert len(dealt.scored.instances) == 2


@pytest.mark.parametrize(
    ("id", "options", "most"),
    [
        ("sokoban", {}, 9),
        ("frozen_lake", {}, 64),
        ("bandit", {"names": "pairs"}, 4),
        ("frozen_lake", {"slip": 0.1}, 0),
    ],
)
def test_a_sealed_board_has_as_many_instances_as_the_readme_says(client, id, options, most):
    worlds = client.environment(id, options=options).splits[Split.HELD_OUT].worlds or 0
    assert int(worlds) // WORLDS_PER_INSTANCE == most


def test_a_split_that_is_not_served_is_told(server_without_held_out):
    with (
        connect(server_without_held_out) as connected,
        pytest.raises(CannotEvaluate, match="'sokoban': the server does not serve split held_out"),
    ):
        deal_board(connected, definition(environments=[{"id": "sokoban"}]), SECRET)


def test_who_may_see_what(tmp_path, client):
    with open_store(tmp_path) as store:
        ann, bob = owners.create(store, "ann"), owners.create(store, "bob")
        sealed = dealt_board(store, client, "sealed", sealed=True)
        plain = dealt_board(store, client, "plain")
        private = submitted(store, sealed, ann)
        public = submissions.set_visibility(store, submitted(store, sealed, ann).public_id, Visibility.PUBLIC)
        row = submissions.of_board(store, sealed)[0]
        everybody, owner, stranger, admin = EVERYBODY, Viewer(ann.id), Viewer(bob.id), Viewer(bob.id, admin=True)
        viewers = (everybody, stranger, owner, admin)

        assert [may_see_submission(v, private) for v in viewers] == [False, False, True, True]
        assert [may_see_submission(v, public) for v in viewers] == [True] * 4
        assert [may_change(v, public) for v in viewers] == [False, False, True, True]
        assert [may_change(v, row) for v in viewers] == [False, False, False, True]

        def seen(board, submission, showcase):
            return [may_see_episode(v, board, submission, showcase=showcase) for v in viewers]

        assert seen(sealed, public, False) == [False, False, False, True]
        assert seen(sealed, private, False) == [False, False, False, True]
        assert seen(sealed, public, True) == [True] * 4
        assert seen(sealed, private, True) == [False, False, True, True]
        assert seen(plain, public, False) == [True] * 4
        assert seen(plain, private, False) == [False, False, True, True]
        for each in submissions.of_board(store, sealed):
            submissions.set_state(store, each.public_id, State.FAILED)
        closed = boards.close(store, sealed.slug)
        assert seen(closed, public, False) == [True] * 4
        assert seen(closed, private, False) == [False, False, True, True]


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_commands_make_a_board_and_end_its_season(server, client, file, tmp_path):
    data = tmp_path / "data"
    made = run("board", "new", data, file, "--server", server)
    assert made.exit_code == 0, made.output
    promised = re.search(r"board lakes-one: 10 episodes a submission, SHA-256 of its secret (\w{64})", made.stdout)
    again = run("board", "new", data, file, "--server", server)
    assert (again.exit_code, "dealing" in again.stdout) == (2, False)
    assert again.stderr == (
        "leaderboard: there is a board 'lakes-one' already; a new season needs another name for it\n"
    )
    with open_store(data) as store:
        board, ann = boards.find(store, "lakes-one"), owners.create(store, "ann")
        failed, left = (
            submissions.create(store, board, ann, name=name, kind=Kind.CHECKPOINT) for name in ("[red]", "[left]")
        )
        for state in (State.VALIDATED, State.QUEUED, State.FAILED):
            submissions.set_state(store, failed.public_id, state, reason="no weights")
    early = run("board", "close", data, "lakes-one")
    assert early.exit_code == 2
    told, refused = early.stderr.splitlines()
    assert told == f"leaderboard: [left] of ann ({left.public_id}): the season ended before all of it had arrived"
    assert re.search(
        r"nothing more is submitted to lakes-one, but a worker has still to finish random \(\w+, queued\), ", refused
    )
    assert "lakes-one: Lakes (ending)" in run("board", "list", data).stdout
    with open_store(data) as store:
        play_out(store, client)
    listed = run("board", "list", data)
    assert re.search(r"oracle .* scored .* 10/10", listed.stdout)
    assert "[red]" in listed.stdout
    retried = run("board", "retry", data, failed.public_id)
    assert retried.stdout == "[red] is queued; 0 of 10 episodes are played\n"
    with open_store(data) as store:
        submissions.set_state(store, failed.public_id, State.FAILED)
    closed = run("board", "close", data, "lakes-one")
    secret = re.search(r"its secret was (\d+)", closed.stdout)[1]
    assert boards.hash_of(secret) == promised[1]
    unknown = run("board", "close", data, "lakes-two")
    assert unknown.stderr == "leaderboard: there is no board 'lakes-two'\n"
