"""The client against the real server, in a process of its own, which is killed where that matters."""

import asyncio
import threading

import pytest

from turngym_client import (
    CloseReason,
    EndReason,
    EpisodeEnded,
    EpisodeRequest,
    InvalidRequest,
    Limits,
    NotServed,
    ServerBusy,
    ServerUnavailable,
    Split,
    Transition,
    UnknownEnvironment,
    aconnect,
    connect,
)

LONG = Limits(max_turns=50, max_actions=50, max_actions_per_turn=1)
MOVES = ("Up", "Left", "Down", "Right", "Down", "Left", "Up", "Right")


@pytest.fixture
def client(server):
    with connect(server.address) as client:
        yield client


def play(client, seed, turns=4, played=lambda: None):
    """Digests of an episode of fixed moves, the reset's first. Calls `played` after each turn."""
    episode = client.reset("sokoban", level_seed=seed, noise_seed=5, limits=LONG)
    digests = [episode.state.digest]
    while not episode.done and episode.step_index < turns:
        digests.append(episode.step(MOVES[episode.step_index]).digest)
        played()
    episode.close()
    return digests


def test_sync_and_async_play_alike(server, client):
    async def asynchronously():
        digests = []
        async with aconnect(server.address) as client:
            for seed in range(3):
                episode = await client.reset("sokoban", level_seed=seed, noise_seed=5, limits=LONG)
                digests.append([episode.state.digest])
                while not episode.done and episode.step_index < 4:
                    digests[-1].append((await episode.step(MOVES[episode.step_index])).digest)
        return digests

    expected = [play(client, seed) for seed in range(3)]
    assert asyncio.run(asynchronously()) == expected
    assert len({digest for digests in expected for digest in digests}) == sum(map(len, expected))


def test_what_an_environment_tells(client):
    info = client.environment("sokoban", {"boxes": 1}, Limits(max_turns=3))
    assert (info.id, info.family, info.action_separator, info.limits.max_turns) == ("sokoban", "sokoban", "||", 3)
    assert '"boxes":1' in info.options_json
    assert "boxes" in info.options_schema["properties"]
    assert info.splits[Split.TRAIN].served
    assert {"bandit", "sokoban"} <= {summary.id for summary in client.environments()}
    assert client.server().max_batch_items > 0


def test_an_oracle_wins(client):
    episode = client.reset("sokoban", level_seed=3, want_legal_actions=True)
    assert set(episode.state.legal_actions) <= {"Up", "Down", "Left", "Right"}
    assert episode.instructions == client.environment("sokoban").instructions
    while not episode.done:
        advice = episode.advise()
        assert advice.step_index == episode.step_index
        assert advice.ceiling == 1.0
        episode.step(advice.actions)
    assert (episode.state.success, episode.state.end_reason) == (True, EndReason.ENVIRONMENT)
    assert sum(episode.state.action_rewards) == pytest.approx(episode.state.reward)
    with pytest.raises(EpisodeEnded, match="environment"):
        episode.step("Up")


def test_a_wrong_action_is_play(client):
    episode = client.reset("sokoban", level_seed=3)
    for action in ("", "fly", "x" * (1 << 20), "a\0b", "\ud800"):
        state = episode.step(action)
        assert not state.action_valid
        assert state.reward < 0
    assert (state.truncated, state.end_reason, state.success) == (True, EndReason.MAX_TURNS, False)


@pytest.mark.parametrize("sizes", [(100_001, 60_000, 60_000, 1, 1), (1_000,) * 240], ids=["large", "many"])
def test_many_actions_in_a_turn_fail_nobody_else(client, sizes):
    episodes = client.reset_many(
        [EpisodeRequest(environment_id="sokoban", level_seed=seed) for seed in range(len(sizes))]
    )
    turns = [(episode, ["Up"] * size) for episode, size in zip(episodes, sizes, strict=True)]
    results = client.step_many(turns, return_exceptions=True)
    for size, result in zip(sizes, results, strict=True):
        if size > 100_000:
            assert isinstance(result, InvalidRequest)
            assert "more than 100000 fields" in str(result)
        else:
            assert isinstance(result, Transition)
    # Whoever was refused has played nothing and plays on.
    assert all(episode.done or episode.step("Down") for episode in episodes[:3])
    client.close_many(episodes)


def test_a_turn_over_a_messages_bytes_fails_nobody_else(client):
    episodes = client.reset_many([EpisodeRequest(environment_id="sokoban", level_seed=seed) for seed in range(40)])
    turns = [(episode, "Up") for episode in episodes[1:]]
    large = ["x" * (1 << 20)] * 65
    results = client.step_many([(episodes[0], large), *turns], return_exceptions=True)
    assert isinstance(results[0], InvalidRequest)
    assert all(isinstance(result, Transition) for result in results[1:])
    client.close_many(episodes)


