"""Every served environment plays the same episode to the same digests, wherever and beside whomever it is played.

Over the registry, through real servers in processes of their own: a new environment is held to it by being registered.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from server_process import ServerProcess

from turngym_client import Client, Episode, EpisodeRequest, Split, connect
from turngym_server.discovery import find_specs

IDS = [spec.id for spec in find_specs(["all"])]
LEASE_SECONDS = 1.0
LEVEL_SEED, NOISE_SEED = 2**64 - 5, 2**63 + 11


@contextmanager
def serve(hash_seed: str, *options: str) -> Iterator[Client]:
    arguments = ("--env", "all", "--splits", "all", *options)
    running = ServerProcess(*arguments, environment={"PYTHONHASHSEED": hash_seed})
    with running, connect(running.address) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serve("0") as client:
        yield client


@pytest.fixture(scope="module")
def other_client() -> Iterator[Client]:
    with serve("1", "--lease-seconds", str(LEASE_SECONDS)) as client:
        yield client


@pytest.fixture(scope="module")
def workers_client() -> Iterator[Client]:
    with serve("2", "--workers", "3") as client:
        yield client


@pytest.fixture(scope="module")
def isolated_client() -> Iterator[Client]:
    with serve("3", "--isolate", "all") as client:
        yield client


def begin(client: Client, id: str) -> Episode:
    return client.reset(id, split=Split.ALL, level_seed=LEVEL_SEED, noise_seed=NOISE_SEED, want_legal_actions=True)


def choose(episode: Episode) -> list[str]:
    """Something to play: legal actions in turn, and nonsense every third turn."""
    legal = episode.state.legal_actions or ("1",)
    turn = episode.step_index
    return ["nonsense"] if turn % 3 == 1 else [legal[(turn + offset) % len(legal)] for offset in range(1 + turn % 2)]


def play(episode: Episode, turns: int = 1_000) -> list[bytes]:
    """Digests of at most so many further turns."""
    digests: list[bytes] = []
    while not episode.done and len(digests) < turns:
        digests.append(episode.step(choose(episode), want_legal_actions=True).digest)
    return digests


@pytest.fixture(scope="module")
def alone(client: Client) -> dict[str, list[bytes]]:
    """Digests of one episode of each environment, its reset first, with nobody else at the server."""
    digests: dict[str, list[bytes]] = {}
    for each in IDS:
        episode = begin(client, each)
        digests[each] = [episode.state.digest, *play(episode)]
        episode.close()
    return digests


@pytest.mark.parametrize("id", IDS)
def test_beside_63_other_sessions(client: Client, alone: dict[str, list[bytes]], id: str) -> None:
    requests = [
        EpisodeRequest(environment_id=id, split=Split.ALL, level_seed=seed, noise_seed=seed) for seed in range(63)
    ]
    requests.insert(
        31, EpisodeRequest(environment_id=id, split=Split.ALL, level_seed=LEVEL_SEED, noise_seed=NOISE_SEED)
    )
    episodes = client.reset_many(requests, want_legal_actions=True)
    ours = episodes[31]
    digests = [ours.state.digest]
    while playing := [episode for episode in episodes if not episode.done]:
        client.step_many([(episode, choose(episode)) for episode in playing], want_legal_actions=True)
        if ours in playing:
            digests.append(ours.state.digest)
    client.close_many(episodes)
    assert digests == alone[id]


@pytest.mark.parametrize("id", IDS)
def test_in_another_process_under_another_hash_seed(
    other_client: Client, alone: dict[str, list[bytes]], id: str
) -> None:
    episode = begin(other_client, id)
    assert [episode.state.digest, *play(episode)] == alone[id]


@pytest.mark.parametrize("id", IDS)
def test_in_each_of_several_workers(workers_client: Client, alone: dict[str, list[bytes]], id: str) -> None:
    request = EpisodeRequest(environment_id=id, split=Split.ALL, level_seed=LEVEL_SEED, noise_seed=NOISE_SEED)
    episodes = workers_client.reset_many([request] * 3, want_legal_actions=True)
    assert [[episode.state.digest, *play(episode)] for episode in episodes] == [alone[id]] * 3
    workers_client.close_many(episodes)


@pytest.mark.parametrize("id", IDS)
def test_in_a_process_of_its_own(isolated_client: Client, alone: dict[str, list[bytes]], id: str) -> None:
    episode = begin(isolated_client, id)
    assert [episode.state.digest, *play(episode)] == alone[id]
    episode.close()


@pytest.mark.parametrize("id", IDS)
def test_after_a_fork(client: Client, alone: dict[str, list[bytes]], id: str) -> None:
    for turns in range(len(alone[id])):
        original = begin(client, id)
        before = [original.state.digest, *play(original, turns)]
        if original.done:
            break
        copy = original.fork(same_noise=True)
        copy_digests = play_as(copy, alone_choices(client, id)[turns:])
        assert [*before, *copy_digests] == alone[id]
        assert [*before, *play(original)] == alone[id]


def alone_choices(client: Client, id: str) -> list[tuple[str, ...]]:
    """The turns of the episode played alone."""
    episode = begin(client, id)
    play(episode)
    return list(episode.turns)


def play_as(episode: Episode, turns: list[tuple[str, ...]]) -> list[bytes]:
    return [episode.step(actions).digest for actions in turns]


@pytest.mark.parametrize("id", IDS)
def test_after_a_replay(client: Client, other_client: Client, alone: dict[str, list[bytes]], id: str) -> None:
    turns = alone_choices(client, id)
    half = len(turns) // 2
    episode = begin(other_client, id)
    digests = [episode.state.digest, *play_as(episode, turns[:half])]
    ends = time.monotonic() + 30 * LEASE_SECONDS
    while other_client.server().sessions and time.monotonic() < ends:
        time.sleep(LEASE_SECONDS / 4)
    assert other_client.server().sessions == 0  # The lease is over: the next step is a replay.
    assert [*digests, *play_as(episode, turns[half:])] == alone[id]
