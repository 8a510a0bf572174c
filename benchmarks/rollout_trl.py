"""Rollout tokens a second, beside TRL's `GRPOTrainer` with the same model, environment server and episodes.

The `tiny` policy plays Sokoban at a server in a process of its own, 64 episodes of five turns with full history. Its
answers are noise of a fixed number of tokens and never end by themselves; the server is told of an answer that cannot
be read, so that the board stays, and every token but the sampled ones is the same on both sides. Both must have played
as many turns, sampled as many tokens and read contexts as long in each episode, or there is no result. Only sampled
tokens count.
The sides take turns, the first of each pair being the second of the next; ratios are taken within a pair, of wall clock
and of the CPU time of the process that samples. One pair before is left out. Either side has as many torch threads.

    turngym   the trainer's own rollout, `collect`: resets, answers with their log-probabilities, steps, closing
    trl       TRL's release from PyPI, in a virtual environment of its own with torch and transformers as here, with
              `environment_factory`, its own way to play an environment over several turns, and `generate` of
              transformers, its default

Of TRL is timed `_generate_and_score_completions` from its beginning until `_generate` in it has returned: resets, which
it does one after another, the chat template, generation, reading every answer as a tool call, and the tool calls, which
play a turn each, all at once in its event loop through turngym's client. Not timed: log-probabilities, rewards, closing
the episodes, an update. TRL keeps the tokens of a conversation, but no keys and values from turn to turn: it reads the
whole history anew each turn, once for each member of a group. It is told by its response template that every answer
calls the tool, and by `max_completion_length` that there is no room for an answer after the last turn.

    python benchmarks/rollout_trl.py

Goal: twice as many tokens a second. Prints the results; writes them beside this file as .txt, and as .json with what
made them. Exit status 1 if the goal is missed. The first run installs TRL, which takes minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import measure
import numpy as np
import torch

from turngym_client import Client, EpisodeRequest, Limits, connect
from turngym_trainer import seeds
from turngym_trainer.context import Context
from turngym_trainer.policy import Policy, load_policy
from turngym_trainer.rollout import Planned, Sampling, collect

PEER: Final = "trl==1.16.0"
"""PyPI's current release when this was last run."""
SAME: Final = ("torch", "transformers")
CLIENT_NEEDS: Final = ("grpcio", "protobuf", "googleapis-common-protos")
GOAL: Final = 2.0
GROUPS: Final = 8
GROUP_SIZE: Final = 8
TURNS: Final = 5
ENVIRONMENT: Final = "sokoban"
OPTIONS: Final = {"width": 10, "height": 10, "boxes": 2}
OBSERVATION_PER_ACTION: Final = 10
CONTEXT: Final = Context(turns=0, instructions="none")

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}{{- '<|end|><|user|>' + message['content'] -}}"
    "{%- else -%}{{- '<|' + message['role'] + '|>' + message['content'] -}}{%- endif -%}"
    "{%- for call in message['tool_calls'] or [] -%}{{- call['function'] | tojson -}}{%- endfor -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|><think>' -}}{%- endif -%}"
)
"""For TRL, whose observations after the first are results of a tool: around them what the tiny policy's own has."""
RESPONSE_TEMPLATE: Final[dict[str, Any]] = {
    "start_anchor": "<|assistant|>",
    "defaults": {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "play", "arguments": {}}}],
    },
    "fields": {"content": {"content": "text"}},
}


@dataclass(frozen=True)
class Played:
    """One rollout.

    Attributes:
        seconds, cpu_seconds: wall clock; CPU time of the process that samples.
        turns, sampled, context: of each episode: turns played, tokens sampled, all tokens up to its last answer.
    """

    seconds: float
    cpu_seconds: float
    turns: Sequence[int]
    sampled: Sequence[int]
    context: Sequence[int]

    @property
    def tokens_per_second(self) -> float:
        return sum(self.sampled) / self.seconds


def plan() -> list[Planned]:
    return [
        Planned(
            EpisodeRequest(
                environment_id=ENVIRONMENT,
                options=OPTIONS,
                limits=Limits(max_turns=TURNS),
                level_seed=group,
                noise_seed=member,
            ),
            group,
            member,
        )
        for group in range(GROUPS)
        for member in range(GROUP_SIZE)
    ]


