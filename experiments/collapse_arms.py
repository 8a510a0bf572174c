"""Which part of StarPO-S delays collapse: `python experiments/collapse_arms.py --seeds 3`.

After RAGEN (arXiv 2504.20073, section 4.4). Every arm is StarPO (`base`) with one thing changed, or all that StarPO-S
changes; `random` keeps as many groups as the filter does, but any; `few` plays as many episodes as a filter keeps.
Filters take 4 optimiser steps an iteration, as `base` does, or in `… 1 step` one. A small policy (see `small_policy`)
begins as a player that knows the form of an answer and plays at random. Alarms do nothing.

- Each arm has the learning rate of three with which it ended highest on seeds of their own (`--sweep-seeds`).
- With those rates, `--seeds` trainings of every arm, seeds paired.
- The same at the highest of the three rates, where collapse is frequent.
- On a bandit whose bold arm is the worse one (`rare_bandit`): does the filter make the agent choose it?

Writes collapse_arms.json and .txt beside this script. Called again, also with more seeds, it goes on with what is left;
`--folder` keeps the warm starts between calls.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

import survival
from survival import Time
from trainings import Trained, Training, server, train_all

from turngym_leaderboard.statistics import holm, sign_flip

ITERATIONS: Final = 48
SWEEP_ITERATIONS: Final = 24
RATES: Final = (3e-4, 1e-3, 3e-3)
SWEEP_SEED: Final = 100
"""The first seed of the sweep; those of the trainings begin at 0."""
LAST: Final = 3
"""Validations whose mean success is a training's end."""
EPISODES: Final = 64
"""Of a validation."""
FLOOR: Final = 0.5

COMMON: Final = (
    "environment.split=all",
    "validation.split=all",
    "rollout.max_response_tokens=6",
    "rollout.group_size=8",
    "update.minibatch_episodes=16",
    "critic.warmup_iterations=3",
    "validation.every=2",
    f"validation.episodes={EPISODES}",
    "checkpoint.every=1000",
)
START: Final = (
    "policy.model=small",
    "warm_start.slips=1.0",
    "warm_start.max_steps=100",
    "warm_start.check_every=100",
)
_FILTER: Final = ("filter.kind=std", "update.minibatch_episodes=4")
_RANDOM: Final = ("filter.kind=random", "update.minibatch_episodes=4")
_ONE_STEP: Final = ("update.minibatch_episodes=16",)
_NO_KL: Final = ("kl.coefficient=0.0",)
_CLIP: Final = ("update.clip_high=0.28",)
ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    "base": (),
    "filter": _FILTER,
    "no KL": _NO_KL,
    "clip high": _CLIP,
    "StarPO-S": (*_FILTER, *_NO_KL, *_CLIP),
    "random": _RANDOM,
    "few": ("rollout.groups=2", "update.minibatch_episodes=4"),
    "filter 1 step": (*_FILTER, *_ONE_STEP),
    "random 1 step": (*_RANDOM, *_ONE_STEP),
}
RARE_ARMS: Final = ("base", "filter", "random", "StarPO-S")


def training(environment: str, arm: str, rate: float, seed: int, iterations: int = ITERATIONS) -> Training:
    start = (
        "environment.id=bandit",
        *COMMON[:3],
        f"run.seed={seed}",
        "warm_start.slips=1.0",
        "warm_start.episodes=600",
    )
    own = (f"update.learning_rate={rate:g}", f"run.seed={seed}", f"run.iterations={iterations}")
    settings = (f"environment.id={environment}", *COMMON, *ARMS[arm], *own)
    return Training(f"{environment}, {arm}, {rate:g}, seed {seed}", settings, "starpo", start)


def sweep(seeds: int) -> list[Training]:
    """Every arm with every rate."""
    return [
        training("bandit", arm, rate, SWEEP_SEED + number, SWEEP_ITERATIONS)
        for number in range(seeds)
        for arm in ARMS
        for rate in RATES
    ]


def end(trained: Trained) -> float:
    return fmean(validation.success for validation in trained.validations[-LAST:])


def best(trained: Trained) -> float:
    return max(validation.success for validation in trained.validations)


