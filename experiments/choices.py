"""What single choices change in a training: `python experiments/choices.py --seeds 5`.

Sokoban 6×6, a small policy (see `small_policy`) warm-started on an oracle that errs, then the base training: groups of
8, `grpo`, the paper's filter, 5 turns of at most 5 actions, 10 actions in all, 256 episodes an iteration. Every arm is
the base with one choice made otherwise, on paired seeds:

- the advantage estimator, all else alike, the learning rate too;
- the horizon: episodes of 2 turns throughout, or growing from 2 over 3 to 5 (ScalingInter-RL, AgentGym-RL,
  arXiv 2509.08755); validation always allows 5;
- diversity: more episodes of fewer levels, or fewer of more, at the same number of episodes;
- granularity: turns of fewer actions with the same 10 actions an episode; validation allows the same;
- freshness: one policy version collects for 2 or 4 iterations.

An arm's end is the mean success of its last validations, on levels of split `validation`. Writes choices.json and .txt
beside this script. Called again, also with more seeds, it goes on with what is left; `--folder` keeps the warm starts.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Final

import survival
from trainings import Trained, Training, server, train_all

from turngym_leaderboard.statistics import holm, sign_flip

ITERATIONS: Final = 60
LAST: Final = 2
"""Validations whose mean success is a training's end."""
EPISODES: Final = 512
"""Of a validation."""
BASE: Final = "base"

WORLDS: Final = ("environment.id=sokoban", "environment.max_turns=5", "environment.max_actions=10")
START: Final = (
    *WORLDS,
    "environment.max_actions_per_turn=5",
    "policy.model=small",
    "rollout.max_response_tokens=12",
    "warm_start.slips=0.3",
    "warm_start.detours=0.3",
    "warm_start.episodes=8000",
    "warm_start.batch_rows=128",
    "warm_start.schedule=cosine",
    "warm_start.max_steps=600",
    "warm_start.check_every=600",
)
COMMON: Final = (
    *WORLDS,
    "environment.max_actions_per_turn=5",
    "rollout.max_response_tokens=12",
    "rollout.groups=32",
    "rollout.group_size=8",
    "advantage.kind=grpo",
    "update.learning_rate=1e-3",
    "update.schedule=linear",
    "update.minibatch_episodes=32",
    "validation.every=15",
    f"validation.episodes={EPISODES}",
    "checkpoint.every=1000",
    f"run.iterations={ITERATIONS}",
)
ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    BASE: (),
    "gae": ("advantage.kind=gae",),
    "bi_level_gae": ("advantage.kind=bi_level_gae", "advantage.gamma_turn=0.95"),
    "dr_grpo": ("advantage.kind=dr_grpo", "update.aggregation=length-limit"),
    "rloo": ("advantage.kind=rloo",),
    "reinforce_pp": ("advantage.kind=reinforce_pp",),
    "2 turns": ("horizon.turns=[2]",),
    "2, 3, 5 turns": ("horizon.turns=[2, 3, 5]", "horizon.iterations=20"),
    "8 levels × 32": ("rollout.groups=8", "rollout.group_size=32"),
    "128 levels × 2": ("rollout.groups=128", "rollout.group_size=2"),
    "10 turns of 1 action": ("environment.max_turns=10", "environment.max_actions_per_turn=1"),
    "5 turns of 2 actions": ("environment.max_actions_per_turn=2",),
    "1 turn of 10 actions": ("environment.max_turns=1", "environment.max_actions_per_turn=10"),
    "reuse 2": ("rollout.reuse=2",),
    "reuse 4": ("rollout.reuse=4",),
}


def training(arm: str, seed: int) -> Training:
    seeded = f"run.seed={seed}"
    return Training(f"{arm}, seed {seed}", (*COMMON, *ARMS[arm], seeded), "starpo_s", (*START, seeded))


def end(trained: Trained) -> float:
    return fmean(validation.success for validation in trained.validations[-LAST:])


def complete(found: Mapping[str, Trained]) -> list[int]:
    """Seeds of which every arm has been trained, from 0 on."""
    seeds: list[int] = []
    while all(training(arm, len(seeds)).name in found for arm in ARMS):
        seeds.append(len(seeds))
    return seeds


def report(found: Mapping[str, Trained]) -> str:
    seeds = complete(found)
    if not seeds:
        return "no seed is complete yet\n"
    ends = {arm: [end(found[training(arm, seed).name]) for seed in seeds] for arm in ARMS}
    gains = {
        arm: [mine - base for mine, base in zip(ends[arm], ends[BASE], strict=True)] for arm in ARMS if arm != BASE
    }
    # The test counts whole episodes.
    p_values = {arm: sign_flip([round(gain * LAST * EPISODES) for gain in each]) for arm, each in gains.items()}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    head = f"{'arm':<22} {'end':>6} {'least':>6} {'most':>6}  {'− base':>6}  {'95 %':<16} {'p':>5} {'Holm':>5}"
    lines = [
        f"{len(seeds)} paired seeds, {ITERATIONS} iterations: success at the end, and less the base's",
        "(95 % over seeds; p of the sign-flip test, and by Holm over the arms)",
        "",
        f"{head} {'seconds':>7}",
    ]
    for arm, of in ends.items():
        seconds = fmean(found[training(arm, seed).name].seconds for seed in seeds)
        line = f"{arm:<22} {fmean(of):>6.1%} {min(of):>6.1%} {max(of):>6.1%}"
        if arm == BASE:
            lines.append(f"{line}  {'':>6}  {'':<16} {'':>5} {'':>5} {seconds:>7.0f}")
            continue
        low, high = survival.mean_interval(gains[arm])
        lines.append(
            f"{line}  {fmean(gains[arm]):>+6.3f}  {f'{low:+.3f} to {high:+.3f}':<16} {p_values[arm]:>5.3f} "
            f"{adjusted[arm]:>5.3f} {seconds:>7.0f}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="keeps the warm starts; default: a temporary folder")
    arguments = parser.parse_args()
    results = Path(__file__).with_suffix(".json")

    def tell(found: Mapping[str, Trained]) -> None:
        results.with_suffix(".txt").write_text(report(found), encoding="utf-8")

    with server(["sokoban"], arguments.folder, splits="train,validation") as (address, folder):
        # Seed by seed, so that whenever this ends all arms have as many.
        plan = [training(arm, seed) for seed in range(arguments.seeds) for arm in ARMS]
        found = train_all(plan, address, folder, results, tell=tell)
    tell(found)
    print(report(found), end="")


if __name__ == "__main__":
    main()