def observation_tokens(policy: Policy, client: Client) -> int:
    """Tokens of an observation after the first with what is put around it, in the mean over levels."""
    chat = policy.chat_format("")
    episodes = client.reset_many([planned.request for planned in plan()[::GROUP_SIZE]])
    client.step_many([(episode, "") for episode in episodes])
    shown = [chat.following + episode.state.observation + chat.reply + CONTEXT.prefill for episode in episodes]
    client.close_many(episodes)
    return round(np.mean([len(policy.encode(text)) for text in shown]))


def played_here(policy: Policy, client: Client, answer_tokens: int) -> Played:
    """One rollout of the trainer's."""
    began, cpu_began = time.perf_counter(), time.process_time()
    rollout = collect(
        policy,
        client,
        plan(),
        context=CONTEXT,
        sampling=Sampling(answer_tokens),
        uniforms=lambda group, member, turn, count: seeds.token_uniforms(0, 0, 0, group, member, turn, count),
    )
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    if rollout.lost:
        raise RuntimeError(f"{len(rollout.lost)} episodes were lost, the first to: {rollout.lost[0].error}")
    rows = [trajectory.rows[0] for trajectory in rollout.trajectories]
    return Played(
        seconds,
        cpu_seconds,
        turns=[len(trajectory.turns) for trajectory in rollout.trajectories],
        sampled=[int(row.is_action.sum()) for row in rows],
        context=[len(row.ids) for row in rows],
    )


