"""What an iteration plays: groups that fared alike, or were lost, are played again on other levels."""

import json

import pytest

from turngym_client import connect
from turngym_trainer import seeds
from turngym_trainer.metrics import read_metrics
from turngym_trainer.policy import load_policy
from turngym_trainer.sample import Source, refill, roll_out, round_place, wanting_groups
from turngym_trainer.seeds import Place
from turngym_trainer.settings import load_config
from turngym_trainer.train import train
from turngym_trainer.trajectory import Trajectory, TurnRecord

SETTINGS = [
    "environment.id=sokoban",
    "environment.max_turns=1",
    "rollout.groups=4",
    "rollout.group_size=2",
    "rollout.context_turns=1",
    "rollout.instructions=none",
    "rollout.max_response_tokens=12",
    "update.minibatch_episodes=8",
    "validation.every=0",
    "run.iterations=3",
    "checkpoint.every=1",
]


def config_of(*settings):
    return load_config(preset="grpo", settings=[*SETTINGS, "kl.coefficient=0", *settings])


def episode(group, member, reward, turns=1):
    turn = TurnRecord("", "", "", ("a",), reward, True, True, 1)
    return Trajectory("sokoban", group, member, 0, 0, "", None, True, False, "", (), (turn,) * turns)


def group_of(group, *rewards):
    return tuple(episode(group, member, reward) for member, reward in enumerate(rewards))


def test_what_is_wanting():
    config = config_of("rollout.group_size=4", "rollout.groups=6")
    groups = {
        0: group_of(0, 1.0, 0.0, 0.0, 0.0),
        1: group_of(1, 1.0, 1.0, 1.0, 1.0),  # Constant.
        2: group_of(2, 1.0, 0.0),  # Half of it is enough.
        3: group_of(3, 1.0),  # Lost more than half.
        5: (episode(5, 0, 1.0, turns=0), *group_of(5, 0.0)),  # An episode without a turn is none.
    }
    assert wanting_groups(groups, config, config.rollout.groups) == [1, 3, 4, 5]
    assert wanting_groups({}, config, 6) == [0, 1, 2, 3, 4, 5]


def test_what_makes_groups_wanting_is_what_the_filter_looks_at():
    spoilt = TurnRecord("", "", "", ("a",), 1.0, False, False, 1)
    groups = {0: (episode(0, 0, 1.0), Trajectory("sokoban", 0, 1, 0, 0, "", None, True, False, "", (), (spoilt,)))}
    assert wanting_groups(groups, config_of("rollout.groups=1", "update.minibatch_episodes=2"), 1) == []
    on_task = config_of("rollout.groups=1", "update.minibatch_episodes=2", "filter.on=task")
    assert wanting_groups(groups, on_task, 1) == [0]


def test_refilling_keeps_whole_groups():
    before = {0: group_of(0, 1.0, 1.0, 1.0), 1: group_of(1, 2.0), 2: group_of(2, 3.0), 4: group_of(4, 5.0, 6.0, 7.0)}
    played = [*group_of(0, 8.0), *group_of(1, 9.0, 9.0), *group_of(2, 4.0), *group_of(3, 5.0, 5.0, 5.0)]
    merged, dropped = refill(before, played, group_size=3)
    assert merged == {
        0: before[0],  # The new one lost too many.
        1: group_of(1, 9.0, 9.0),
        2: group_of(2, 4.0),  # Neither is whole: the last one counts.
        3: group_of(3, 5.0, 5.0, 5.0),
        4: before[4],
    }
    assert dropped == 3


def test_rounds_of_all_rollbacks_have_attempts_of_their_own():
    config = config_of("rollout.refills=2")
    places = [round_place(Place(7, rollback), number, config) for rollback in range(3) for number in range(3)]
    assert places == [Place(7, attempt) for attempt in range(9)]


def sample(server, novice, config, place):
    with connect(server) as client:
        source = Source("", config, version="", max_turns=config.environment.max_turns)
        return roll_out(load_policy(str(novice)), client, config, place, sources=[source])


def test_rounds_go_on_until_no_group_is_wanting_or_the_cap(server, novice):
    longer = ["environment.max_turns=2"]
    config = config_of(*longer, "rollout.refills=6")
    place = Place(1)
    once = sample(server, novice, config_of(*longer), place)
    first = wanting_groups({g: tuple(t for t in once.trajectories if t.group == g) for g in range(4)}, config, 4)
    assert 0 < len(first) < 4
    assert (once.rounds, once.refilled) == (1, 0)
    full = sample(server, novice, config, place)
    assert full.rounds > 1
    assert full.refilled >= len(first)
    assert [(t.group, t.member) for t in full.trajectories] == [(g, m) for g in range(4) for m in range(2)]
    groups = {g: tuple(t for t in full.trajectories if t.group == g) for g in range(4)}
    assert wanting_groups(groups, config, config.rollout.groups) == [] or full.rounds == 7
    for before, after in zip(once.trajectories, full.trajectories, strict=True):
        if before.group in first:
            of_rounds = [seeds.level_seed(0, 1, attempt, after.group) for attempt in range(1, full.rounds)]
            assert after.level_seed in of_rounds
            attempt = 1 + of_rounds.index(after.level_seed)
            assert after.noise_seed == seeds.noise_seed(0, 1, attempt, after.group, after.member)
        else:
            assert before.digest == after.digest
    capped = sample(server, novice, config_of("rollout.refills=1", "rollout.temperature=0.01"), place)
    assert (capped.rounds, capped.refilled) == (2, 4)  # Nearly greedy members play alike whatever the level.


def test_a_run_that_refills_resumes_as_exactly(server, novice, tmp_path):
    class Interruption(Exception):
        pass

    def stop(metrics):
        if metrics["iteration"] == 2:
            raise Interruption

    lines, episodes = [], []
    for name in ("whole", "cut"):
        folder = tmp_path / name
        settings = [f"run.server={server}", f"run.folder={folder}", f"policy.model={novice}", "rollout.refills=2"]
        config = config_of(*settings)
        if name == "cut":
            with pytest.raises(Interruption):
                train(config, observe=stop)
        train(config, resume=name == "cut")
        lines.append([{k: v for k, v in line.items() if k != "clock"} for line in read_metrics(folder)])
        episodes.append((folder / "trajectories.jsonl").read_text())
    assert lines[0] == lines[1]
    assert episodes[0] == episodes[1]
    assert max(line["train/rounds"] for line in lines[0]) > 1
    assert sum(line["train/refilled_groups"] for line in lines[0]) > 0
    assert len({json.loads(episode)["level_seed"] for episode in episodes[0].splitlines()}) == 3 * 4
