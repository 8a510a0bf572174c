"""Whether the guard tells of a collapse in time, and of nothing else: `python experiments/guard_alarms.py`.

The tiny policy on the bandit, from warm starts on an oracle half of whose turns are random:

- five trainings or more for each of three causes of collapse: a learning rate that rises to 0.02 (healthy ones have
  0.0003), many epochs without any clip as the rate rises to 0.001, and a reward that counts any pay as success; all
  with `guard.on_alarm=warn`;
- some of them once more, with `rollback`;
- twenty healthy trainings, of four presets, some of them with a better arm that always pays, so that spread vanishes
  with entropy once it is found.

Writes guard_alarms.json and .txt beside this script: when each collapse began (see `survival.onset`), how many updates
later the first alarm came, and what came of going back. Called again, it goes on with what is left; `--folder` keeps
the warm starts between calls.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import survival
from trainings import Trained, Training, server, train_all

from turngym_trainer.guard import SOLVED_SHARE
from turngym_trainer.process import FinishedTurn

SEEDS: Final[Mapping[str, int]] = {"rate": 7, "no clip": 7, "reward": 5}
"""Of each cause: where not all collapse, or some before the first validation, more of them are needed."""
ROLLED_BACK: Final[Mapping[str, int]] = {"rate": 1, "no clip": 1, "reward": 0}
"""Seeds of each cause that are trained with rollbacks too: a wrong reward is as wrong after going back."""
WITHIN: Final = 15
"""Updates from the onset of a collapse to its alarm."""
FLOOR: Final = 0.5
"""Of the bandit."""

BANDIT: Final = (
    "environment.id=bandit",
    "environment.split=all",
    "validation.split=all",
    "rollout.max_response_tokens=6",
)
SURE: Final = (*BANDIT, "environment.options={high_pays = 1.0}")
"""Its better arm always pays."""
SIZES: Final = (
    "rollout.group_size=8",
    "update.minibatch_episodes=16",
    "critic.warmup_iterations=3",
    "validation.every=3",
    "checkpoint.every=3",
    "checkpoint.keep=5",
)
CAUSES: Final[Mapping[str, tuple[str, ...]]] = {
    "rate": ("update.learning_rate=2e-2", "update.warmup_iterations=49"),
    "no clip": (
        "update.learning_rate=1e-3",
        "update.warmup_iterations=40",
        "update.epochs=8",
        "update.minibatch_episodes=32",
        "update.clip_low=0.99",
        "update.clip_high=1e6",
        "update.dual_clip=1e7",
        "update.gradient_clip=1e6",
    ),
    "reward": (
        "update.learning_rate=1e-4",
        "reward.process=guard_alarms:anything_counts",
    ),
}
PRESETS: Final = ("starpo", "starpo_s", "rloo", "reinforce_pp")
"""Not `grpo`: it divides by a group's spread, so groups in which nobody was lucky speak for the worse arm as loudly as
others for the better one. The training beside these fell to 1.6 %."""


def anything_counts(turn: FinishedTurn) -> float:
    """1 for any pay over 0, as somebody might write who wants rewards binary. The worse arm always pays a little."""
    return 1.0 if turn.reward > 0.0 else 0.0


def start(environment: tuple[str, ...], seed: int) -> tuple[str, ...]:
    return (*environment, f"run.seed={seed}", "warm_start.slips=0.5", "warm_start.episodes=600")


def plan() -> list[Training]:
    """Every training, in the order of what is worth knowing first."""
    return [*_broken("warn"), *_broken("rollback"), *_healthy()]


def _broken(action: str) -> Iterator[Training]:
    for seed in range(max(SEEDS.values())):
        for cause, settings in CAUSES.items():
            if seed >= (SEEDS if action == "warn" else ROLLED_BACK)[cause]:
                continue
            own = (*BANDIT, *SIZES, *settings, "kl.coefficient=0.0", f"run.seed={seed}", "run.iterations=50")
            # By four, not two: these rates are up to sixty times too high.
            guard = (f"guard.on_alarm={action}", "guard.rate_factor=0.25")
            yield Training(f"{cause}, {action}, seed {seed}", (*own, *guard), "grpo", start(BANDIT, seed))


def _healthy() -> Iterator[Training]:
    for name, environment, seeds in (("bandit", BANDIT, range(10, 13)), ("sure", SURE, range(10, 12))):
        for seed in seeds:
            for preset in PRESETS:
                own = (*environment, *SIZES, "update.learning_rate=3e-4", f"run.seed={seed}")
                own = (*own, f"run.iterations={60 if name == 'bandit' else 40}")
                own = (*own, "validation.every=5", "validation.episodes=256", "checkpoint.every=50")
                yield Training(f"healthy, {name}, {preset}, seed {seed}", own, preset, start(BANDIT, seed))


@dataclass(frozen=True, slots=True)
class Told:
    """What the guard made of a training in which something was wrong. Counted in updates.

    Attributes:
        collapse: with which validation it began; None: there was none.
        alarm: the first alarm since the last sound validation; None: there was none. kind: what it told of.
        late: from the collapse to the alarm; under 0: the alarm came before the validation that showed it.
            late_iterations: the same, iterations without an update included.
        early: alarms before the last sound validation.
        best, end: greatest success before the collapse, and the last.
    """

    name: str
    collapse: int | None
    alarm: int | None
    kind: str
    late: int | None
    late_iterations: int | None
    early: int
    best: float
    end: float

    @property
    def in_time(self) -> bool:
        return self.late is not None and self.late <= WITHIN


def told(trained: Trained) -> Told:
    validations = trained.validations
    successes = [validation.success for validation in validations]
    index = survival.onset(successes, FLOOR)
    collapse = None if index is None else validations[index].update
    sound = validations[index - 1].iteration if index else 0
    alarm = min((a for a in trained.alarms if a.iteration > sound), key=lambda a: a.iteration, default=None)
    return Told(
        name=trained.name,
        collapse=collapse,
        alarm=alarm and alarm.update,
        kind=alarm.kind if alarm else "none",
        late=None if collapse is None or alarm is None else alarm.update - collapse,
        late_iterations=None if index is None or alarm is None else alarm.iteration - validations[index].iteration,
        early=sum(a.iteration <= sound for a in trained.alarms),
        best=max(successes[: index or None]),
        end=successes[-1],
    )


def solved(trained: Trained) -> bool:
    """The guard held it for solved at some validation. It knows the ceiling, 1, of the bandit as served by default."""
    return "bandit" in trained.name and any(validation.low >= SOLVED_SHARE for validation in trained.validations)


def table(found: Mapping[str, Trained]) -> str:
    lines = [
        f"{'training':<18} {'best':>6} {'collapse':>8} {'alarm':>6} {'of':<9} {'late':>4} {'clock':>5} {'end':>6}  back"
    ]
    for name, trained in sorted(found.items()):
        if ", warn, " not in name:
            continue
        seen = told(trained)
        line = (
            f"{name.replace(', warn', ''):<18} {seen.best:>6.1%} {_or_dash(seen.collapse):>8} "
            f"{_or_dash(seen.alarm):>6} {seen.kind:<9} {_or_dash(seen.late):>4} "
            f"{_or_dash(seen.late_iterations):>5} {seen.end:>6.1%}"
        )
        if (back := found.get(name.replace("warn", "rollback"))) is not None:
            line += f"   {back.validations[-1].success:>6.1%}, {back.rollbacks} rollbacks"
            line += f", stopped at iteration {back.iterations}" if back.stopped else ""
        lines.append(line)
    lines += [
        "",
        "(late: updates, and by the clock of iterations; back: the end of the same with rollbacks)",
        "",
        f"{'healthy':<32} {'best':>6} {'end':>6} {'solved':>6}  alarms",
    ]
    for name, trained in sorted(found.items()):
        if name.startswith("healthy"):
            best, end = max(v.success for v in trained.validations), trained.validations[-1].success
            alarms = ", ".join(f"{a.kind} at {a.iteration}" for a in trained.alarms) or "none"
            lines.append(f"{name[9:]:<32} {best:>6.1%} {end:>6.1%} {'yes' if solved(trained) else '-':>6}  {alarms}")
    lines += [f"({name}: ended at {found[name].validations[-1].success:.1%})" for name in found if "beside" in name]
    return "\n".join([*lines, "", *sums(found)]) + "\n"


def sums(found: Mapping[str, Trained]) -> list[str]:
    """What it comes to, a line for each cause, one for the healthy trainings."""
    lines: list[str] = []
    for cause in CAUSES:
        warned = {name: told(each) for name, each in found.items() if name.startswith(f"{cause}, warn")}
        collapsed = [name for name, seen in warned.items() if seen.collapse is not None]
        in_time = sum(warned[name].in_time for name in collapsed)
        ends = [(name, found.get(name.replace("warn", "rollback"))) for name in warned]
        higher = [warned[name].end < back.validations[-1].success for name, back in ends if back is not None]
        lines.append(
            f"{cause}: {len(collapsed)} of {len(warned)} collapsed; alarm at most {WITHIN} updates later in {in_time} "
            f"of {len(collapsed)}; with rollback {sum(higher)} of {len(higher)} end higher"
        )
    healthy = [each for name, each in found.items() if name.startswith("healthy")]
    alarmed = sum(bool(each.alarms) for each in healthy)
    lines.append(f"healthy: {alarmed} of {len(healthy)} with an alarm; {sum(map(solved, healthy))} were solved")
    return lines


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps the warm starts; default: a temporary folder")
    arguments = parser.parse_args()
    results = Path(__file__).with_suffix(".json")

    def tell(found: Mapping[str, Trained]) -> None:
        results.with_suffix(".txt").write_text(table(found), encoding="utf-8")

    with server(["bandit"], arguments.folder) as (address, folder):
        found = train_all(plan(), address, folder, results, tell=tell)
    print(table(found), end="")


if __name__ == "__main__":
    main()