def paired_ends(first: Sequence[Trained], second: Sequence[Trained]) -> list[float]:
    """How much higher each of the second ends than the first of the same seed."""
    return [end(b) - end(a) for a, b in zip(first, second, strict=True)]


def chosen_rates(found: Mapping[str, Trained], seeds: int) -> dict[str, float]:
    """The rate of each arm with the highest mean end over the sweep's seeds; of several alike the lowest."""

    def mean_end(arm: str, rate: float) -> float:
        ends = (end(found[each.name]) for each in _over(arm, rate, range(SWEEP_SEED, SWEEP_SEED + seeds)))
        return round(fmean(ends), 6)

    return {arm: max(RATES, key=lambda rate: (mean_end(arm, rate), -rate)) for arm in ARMS}


def _over(arm: str, rate: float, seeds: Sequence[int], environment: str = "bandit") -> list[Training]:
    return [training(environment, arm, rate, seed) for seed in seeds]


@dataclass(frozen=True, slots=True)
class Panel:
    """Arms on an environment, each with its rate, over the seeds for which all of them are there."""

    title: str
    environment: str
    rates: Mapping[str, float]

    def plan(self, seeds: int) -> list[Training]:
        return [
            training(self.environment, arm, rate, seed) for seed in range(seeds) for arm, rate in self.rates.items()
        ]

    def seeds(self, found: Mapping[str, Trained]) -> list[int]:
        """Those done so far, from 0 on."""
        seeds: list[int] = []
        while all(training(self.environment, arm, rate, len(seeds)).name in found for arm, rate in self.rates.items()):
            seeds.append(len(seeds))
        return seeds

    def of(self, found: Mapping[str, Trained], arm: str) -> list[Trained]:
        over = _over(arm, self.rates[arm], self.seeds(found), self.environment)
        return [found[each.name] for each in over]


def panels(rates: Mapping[str, float]) -> list[Panel]:
    return [
        Panel("bandit, each arm at its own rate", "bandit", rates),
        Panel(f"bandit, all at {RATES[-1]:g}", "bandit", dict.fromkeys(ARMS, RATES[-1])),
        Panel("the bold arm is the worse one", "rare_bandit", {arm: rates[arm] for arm in RARE_ARMS}),
    ]


def times(trainings: Sequence[Trained], clock: Literal["iteration", "optimiser_step"] = "iteration") -> list[Time]:
    """When each collapsed, by a clock."""
    found: list[Time] = []
    for trained in trainings:
        index = survival.onset([validation.success for validation in trained.validations], FLOOR)
        at = trained.validations[-1 if index is None else index]
        found.append(Time(at.iteration if clock == "iteration" else at.optimiser_step, index is not None))
    return found