class Peer:
    """TRL's process."""

    def __init__(self, python: str, settings: Mapping[str, object]) -> None:
        paths = [str(measure.HERE.parent / folder) for folder in ("proto", "client")]
        self._process = subprocess.Popen(
            [python, str(measure.HERE / "rollout_trl_peer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
        )
        self.versions: dict[str, str] = self._ask(settings)

    def play(self) -> Played:
        return Played(**self._ask("play"))

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, message: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with status {self._process.wait()}")
        return json.loads(line)


@contextlib.contextmanager
def peer(settings: Mapping[str, object]) -> Iterator[Peer]:
    """TRL's process, ready.

    Raises:
        RuntimeError: its torch or transformers are not ours.
    """
    pins = {name: f"{name}=={version(name).partition('+')[0]}" for name in (*SAME, *CLIENT_NEEDS)}
    # torch alone first: what asks for a range of it would choose another build.
    python = measure.peer_python(PEER, [pins["torch"]], [PEER, *pins.values()])
    running = Peer(python, settings)
    try:
        for name in SAME:
            if running.versions[name] != version(name):
                raise RuntimeError(
                    f"TRL's environment has {name} {running.versions[name]}, expected {version(name)} as here; "
                    f"remove {measure.CACHE / PEER.replace('==', '-')} to have it made anew"
                )
        yield running
    finally:
        running.end()


def settings_of(folder: Path, address: str, shown: int, answer_tokens: int, threads: int) -> dict[str, object]:
    """What TRL's process is told.

    Its completion has room for all answers and the observations between them, and none for the last observation.
    """
    return {
        "policy": str(folder),
        "address": address,
        "environment": ENVIRONMENT,
        "options": OPTIONS,
        "turns": TURNS,
        "episodes": [
            {
                "prompt": [{"role": "user", "content": ""}],
                "level_seed": planned.request.level_seed,
                "noise_seed": planned.request.noise_seed,
            }
            for planned in plan()
        ],
        "group_size": GROUP_SIZE,
        "answer_tokens": answer_tokens,
        "completion_tokens": TURNS * answer_tokens + (TURNS - 1) * shown + shown // 2,
        "chat_template": CHAT_TEMPLATE,
        "response_template": RESPONSE_TEMPLATE,
        "threads": threads,
    }


def check_same(ours: Played, theirs: Played) -> None:
    """Raises RuntimeError where two rollouts were not of the same turns and numbers of tokens."""
    for what in ("turns", "sampled", "context"):
        here, there = getattr(ours, what), getattr(theirs, what)
        if list(here) != list(there):
            raise RuntimeError(f"{what} of the episodes differ: turngym {list(here)}, TRL {list(there)}")


def results_of(pairs: Sequence[tuple[Played, Played]]) -> dict[str, dict[str, float]]:
    """Tokens a second of both and how many times as fast turngym was, over pairs of (turngym, TRL)."""
    return {
        "tokens_per_second": measure.summary([ours.tokens_per_second for ours, _ in pairs]),
        "trl_tokens_per_second": measure.summary([theirs.tokens_per_second for _, theirs in pairs]),
        "seconds": measure.summary([ours.seconds for ours, _ in pairs]),
        "trl_seconds": measure.summary([theirs.seconds for _, theirs in pairs]),
        "ratio": measure.summary([ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs]),
        "cpu_ratio": measure.summary([theirs.cpu_seconds / ours.cpu_seconds for ours, theirs in pairs]),
    }


def spread(values: Mapping[str, float], digits: int = 2) -> str:
    return f"{values['median']:,.{digits}f} ({values['least']:,.{digits}f} … {values['most']:,.{digits}f})"


def report(results: Mapping[str, Mapping[str, float]], sample: Played, versions: Mapping[str, str]) -> str:
    reached = "reached" if results["ratio"]["median"] >= GOAL else "MISSED"
    return "\n".join(
        [
            f"Rollouts of turngym and of TRL {versions['trl']}'s GRPOTrainer: median (least … most).",
            "",
            (
                f"tiny: {len(sample.turns)} episodes of {TURNS} turns, {sum(sample.sampled):,} sampled tokens, "
                f"{np.mean(sample.context):.0f} tokens of an episode at its end; the same on both sides"
            ),
            f"    turngym {spread(results['tokens_per_second'], 0)} tokens/s, {spread(results['seconds'])} s",
            f"    trl     {spread(results['trl_tokens_per_second'], 0)} tokens/s, {spread(results['trl_seconds'])} s",
            f"    {spread(results['ratio'])} times as fast; by CPU time {spread(results['cpu_ratio'])}",
            f"    {reached}: goal {GOAL:g} times",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=6, help="pairs of rollouts that count")
    parser.add_argument("--threads", type=int, default=1, help="torch's; one is steadier where others use the cores")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load = os.getloadavg()[0]
    policy = load_policy("tiny")
    policy.stop_ids.clear()
    policy.closing[:] = False
    pairs: list[tuple[Played, Played]] = []
    server = ("-m", "turngym_server.cli", "--env", ENVIRONMENT, "--port", "0")
    with (
        tempfile.TemporaryDirectory() as made,
        measure.process(*server) as running,
        connect(running.address) as client,
    ):
        folder = Path(made)
        policy.save(folder)
        shown = observation_tokens(policy, client)
        answer_tokens = round(shown / OBSERVATION_PER_ACTION)
        with peer(settings_of(folder, running.address, shown, answer_tokens, arguments.threads)) as trl:
            versions = trl.versions
            for number in range(arguments.repeats + 1):
                if number % 2:
                    theirs = trl.play()
                    ours = played_here(policy, client, answer_tokens)
                else:
                    ours = played_here(policy, client, answer_tokens)
                    theirs = trl.play()
                check_same(ours, theirs)
                pairs.append((ours, theirs))
    results = results_of(pairs[1:])
    printed = report(results, pairs[0][0], versions)
    print(printed)
    reached = results["ratio"]["median"] >= GOAL
    measure.write(
        "rollout_trl",
        {
            "trl_versions": versions,
            "trainer_versions": {package: version(package) for package in ("torch", "transformers", "numpy")},
            "repeats": arguments.repeats,
            "threads": torch.get_num_threads(),
            "load_average_before": load,
            "episodes": len(plan()),
            "turns": TURNS,
            "answer_tokens": answer_tokens,
            "observation_tokens": shown,
            "goal": GOAL,
            "reached": reached,
            **results,
        },
        printed,
        command=f"python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
    )
    if not reached:
        sys.exit(1)


if __name__ == "__main__":
    main()
