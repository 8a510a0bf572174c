"""Rollouts that keep keys and values from turn to turn, beside rollouts that run every prompt whole.

A policy plays Sokoban at a server in a process of its own with full history, by the trainer's own rollout. Its answers
are noise and never end by themselves, so that each has as many tokens: a tenth of those that an observation has with
what the chat format puts around it, in the mean over boards of two sizes. Whole rollouts are timed, environment and
network with them, in turns, the first of each pair being the second of the next; ratios are taken within a pair, of
wall clock and of this process's CPU time. One pair before is left out. Both ways must have sampled the same tokens,
with log-probabilities that differ by rounding only, or there is no result.

    python benchmarks/rollout_cache.py

Goal: twice as fast by the wall clock. A policy whose weights are not installed is named as left out. Prints the
results; writes them beside this file as .txt, and as .json with what made them. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import measure
import numpy as np
import torch

from turngym_client import Client, EpisodeRequest, Limits, connect
from turngym_trainer import seeds
from turngym_trainer.context import Context
from turngym_trainer.policy import Policy, PolicyError, load_policy
from turngym_trainer.rollout import Planned, Rollout, Sampling, collect

TURNS: Final = 5
SIDES: Final = (10, 12)
"""Of boards, one group the one, the next the other: rows of unequal length, and padding between their turns."""
OBSERVATION_PER_ACTION: Final = 10
GOAL: Final = 2.0
ROUNDING: Final = 1e-3
CONTEXT: Final = Context(turns=0, instructions="none")


@dataclass(frozen=True)
class Case:
    """A policy, and how many episodes it plays at once."""

    policy: str
    groups: int
    group_size: int


CASES: Final = (Case("tiny", 8, 8), Case("smollm2", 4, 2))


@dataclass(frozen=True)
class Timed:
    """One rollout. Seconds of wall clock and of this process's CPU time."""

    seconds: float
    cpu_seconds: float
    rollout: Rollout


@dataclass(frozen=True)
class Row:
    """Results of a case.

    Attributes:
        answer_tokens: of every turn.
        observation_tokens: of a turn, as the policy reads it, in the mean.
        context_tokens: of an episode at its end, in the mean.
        kept, whole: seconds of a rollout with the kept cache and without.
        faster, cpu_faster: seconds without the kept cache over those with it, within a pair.
        difference: the most that a log-probability differs by.
    """

    policy: str
    episodes: int
    answer_tokens: int
    observation_tokens: float
    context_tokens: float
    kept: dict[str, float]
    whole: dict[str, float]
    faster: dict[str, float]
    cpu_faster: dict[str, float]
    difference: float

    @property
    def reached(self) -> bool:
        return self.faster["median"] >= GOAL


def plan_of(case: Case) -> list[Planned]:
    return [
        Planned(
            EpisodeRequest(
                environment_id="sokoban",
                options={"width": side, "height": side, "boxes": 2},
                limits=Limits(max_turns=TURNS),
                level_seed=group,
                noise_seed=member,
            ),
            group,
            member,
        )
        for group in range(case.groups)
        for side in [SIDES[group % len(SIDES)]]
        for member in range(case.group_size)
    ]


def observation_tokens(policy: Policy, client: Client) -> float:
    """Tokens of a turn's observation with what is put around it, in the mean over both sizes."""
    chat = policy.chat_format("")
    episodes = client.reset_many([planned.request for planned in plan_of(Case("", len(SIDES), 1))])
    shown = [chat.following + episode.state.observation + chat.reply + CONTEXT.prefill for episode in episodes]
    client.close_many(episodes)
    return float(np.mean([len(policy.encode(text)) for text in shown]))


def timed(policy: Policy, client: Client, case: Case, tokens: int, *, keep: bool) -> Timed:
    began, cpu_began = time.perf_counter(), time.process_time()
    rollout = collect(
        policy,
        client,
        plan_of(case),
        context=CONTEXT,
        sampling=Sampling(tokens),
        uniforms=lambda group, member, turn, count: seeds.token_uniforms(0, 0, 0, group, member, turn, count),
        keep_cache=keep,
    )
    return Timed(time.perf_counter() - began, time.process_time() - cpu_began, rollout)