def table(panel: Panel, found: Mapping[str, Trained]) -> list[str]:
    """One line for each arm, and how much later than the base it collapses."""
    seeds = panel.seeds(found)
    lines = [f"{panel.title}; {len(seeds)} paired seeds", ""]
    if not seeds:
        return lines
    lines.append(
        f"{'arm':<14} {'rate':>6} {'end−floor':>9} {'min':>6} {'max':>6} {'rose':>5} {'collapsed':>9} {'iteration':>9} "
        f"{'step':>5} {'steps':>5} {'played':>6} {'kept':>6} {'clipped':>8}"
    )
    for arm, rate in panel.rates.items():
        trainings = panel.of(found, arm)
        ends, when, steps = (
            [end(each) - FLOOR for each in trainings],
            times(trainings),
            times(trainings, "optimiser_step"),
        )
        last = [trained.validations[-1].optimiser_step for trained in trainings]
        rose = f"{sum(best(each) >= FLOOR + survival.OVER_FLOOR for each in trainings)}/{len(trainings)}"
        collapsed = f"{sum(time.collapsed for time in when)}/{len(when)}"
        lines.append(
            f"{arm:<14} {rate:>6g} {fmean(ends):>+9.3f} {min(ends):>+6.2f} {max(ends):>+6.2f} {rose:>5} "
            f"{collapsed:>9} {survival.restricted_mean(when, ITERATIONS):>9.1f} "
            f"{survival.restricted_mean(steps, max(last)):>5.0f} {fmean(last):>5.0f} "
            f"{fmean(trained.episodes[-1] for trained in trainings):>6.0f} "
            f"{fmean(trained.kept[-1] for trained in trainings):>6.0f} "
            f"{fmean(trained.clipped for trained in trainings):>8.2%}"
        )
    lines.append("(rose: was 10 points over the floor at some validation; only what rose can collapse)")
    lines.append("(iteration, step: restricted mean without collapse, up to the last iteration, and the most steps)")
    others = [arm for arm in panel.rates if arm != "base"]
    base = times(panel.of(found, "base"))
    later = {arm: survival.later(base, times(panel.of(found, arm)), ITERATIONS) for arm in others}
    adjusted = dict(zip(others, holm([later[arm].p_value for arm in others]), strict=True))
    lines += ["", "later than base, iterations (95 % over seeds; p of the sign-flip test, by Holm)"]
    lines += [
        f"{arm:<14} {each.difference:>+6.1f} ({each.low:+.1f} to {each.high:+.1f})  p {each.p_value:.3f}, "
        f"{adjusted[arm]:.3f}"
        for arm, each in later.items()
    ]
    gains = {arm: paired_ends(panel.of(found, "base"), panel.of(found, arm)) for arm in others}
    # The test counts whole episodes.
    p_values = {arm: sign_flip([round(gain * LAST * EPISODES) for gain in of]) for arm, of in gains.items()}
    by_holm = dict(zip(others, holm(list(p_values.values())), strict=True))
    lines += ["", "end higher than base's (95 % over seeds; p of the sign-flip test, by Holm)"]
    for arm, of in gains.items():
        low, high = survival.mean_interval(of)
        lines.append(
            f"{arm:<14} {fmean(of):>+6.3f} ({low:+.3f} to {high:+.3f})  p {p_values[arm]:.3f}, {by_holm[arm]:.3f}"
        )
    lines += ["", "share without collapse, by Kaplan–Meier, after iteration"]
    for arm in panel.rates:
        curve = survival.kaplan_meier(times(panel.of(found, arm)))
        lines.append(f"{arm:<14} " + (", ".join(f"{at:g}: {share:.2f}" for at, share in curve) or "1.00 throughout"))
    return lines


def report(found: Mapping[str, Trained], sweep_seeds: int) -> str:
    rates = chosen_rates(found, sweep_seeds)
    lines = [f"Mean end over {sweep_seeds} seeds of the sweep, {SWEEP_ITERATIONS} iterations; * chosen", ""]
    lines.append(f"{'arm':<14} " + " ".join(f"{rate:>8g}" for rate in RATES))
    for arm in ARMS:
        seeds = range(SWEEP_SEED, SWEEP_SEED + sweep_seeds)
        ends = {rate: fmean(end(found[each.name]) for each in _over(arm, rate, seeds)) for rate in RATES}
        shown = [f"{each:>7.3f}{'*' if rate == rates[arm] else ' '}" for rate, each in ends.items()]
        lines.append(f"{arm:<14} " + " ".join(shown))
    for panel in panels(rates):
        lines += ["", "", *table(panel, found)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="of each panel")
    parser.add_argument("--sweep-seeds", type=int, default=1, help="by which rates are chosen")
    parser.add_argument("--folder", type=Path, help="keeps the warm starts; default: a temporary folder")
    arguments = parser.parse_args()
    results = Path(__file__).with_suffix(".json")

    def tell(found: Mapping[str, Trained]) -> None:
        results.with_suffix(".txt").write_text(report(found, arguments.sweep_seeds), encoding="utf-8")

    # The server imports `rare_bandit` from beside this script.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with server(["bandit", "rare_bandit:RareBandit"], arguments.folder) as (address, folder):
        found = train_all(sweep(arguments.sweep_seeds), address, folder, results)
        # Seed by seed, so that whenever this ends all arms of all panels have as many.
        for seeds in range(1, arguments.seeds + 1):
            for panel in panels(chosen_rates(found, arguments.sweep_seeds)):
                found = train_all(panel.plan(seeds), address, folder, results, tell=tell)
    tell(found)
    print(report(found, arguments.sweep_seeds), end="")


if __name__ == "__main__":
    main()
