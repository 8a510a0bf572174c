"""What the rules hold in their hands: one environment of a server, and the episodes they play in it.

Sessions that a rule starts are closed after it. Actions are taken from the legal ones where the server lists them,
from the oracle where it does not, and else are "", which is an invalid action everywhere: no rule needs to know how to
play anything.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance import expect
from turngym_server.conformance.connection import CALL_SECONDS, Connection
from turngym_server.conformance.rule import NotApplicable, Violation

NOISE_SEED: Final = 11
UNKNOWN_SESSION: Final = "nobody.knows-this-session"
NO_ACTION: Final = "no environment has an action of this name"
"""Invalid in environments that know which actions there are."""
LIVE_TURNS: Final = 8
LIVE_ACTIONS: Final = 24


def new_request_id() -> bytes:
    return secrets.token_bytes(16)


class Probe:
    """One environment of the server.

    Attributes:
        spec: what the server says of it, with default options and limits.
        split: that the rules play in, where they are not about splits.
    """

    def __init__(self, connection: Connection, environment_id: str) -> None:
        self.connection = connection
        self.spec = connection.get_environment(environment_id)
        self.server = connection.get_server()
        served = [info.split for info in self.spec.splits if info.served]
        self.split = next(
            (split for split in (pb.SPLIT_ALL, pb.SPLIT_TRAIN, *served) if split in served), pb.SPLIT_UNSPECIFIED
        )
        self._sessions: list[str] = []

    # Reset

    @functools.cached_property
    def level_seed(self) -> int:
        """A level seed that the environment has an instance for."""
        return self.start_items([self.item(level_seed=None)])[0].started.level_seed

    def item(self, **fields: Any) -> pb.ResetItem:
        """A Reset item with a fresh request id, level and noise fixed, its other fields as given."""
        usual: dict[str, Any] = {
            "request_id": new_request_id(),
            "environment_id": self.spec.id,
            "split": self.split,
        }
        if not {"level_seed", "sealed_seed"} & fields.keys():
            usual["level_seed"] = self.level_seed
        if not {"resume", "sealed_seed"} & fields.keys():
            usual["noise_seed"] = NOISE_SEED
        return pb.ResetItem(**(usual | fields))

    def reset(self, items: Sequence[pb.ResetItem], *, want_legal_actions: bool = True) -> Sequence[pb.ResetOutcome]:
        """One outcome for each item, none of them pending."""
        ends = time.monotonic() + CALL_SECONDS
        while True:
            request = pb.ResetRequest(items=items, want_legal_actions=want_legal_actions)
            outcomes = self.keep(expect.one_each(self.connection.reset(request).outcomes, items))
            if not any(outcome.HasField("pending") for outcome in outcomes):
                return outcomes
            if time.monotonic() > ends:
                raise Violation(f"a Reset was still pending after {CALL_SECONDS:g} s")

    def keep(self, outcomes: Sequence[pb.ResetOutcome]) -> Sequence[pb.ResetOutcome]:
        """The outcomes, whose sessions will be closed after the rule."""
        self._sessions += [outcome.started.session_id for outcome in outcomes if outcome.HasField("started")]
        return outcomes

    def start_items(self, items: Sequence[pb.ResetItem], *, want_legal_actions: bool = True) -> list[Episode]:
        """Episodes of items that must all start."""
        outcomes = self.reset(items, want_legal_actions=want_legal_actions)
        return [Episode(self, expect.started(outcome)) for outcome in outcomes]

    def start(self, **fields: Any) -> Episode:
        """An episode that has just begun."""
        return self.start_items([self.item(**fields)])[0]

    def live(self, turns: int = 0, **fields: Any) -> Episode:
        """An episode that is still going on after `turns` turns.

        Raises:
            NotApplicable: there seems to be none.
        """
        for invalid in (False, True):
            episode = self.start(**{"limits": self.roomy_limits(), **fields})
            for _ in range(turns):
                if not episode.ended:
                    episode.play("" if invalid else episode.an_action())
            if not episode.ended:
                return episode
        raise NotApplicable(f"no episode of {self.spec.id} was found that goes on after {turns} turns")

    def ended(self) -> Episode:
        """An episode of one turn, which has been played."""
        episode = self.start(limits=pb.Limits(max_turns=1))
        episode.play(episode.an_action())
        expect.true(episode.ended, "an episode with max_turns = 1 went on after its first turn")
        return episode

    def roomy_limits(self, **fields: int) -> pb.Limits:
        """Limits for a handful of turns of up to three actions, where the caps allow it; then `fields`."""
        caps, default = self.spec.caps, self.spec.limits
        return pb.Limits(
            **{
                "max_turns": within(caps.max_turns, max(default.max_turns, LIVE_TURNS)),
                "max_actions": within(caps.max_actions, max(default.max_actions, LIVE_ACTIONS)),
                "max_actions_per_turn": within(caps.max_actions_per_turn, max(default.max_actions_per_turn, 3)),
                **fields,
            }
        )

    def wrong_limits(self) -> list[pb.Limits]:
        """Limits that must be refused: over a cap, negative, no number."""
        over = [
            pb.Limits(**{name: getattr(self.spec.caps, name) + 1})
            for name in ("max_turns", "max_actions", "max_actions_per_turn", "wall_seconds")
            if getattr(self.spec.caps, name)
        ]
        return [*over, pb.Limits(wall_seconds=-1.0), pb.Limits(wall_seconds=float("nan"))]

    def needs_bytes(self) -> None:
        """Raises NotApplicable where the environment does not promise the same bytes again."""
        if self.spec.determinism != pb.DETERMINISM_BYTES:
            raise NotApplicable("the environment's determinism is NONE")

    # Step

    def step(
        self, items: Sequence[pb.StepItem], *, want_legal_actions: bool = True, max_wait_seconds: float = 0
    ) -> Sequence[pb.StepOutcome]:
        """One outcome for each item, none of them pending."""
        outcomes = list(self.step_once(items, want_legal_actions, max_wait_seconds))
        ends = time.monotonic() + CALL_SECONDS
        while waiting := [place for place, outcome in enumerate(outcomes) if outcome.HasField("pending")]:
            if time.monotonic() > ends:
                raise Violation(f"a step was still pending after {CALL_SECONDS:g} s")
            again = self.step_once([items[place] for place in waiting], want_legal_actions)
            for place, outcome in zip(waiting, again, strict=True):
                outcomes[place] = outcome
        return outcomes

    def step_together(self, items: Sequence[pb.StepItem]) -> Sequence[pb.StepOutcome]:
        """The same of items that matter to each other: all are asked for again while any of them is pending."""
        ends = time.monotonic() + CALL_SECONDS
        while True:
            outcomes = self.step_once(items)
            if not any(outcome.HasField("pending") for outcome in outcomes):
                return outcomes
            if time.monotonic() > ends:
                raise Violation(f"a step was still pending after {CALL_SECONDS:g} s")

    def step_once(
        self, items: Sequence[pb.StepItem], want_legal_actions: bool = True, max_wait_seconds: float = 0
    ) -> Sequence[pb.StepOutcome]:
        """One call; outcomes may be pending."""
        request = pb.StepRequest(items=items, want_legal_actions=want_legal_actions, max_wait_seconds=max_wait_seconds)
        return expect.one_each(self.connection.step(request).outcomes, items)

    def fork(self, items: Sequence[pb.ForkItem]) -> Sequence[pb.ResetOutcome]:
        """One outcome for each item, none of them pending."""
        ends = time.monotonic() + CALL_SECONDS
        while True:
            request = pb.ForkRequest(items=items, want_legal_actions=True)
            outcomes = self.keep(expect.one_each(self.connection.fork(request).outcomes, items))
            if not any(outcome.HasField("pending") for outcome in outcomes):
                return outcomes
            if time.monotonic() > ends:
                raise Violation(f"a Fork was still pending after {CALL_SECONDS:g} s")

    def advise(self, session_id: str) -> pb.AdviseOutcome:
        items = [pb.AdviseItem(session_id=session_id)]
        return expect.one_each(self.connection.advise(pb.AdviseRequest(items=items)).outcomes, items)[0]

    def close_sessions(self) -> None:
        """Ends every session that was started here."""
        most = self.server.max_batch_items or 64
        while self._sessions:
            self.connection.close(self._sessions[:most])
            del self._sessions[:most]

    @functools.cached_property
    def recorded(self) -> Sequence[Episode]:
        """Short episodes that were played to their ends: by single actions, by full turns, by the oracle, and badly."""
        limits = self.roomy_limits(max_turns=within(self.spec.caps.max_turns, 6))
        seeds = [{"level_seed": self.level_seed}, *({"level_seed": None} for _ in range(3))]
        items = [self.item(limits=limits, **seed) for seed in seeds]
        single, full, oracle, bad = self.start_items(items)
        most = limits.max_actions_per_turn or 1
        single.play_out(lambda: (single.an_action(),))
        full.play_out(lambda: tuple(full.an_action(which) for which in range(most)))
        oracle.play_out(lambda: tuple(oracle.advised()) or (oracle.an_action(),))
        bad.play_out(
            lambda: (("", bad.an_action()), (bad.an_action(), NO_ACTION), (bad.an_action(),))[bad.step_index % 3]
        )
        return single, full, oracle, bad


@dataclass(slots=True)
class Turn:
    """What was sent, and what came back."""

    actions: tuple[str, ...]
    transition: pb.Transition


@dataclass(slots=True)
class Episode:
    """A session, and what has been played in it from here."""

    probe: Probe
    started: pb.Started
    turns: list[Turn] = field(default_factory=list[Turn])

    @property
    def session_id(self) -> str:
        return self.started.session_id

    @property
    def state(self) -> pb.Transition:
        """Where the episode stands."""
        return self.turns[-1].transition if self.turns else self.started.state

    @property
    def step_index(self) -> int:
        """Turns played."""
        return self.started.step_index + len(self.turns)

    @property
    def ended(self) -> bool:
        return self.state.terminated or self.state.truncated

    def an_action(self, which: int = 0) -> str:
        """An action to play next: a legal one if one is known, else the oracle's, else ""."""
        legal = self.state.legal_actions.actions
        if legal:
            return legal[(3 * self.step_index + 5 * which) % len(legal)]
        advised = self.advised()
        return advised[0] if advised else ""

    def another_action(self, action: str) -> str:
        """An action that differs from `action`."""
        return next(
            (legal for legal in self.state.legal_actions.actions if legal != action), f"{action}, or {NO_ACTION}"
        )

    def advised(self) -> Sequence[str]:
        """The oracle's next turn; empty where there is none."""
        outcome = self.probe.advise(self.session_id)
        return outcome.advice.actions if outcome.HasField("advice") else ()

    def item(self, *actions: str, step_index: int | None = None) -> pb.StepItem:
        """A step with these actions: the next one, or that of `step_index`."""
        index = self.step_index + 1 if step_index is None else step_index
        return pb.StepItem(session_id=self.session_id, step_index=index, actions=actions)

    def step(self, *actions: str, step_index: int | None = None) -> pb.StepOutcome:
        """The outcome of a step, which is not noted as played."""
        return self.probe.step([self.item(*actions, step_index=step_index)])[0]

    def play(self, *actions: str) -> pb.Transition:
        """Plays the next turn, which must succeed."""
        transition = expect.transition(self.step(*actions))
        self.turns.append(Turn(actions, transition))
        return transition

    def play_out(self, choose: Callable[[], Sequence[str]]) -> None:
        """Plays what `choose` says until the episode ends."""
        most = self.started.limits.max_turns
        while not self.ended:
            if self.step_index >= most:
                raise Violation(f"an episode with max_turns = {most} went on after turn {self.step_index}")
            self.play(*choose())

    def play_all(self, turns: Iterable[Turn]) -> None:
        """Plays what was played elsewhere."""
        for turn in turns:
            self.play(*turn.actions)

    def fork(self, **fields: Any) -> Episode:
        """A copy as it stands, with the same noise unless `fields` say otherwise."""
        outcome = self.probe.fork([self.fork_item(**fields)])[0]
        return Episode(self.probe, expect.started(outcome))

    def fork_item(self, **fields: Any) -> pb.ForkItem:
        usual: dict[str, Any] = {
            "request_id": new_request_id(),
            "session_id": self.session_id,
            "step_index": self.step_index,
        }
        if "noise_seed" not in fields:
            usual["same_noise"] = True
        return pb.ForkItem(**(usual | fields))

    def resume(self, **fields: Any) -> pb.Resume:
        """What takes this episode up again elsewhere; other turns, noise or digest as given."""
        usual: dict[str, Any] = {
            "turns": [pb.Actions(actions=turn.actions) for turn in self.turns],
            "noise": self.started.noise,
            "digest": self.state.digest,
        }
        return pb.Resume(**(usual | fields))


def within(cap: int, asked: int) -> int:
    """`asked`, or `cap` where that is less; a cap of 0 bounds nothing."""
    return min(cap, asked) if cap else asked