def test_a_long_history_of_many_actions_is_resumed(real_servers):
    """What a turn was sent beyond what it runs is part of the history too."""
    server = real_servers("--env", "sokoban", "--lease-seconds", "0.2")
    with connect(server.address) as client:
        caps = client.environment("sokoban").caps
        limits = Limits(max_turns=caps.max_turns, max_actions=caps.max_actions, max_actions_per_turn=1)
        episode = client.reset("sokoban", level_seed=11, noise_seed=1, limits=limits)
        for _ in range(8):
            episode.step(["Up"] * caps.max_actions)
        threading.Event().wait(1.0)
        assert episode.step("Down").action_valid
        assert episode.step_index == 9


def test_refusals(client):
    with pytest.raises(UnknownEnvironment, match="sokoban"):
        client.reset("sokobna")
    with pytest.raises(InvalidRequest, match="boxen"):
        client.reset("sokoban", options={"boxen": 1})
    with pytest.raises(InvalidRequest, match="levels"):
        client.reset("sokoban", options={"levels": "/etc/passwd"})
    with pytest.raises(InvalidRequest):
        client.reset("sokoban", limits=Limits(max_turns=10**6))
    with pytest.raises(InvalidRequest, match="JSON"):
        client.reset("sokoban", options={"boxes": {1}})
    with pytest.raises(ValueError, match="at least one"):
        client.reset("sokoban").step([])


def test_a_split_that_is_not_served(real_servers):
    server = real_servers("--env", "sokoban", "--splits", "train")
    with connect(server.address) as client, pytest.raises(NotServed, match="held_out"):
        client.reset("sokoban", split=Split.HELD_OUT)


def test_forks_go_their_own_ways(client):
    parent = client.reset("sokoban", level_seed=11, noise_seed=1, limits=LONG)
    parent.step("Up")
    same, other = parent.fork(same_noise=True), parent.fork(noise_seed=77)
    assert same.state == parent.state
    assert [segment.noise_seed for segment in other.noise] == [1, 77]
    assert other.noise[-1].from_step == 2
    assert same.step("Left").digest == parent.step("Left").digest
    assert other.step("Left").observation == parent.state.observation
    assert other.state.digest != parent.state.digest
    assert (parent.turns, other.turns) == ((("Up",), ("Left",)), (("Up",), ("Left",)))


def test_many_at_once(client):
    requests = [EpisodeRequest(environment_id="sokoban", level_seed=seed) for seed in range(5)]
    requests.append(EpisodeRequest(environment_id="nothing"))
    *episodes, refusal = client.reset_many(requests, return_exceptions=True)
    assert isinstance(refusal, UnknownEnvironment)
    assert [episode.level_seed for episode in episodes] == list(range(5))
    advice = client.advise_many(episodes)
    states = client.step_many([(episode, each.actions) for episode, each in zip(episodes, advice, strict=True)])
    assert [episode.state for episode in episodes] == states
    episodes[0].close()
    closed, *_ = client.step_many([(episode, "Up") for episode in episodes], return_exceptions=True)
    assert isinstance(closed, EpisodeEnded)
    before = client.server().sessions
    client.close_many(episodes, CloseReason.ABANDONED)
    assert client.server().sessions == before - 4


def test_threads_share_a_client(client):
    digests = {}

    def work(seed):
        digests[seed] = play(client, seed, turns=8)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [digests[seed] for seed in range(4)] == [play(client, seed, turns=8) for seed in range(4)]


def test_closing_the_last_client_stops_the_thread(server):
    def running():
        return [thread for thread in threading.enumerate() if thread.name == "turngym-client"]

    first, second = connect(server.address), connect(server.address)
    episode = first.reset("sokoban", level_seed=1)
    assert len(running()) == 1
    first.close()
    first.close()
    with pytest.raises(ServerUnavailable, match="closed"):
        episode.step("Up")
    episode.close()
    assert second.server().max_sessions > 0
    assert len(running()) == 1
    second.close()
    assert running() == []
    with connect(server.address) as third:
        assert third.server().max_sessions > 0


def test_closing_ends_another_threads_wait():
    client = connect("127.0.0.1:1", patience=600.0)
    raised = []

    def wait():
        try:
            client.server()
        except ServerUnavailable as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not client._run._under_way:
        waiting.join(0.01)
    client.close()
    waiting.join()
    assert len(raised) == 1


