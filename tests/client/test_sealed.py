"""Sealed episodes through the client and a real server: played, resumed, and hidden."""

import subprocess
import sys

import pytest

from turngym.sealed import Board, Seeds, read_seal_key
from turngym_client import EpisodeRequest, NotServed, Split, connect

SEEDS = Seeds(level_seed=2**63 + 12_345, noise_seed=2**63 + 17)
"""Noise that lets the four turns below be played to their end."""


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "board.key"
    subprocess.run([sys.executable, "-m", "turngym_server.access.new_seal_key", file], check=True)
    return file


def play(episode, turns):
    for turn in range(turns):
        episode.step(["Up", "Left", "Down", "Right"][turn % 4])
    return episode.state.digest


def test_a_sealed_episode_hides_its_seeds_and_outlives_its_server(real_servers, key_file):
    server = real_servers("--env", "frozen_lake", "--splits", "held_out", "--seal-key", str(key_file))
    with connect(server.address, patience=60.0) as client:
        options_json = client.environment("frozen_lake").options_json
        sealed = read_seal_key(key_file).seal(Board("frozen_lake", options_json, "held_out"), SEEDS)
        request = EpisodeRequest(environment_id="frozen_lake", split=Split.HELD_OUT, sealed_seed=sealed)
        undisturbed = client.reset_many([request])[0]
        assert (undisturbed.level_seed, undisturbed.noise) == (None, ())
        assert (undisturbed.instance_id, undisturbed.world_id) == ("", "")
        expected = play(undisturbed, 4)
        shown = client.reset(
            "frozen_lake", split=Split.HELD_OUT, level_seed=SEEDS.level_seed, noise_seed=SEEDS.noise_seed
        )
        play(shown, 4)
        assert shown.state.observation == undisturbed.state.observation
        for refused in (undisturbed.fork, undisturbed.advise):
            with pytest.raises(NotServed, match=r"sealed seed, 4 turns played: .* refused for a sealed session"):
                refused()

        episode = client.reset("frozen_lake", split=Split.HELD_OUT, sealed_seed=sealed)
        play(episode, 2)
        server.kill()
        server.start()
        assert episode.step("Down")
        assert episode.step("Right").digest == expected

        stranger = bytes([sealed[0]]) + bytes(44)
        with pytest.raises(NotServed, match=r"split held_out, sealed seed: the sealed seed cannot be opened"):
            client.reset("frozen_lake", split=Split.HELD_OUT, sealed_seed=stranger)


@pytest.mark.parametrize(
    ("fields", "error", "told"),
    [
        ({"sealed_seed": "text"}, TypeError, "sealed_seed is 'text'"),
        ({"sealed_seed": b""}, ValueError, "sealed_seed is empty"),
        ({"sealed_seed": b"x", "level_seed": 0}, ValueError, "give no level_seed or noise_seed beside it"),
        ({"sealed_seed": b"x", "noise_seed": 0}, ValueError, "give no level_seed or noise_seed beside it"),
    ],
)
def test_requests_that_cannot_be(fields, error, told):
    with pytest.raises(error, match=told):
        EpisodeRequest(environment_id="toy", **fields)
