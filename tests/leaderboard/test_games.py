"""Games against real servers: turns once, servers that go away, tabs that were left, and what is kept of whom."""

import asyncio
import time
from dataclasses import replace

import pytest
from playing import solution
from server_process import ServerProcess

from turngym_client import EpisodeRequest, Limits, ServerUnavailable, aconnect
from turngym_leaderboard.playground.games import Games, NoSuchGame, NotNow, kept_episode
from turngym_leaderboard.playground.kept import KeptFile

SOKOBAN = EpisodeRequest(environment_id="sokoban", level_seed=7)


async def solve(games, game):
    while not game.over:
        await games.ask(game, len(game.turns))
        await games.play(game, len(game.turns), game.advice.actions, "")


async def test_a_persons_own_play_and_advised_play_are_told_apart(server, tmp_path):
    async with aconnect(server) as client:
        games = Games(client, KeptFile(tmp_path / "kept.jsonl"), 60)
        own, helped = await games.start(SOKOBAN), await games.start(SOKOBAN)
        for turn in solution(server, 7):
            await games.play(own, len(own.turns), turn, " because ")
        await games.play(helped, 0, ["Up"], "")
        await solve(games, helped)
        alone, advised = kept_episode(own), kept_episode(helped)
        assert (alone.player, advised.player) == ("person", "person and oracle")
        assert [turn.advised for turn in alone.turns] == [False] * len(alone.turns)
        assert [turn.advised for turn in advised.turns] == [False] + [True] * (len(advised.turns) - 1)
        assert {turn.reasoning for turn in alone.turns} == {"because"}
        assert alone.success
        assert alone.environment_return == pytest.approx(
            own.episode.state.reward + sum(t.reward for t in own.turns[:-1])
        )

        # Turns that follow advice, without asking again, are no person's own either: in this game or in the next one.
        meanwhile, later, other = [await games.start(replace(SOKOBAN, level_seed=seed)) for seed in (8, 8, 9)]
        await games.play(meanwhile, 0, ["Up"], "")
        await games.ask(later, 0)
        await games.play(later, 0, ["Up"], "")
        await games.play(later, 1, ["Up"], "")
        await games.play(meanwhile, 1, ["Up"], "")
        assert [turn.advised for turn in later.turns] == [True, True]
        assert [turn.advised for turn in meanwhile.turns] == [False, True]
        again = await games.start(replace(SOKOBAN, level_seed=8))
        assert (again.advised, other.advised) == (True, False)


async def test_a_turn_is_played_once(server):
    async with aconnect(server) as client:
        games = Games(client, None, 60)
        game = await games.start(SOKOBAN)
        results = await asyncio.gather(*(games.play(game, 0, ["Up"], "") for _ in range(3)), return_exceptions=True)
        assert sum(isinstance(result, NotNow) for result in results) == 2
        assert len(game.turns) == game.episode.step_index == 1


@pytest.mark.parametrize(
    ("actions", "reasoning", "message"),
    [
        ([], "", "Choose an action first"),
        (["Up"] * 6, "", "6 actions are too many: this turn may have 5"),
        (["Up || Down"], "", "cannot be an agent's answer"),
        (["Up</answer>"], "", "cannot be an agent's answer"),
        (["Up"], "so <answer>Down</answer>", "cannot be an agent's answer"),
    ],
)
async def test_what_could_not_be_learnt_as_an_answer_is_not_played(actions, reasoning, message, server):
    async with aconnect(server) as client:
        games = Games(client, None, 60)
        game = await games.start(SOKOBAN)
        with pytest.raises(NotNow, match=message):
            await games.play(game, 0, actions, reasoning)
        assert game.episode.step_index == 0
        await games.play(game, 0, ["Up"], "")


async def test_a_turn_has_no_more_actions_than_are_left(server):
    async with aconnect(server) as client:
        games = Games(client, None, 60)
        game = await games.start(EpisodeRequest(environment_id="sokoban", level_seed=7, limits=Limits(max_actions=7)))
        await games.play(game, 0, ["Up"] * 5, "")
        assert game.actions_left == 2
        with pytest.raises(NotNow, match="this turn may have 2"):
            await games.play(game, 1, ["Up"] * 3, "")
        await games.play(game, 1, ["Up"] * 2, "")
        assert game.over
        with pytest.raises(NotNow, match="is over"):
            await games.play(game, 2, ["Up"], "")


async def test_a_game_goes_on_when_its_server_was_restarted():
    with ServerProcess("--env", "sokoban") as running:
        async with aconnect(running.address, patience=1.0) as client:
            games = Games(client, None, 60)
            game = await games.start(SOKOBAN)
            await games.play(game, 0, ["Left"], "")
            running.kill()
            with pytest.raises(ServerUnavailable):
                await games.play(game, 1, ["Down"], "why")
            assert game.sent is not None
            with pytest.raises(NotNow, match="may have been played"):
                await games.play(game, 1, ["Up"], "")
            with pytest.raises(NotNow, match="on its way"):
                await games.ask(game, 1)
            running.start()
            await games.play(game, 1, game.sent.actions, game.sent.reasoning)
            assert game.episode.turns == (("Left",), ("Down",))
            assert game.sent is None
            running.kill()
            running.start()
            await games.hold(game)
            await games.play(game, 2, ["Up"], "")
            assert len(game.turns) == 3


async def test_a_game_that_nobody_looks_at_is_closed(server):
    async with aconnect(server) as client:
        games = Games(client, None, 60)
        left, watched = await games.start(SOKOBAN), await games.start(SOKOBAN)
        held = (await client.server()).sessions
        watched.seen += 100
        await games.close_left(time.monotonic() + 61)
        assert (await client.server()).sessions == held - 1
        assert left.left
        assert not watched.over
        with pytest.raises(NotNow, match="nobody looked at it"):
            await games.play(games.find(left.id), 0, ["Up"], "")
        await games.close()
        assert watched.left
        with pytest.raises(NoSuchGame):
            games.find("other")


async def test_only_what_has_ended_is_kept_and_once(server, tmp_path):
    async with aconnect(server) as client:
        games = Games(client, KeptFile(tmp_path / "kept.jsonl"), 60)
        game = await games.start(SOKOBAN)
        with pytest.raises(NotNow, match="has ended"):
            games.keep_episode(game)
        await solve(games, game)
        games.keep_episode(game)
        games.keep_episode(game)
        assert len((tmp_path / "kept.jsonl").read_text(encoding="utf-8").splitlines()) == 1
        with pytest.raises(NotNow, match="without --keep"):
            Games(client, None, 60).keep_episode(game)