def difference(one: Rollout, other: Rollout) -> float:
    """The most that log-probabilities of two rollouts differ by.

    Raises:
        RuntimeError: the rollouts are not the same.
    """
    for rollout in (one, other):
        if rollout.lost:
            raise RuntimeError(f"{len(rollout.lost)} episodes were lost, the first to: {rollout.lost[0].error}")
    rows = [(a.rows[0], b.rows[0]) for a, b in zip(one.trajectories, other.trajectories, strict=True)]
    if not all(np.array_equal(a.ids, b.ids) for a, b in rows):
        raise RuntimeError("the kept cache changed what was sampled")
    most = max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in rows)
    if most > ROUNDING:
        raise RuntimeError(f"the kept cache changed a log-probability by {most}, which is no rounding")
    return most


def measured(case: Case, policy: Policy, client: Client, repeats: int) -> Row:
    policy.stop_ids.clear()
    policy.closing[:] = False
    shown = observation_tokens(policy, client)
    tokens = round(shown / OBSERVATION_PER_ACTION)
    pairs: list[dict[bool, Timed]] = []
    for number in range(repeats + 1):
        order = (True, False) if number % 2 else (False, True)
        pairs.append({keep: timed(policy, client, case, tokens, keep=keep) for keep in order})
    differences = [difference(pair[True].rollout, pair[False].rollout) for pair in pairs]
    counted = pairs[1:]
    played = pairs[0][True].rollout.trajectories
    return Row(
        policy=case.policy,
        episodes=len(played),
        answer_tokens=tokens,
        observation_tokens=shown,
        context_tokens=float(np.mean([len(trajectory.rows[0].ids) for trajectory in played])),
        kept=measure.summary([pair[True].seconds for pair in counted]),
        whole=measure.summary([pair[False].seconds for pair in counted]),
        faster=measure.summary([pair[False].seconds / pair[True].seconds for pair in counted]),
        cpu_faster=measure.summary([pair[False].cpu_seconds / pair[True].cpu_seconds for pair in counted]),
        difference=max(differences),
    )


def spread(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['least']:.2f} … {values['most']:.2f})"


def report(rows: Sequence[Row], left_out: dict[str, str]) -> str:
    lines = [f"Rollouts of {TURNS} turns with the kept cache and without: median (least … most)."]
    for row in rows:
        lines += [
            "",
            (
                f"{row.policy}: {row.episodes} episodes, {row.observation_tokens:.0f} observation tokens and "
                f"{row.answer_tokens} action tokens a turn, {row.context_tokens:.0f} tokens at the end"
            ),
            f"    kept {spread(row.kept)} s, without {spread(row.whole)} s",
            f"    {spread(row.faster)} times as fast; by CPU time {spread(row.cpu_faster)}",
            f"    the same tokens; log-probabilities differ by at most {row.difference:.1e}",
            f"    {'reached' if row.reached else 'MISSED'}: goal {GOAL:g} times",
        ]
    lines += [f"\nleft out: {name}: {why}" for name, why in left_out.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="pairs of rollouts that count")
    parser.add_argument("--threads", type=int, default=1, help="torch's; one is steadier where others use the cores")
    parser.add_argument("--policy", action="append", choices=[case.policy for case in CASES], help="only these")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    server = ("-m", "turngym_server.cli", "--env", "sokoban", "--port", "0")
    load = os.getloadavg()[0]
    with measure.process(*server) as running, connect(running.address) as client:
        for case in CASES:
            if arguments.policy and case.policy not in arguments.policy:
                continue
            try:
                policy = load_policy(case.policy)
            except PolicyError as error:
                left_out[case.policy] = str(error)
                continue
            rows.append(measured(case, policy, client, arguments.repeats))
    printed = report(rows, left_out)
    print(printed)
    measure.write(
        "rollout_cache",
        {
            "repeats": arguments.repeats,
            "turns": TURNS,
            "goal": GOAL,
            "threads": torch.get_num_threads(),
            "load_average_before": load,
            "trainer_versions": {package: version(package) for package in ("torch", "transformers", "numpy")},
            "policies": [asdict(row) | {"reached": row.reached} for row in rows],
            "left_out": left_out,
        },
        printed,
        command=f"python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
    )
    if not all(row.reached for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