def test_resets_that_are_large_together_are_several_calls(client):
    requests = [EpisodeRequest(environment_id="sokoban", options={"note": "x" * 60_000}) for _ in range(400)]
    errors = client.reset_many(requests, return_exceptions=True)
    assert {error.reason for error in errors} == {"INVALID_OPTIONS"}


def test_concurrent_steps_leave_in_few_requests(server):
    async def count():
        async with aconnect(server.address) as client:
            episodes = await client.reset_many(
                [EpisodeRequest(environment_id="sokoban", level_seed=seed, limits=LONG) for seed in range(64)]
            )
            home = episodes[0].session.server
            calls, send = [], home._send_steps

            def counting(request, *options):
                calls.append(len(request.items))
                return send(request, *options)

            home._send_steps = counting
            await asyncio.gather(*(episode.step("Up") for episode in episodes))
            return calls

    calls = asyncio.run(count())
    assert calls[:2] == [32, 32]
    assert sum(calls) <= 2 * 64
    assert len(calls) <= 8


def test_a_killed_server_is_found_again_and_nothing_is_lost_or_played_twice(real_servers, server):
    with connect(server.address) as undisturbed:
        expected = [play(undisturbed, seed, turns=8) for seed in range(6)]
    victim = real_servers("--env", "sokoban")
    digests = {}
    turns = threading.Semaphore(0)
    with connect(victim.address, patience=60.0) as client:

        def work(seed):
            digests[seed] = play(client, seed, turns=8, played=turns.release)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            for _ in range(9):
                turns.acquire()
            victim.kill()
            victim.start()
        for thread in threads:
            thread.join()
    assert [digests[seed] for seed in range(6)] == expected


@pytest.mark.parametrize("operation", ["step", "fork", "advise", "keep_alive", "reset"])
def test_a_server_killed_before_an_operation(real_servers, operation):
    server = real_servers("--env", "sokoban")
    with connect(server.address, patience=60.0) as client:
        episode = client.reset("sokoban", level_seed=11, noise_seed=1, limits=LONG)
        episode.step("Up")
        child = episode.fork(noise_seed=9)
        state = child.step("Left")
        server.kill()
        server.start()
        match operation:
            case "step":
                assert child.step("Down").digest == _undisturbed(client).digest
            case "fork":
                assert child.fork(same_noise=True).state.digest == state.digest
            case "advise":
                assert child.advise().step_index == 2
            case "keep_alive":
                assert child.keep_alive() > 0
            case "reset":
                again = client.reset("sokoban", level_seed=11, noise_seed=1, limits=LONG)
                assert again.step("Up").digest == episode.state.digest
        assert child.turns[:2] == (("Up",), ("Left",))
        assert [segment.from_step for segment in child.noise] == [1, 2]


def _undisturbed(client):
    episode = client.reset("sokoban", level_seed=11, noise_seed=1, limits=LONG)
    episode.step("Up")
    child = episode.fork(noise_seed=9)
    child.step("Left")
    return child.step("Down")


def test_two_servers_and_one_dies(real_servers):
    first, second = real_servers("--env", "sokoban"), real_servers("--env", "sokoban")
    with connect([first.address, second.address], failover=0.3) as client:
        episodes = client.reset_many(
            [EpisodeRequest(environment_id="sokoban", level_seed=seed, noise_seed=1, limits=LONG) for seed in range(8)]
        )
        client.step_many([(episode, "Up") for episode in episodes])
        first.kill()
        client.step_many([(episode, "Left") for episode in episodes if not episode.done])
        assert all(episode.step_index == 2 or episode.done for episode in episodes)


def test_an_expired_lease_is_resumed(real_servers):
    server = real_servers("--env", "sokoban", "--lease-seconds", "0.2")
    with connect(server.address) as client:
        episode = client.reset("sokoban", level_seed=11, noise_seed=1, limits=LONG)
        first = episode.step("Up")
        threading.Event().wait(1.0)
        copy = client.reset("sokoban", level_seed=11, noise_seed=1, limits=LONG)
        assert copy.step("Up").digest == first.digest
        assert episode.step("Left").digest == copy.step("Left").digest


def test_a_full_server_makes_the_client_wait(real_servers):
    server = real_servers("--env", "sokoban", "--max-sessions", "2")
    with connect(server.address, patience=0.5) as client:
        episodes = client.reset_many([EpisodeRequest(environment_id="sokoban", level_seed=seed) for seed in range(2)])
        with pytest.raises(ServerBusy, match="sessions"):
            client.reset("sokoban")
        episodes[0].close()
        client.reset("sokoban")
