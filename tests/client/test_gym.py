import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import turngym_client.gym
from turngym_client import Limits, Split, connect
from turngym_client.gym import RemoteEnv, UnicodeText, actions_of, noise_seed_of
from turngym_client.gym_vector import RemoteVectorEnv


@pytest.fixture
def client(server):
    with connect(server.address) as client:
        yield client


def served_split(client, environment_id):
    splits = client.environment(environment_id).splits
    return Split.TRAIN if splits[Split.TRAIN].served else Split.ALL


def test_check_env_passes_on_every_environment_served(server, client):
    summaries = client.environments()
    assert len(summaries) >= 2
    for summary in summaries:
        env = gymnasium.make(
            "turngym/Remote-v0",
            address=server.address,
            environment_id=summary.id,
            split=served_split(client, summary.id),
            # The checker takes no episode that is over after one random action, as a bandit's is.
            limits=Limits(max_turns=5, max_actions=5),
            render_mode="ansi",
        )
        check_env(env.unwrapped)
        env.close()


def test_a_seed_chooses_level_and_noise(client):
    env = RemoteEnv(client, "sokoban", render_mode="ansi")
    with pytest.raises(ResetNeeded):
        env.step("Up")
    observation, info = env.reset(seed=7)
    assert (info["level_seed"], info["noise_seed"]) == (7, noise_seed_of(7))
    assert env.render() == observation
    assert "Sokoban" in env.instructions
    following = [env.reset()[1]["level_seed"] for _ in range(2)]
    assert env.reset(seed=7)[0] == observation
    assert [env.reset()[1]["level_seed"] for _ in range(2)] == following
    assert env.reset(seed=7, options={"noise_seed": 3})[1]["noise_seed"] == 3
    env.close()
    assert client.server().version, "a client that was given stays open"


def test_noise_seed_is_pinned():
    # First 8 bytes of `printf turngym-noise/7 | sha256sum`.
    assert noise_seed_of(7) == 0xE2C448A63755C337
    assert noise_seed_of(0) != noise_seed_of(1)


def test_a_text_is_a_turn(client):
    env = RemoteEnv(client, "sokoban")
    env.reset(seed=7)
    assert env.step("Up || Left||")[4]["actions_executed"] == 2
    _, reward, terminated, truncated, info = env.step("  ")
    assert (info["action_valid"], info["success"], terminated, truncated) == (False, None, False, False)
    assert reward < 0
    assert actions_of("a||b", "") == ("a||b",)
    env.close()


def test_what_is_no_action(client):
    env, envs = RemoteEnv(client, "sokoban"), RemoteVectorEnv(client, "sokoban", 4)
    env.reset(seed=7)
    envs.reset(seed=7)
    for action in (None, 0, ["Up"]):
        with pytest.raises(TypeError, match=r"^action is .*, but must be a str"):
            env.step(action)
        with pytest.raises(TypeError, match=r"^actions\[2\] is .*, but must be a str"):
            envs.step(["Up", "Up", action, "Up"])
    for actions in (None, 4, "UpUp", b"UpUp", iter(["Up"] * 4)):
        with pytest.raises(TypeError, match=r"^actions is .*, but must be a sequence of 4 str"):
            envs.step(actions)
    assert [episode.step_index for episode in (env.episode, *envs.episodes)] == [0] * 5
    envs.step(np.array(["Up"] * 4))
    assert [episode.step_index for episode in envs.episodes] == [1] * 4
    env.close()
    envs.close()


def test_unicode_text():
    space = UnicodeText(4)
    assert all(text in space for text in ("", "√__P", "箱"))
    assert "12345" not in space
    assert 3 not in space
    space.seed(1)
    samples = [space.sample() for _ in range(5)]
    space.seed(1)
    assert [space.sample() for _ in range(5)] == samples
    assert all(sample in space for sample in samples)
    assert space == UnicodeText(4)
    assert space != UnicodeText(5)


def test_vector(client):
    envs = RemoteVectorEnv(client, "sokoban", 3)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    with pytest.raises(ResetNeeded):
        envs.step(["Up"] * 3)
    observations, infos = envs.reset(seed=5)
    assert observations in envs.observation_space
    assert infos["level_seed"].tolist() == [5, 6, 7]
    single = RemoteEnv(client, "sokoban")
    assert observations[1] == single.reset(seed=6)[0]
    observations, rewards, terminations, truncations, infos = envs.step(["Up || Left", "fly", "Down"])
    assert single.step("fly")[0] == observations[1]
    assert (rewards.dtype, terminations.dtype, truncations.shape) == (np.float64, np.bool_, (3,))
    assert infos["action_valid"].tolist() == [True, False, True]
    with pytest.raises(ValueError, match="2 actions for 3"):
        envs.step(["Up", "Up"])
    envs.close()


def test_vector_resets_what_the_mask_says(client):
    envs = RemoteVectorEnv(client, "sokoban", 3)
    mask = np.array([True, False, False])
    with pytest.raises(ResetNeeded):
        envs.reset(options={"reset_mask": mask})
    envs.reset(seed=[5, 6, 7])
    for _ in range(4):
        envs.step(["fly"] * 3)
    middle = envs.episodes[1]
    *_, truncations, _ = envs.step(["fly"] * 3)
    assert truncations.all()
    with pytest.raises(ResetNeeded, match=r"\[0, 1, 2\]"):
        envs.step(["Up"] * 3)
    before = middle.state.observation
    observations, infos = envs.reset(seed=[1, None, None], options={"reset_mask": mask})
    assert observations[1] == before
    assert envs.episodes[1] is middle
    assert infos["level_seed"].tolist() == [1, None, None]
    assert infos["_level_seed"].tolist() == [True, False, False]
    with pytest.raises(ResetNeeded, match=r"\[1, 2\]"):
        envs.step(["Up"] * 3)
    for wrong in (np.zeros(3, dtype=bool), np.ones(2, dtype=bool), np.ones(3)):
        with pytest.raises(ValueError, match="reset_mask"):
            envs.reset(options={"reset_mask": wrong})
    envs.close()


def test_everything_registered_is_reachable():
    assert gymnasium.spec("turngym/Remote-v0").entry_point == "turngym_client.gym:RemoteEnv"
    assert turngym_client.gym.RemoteEnv is RemoteEnv
