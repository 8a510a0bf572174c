"""The two rows that every table has: a player that knows nothing, and one that knows everything."""

from collections.abc import Sequence

import numpy as np

from turngym_leaderboard.agents import AgentUnavailable, Reply, Seat, View
from turngym_leaderboard.protocol import Decoding


class RandomAgent:
    """Fills every turn with uniform legal actions: the floor that `Advice.floor` computes exactly.

    Its draws are raw Philox words keyed by (seat's seed, turn), so they do not depend on any library's distributions.
    """

    name = "random"
    samples = False
    wants_legal_actions = True
    wants_advice = False

    @property
    def description(self) -> dict[str, str]:
        return {"kind": "scripted", "rule": "uniform legal actions, as many a turn as are run"}

    def start(self, seats: Sequence[Seat], decoding: Decoding) -> None:
        self._seats = tuple(seats)

    def act(self, views: Sequence[View]) -> Sequence[Reply]:
        return [self._reply(self._seats[view.seat], view) for view in views]

    def _reply(self, seat: Seat, view: View) -> Reply:
        legal = view.transition.legal_actions
        if not legal or not view.transition.legal_actions_complete:
            raise AgentUnavailable(f"no random player in {seat.environment!r}: its legal actions cannot be listed")
        words = np.random.Philox(key=[seat.seed, view.turn]).random_raw(seat.max_actions_per_turn)
        # Multiply and shift: the bias is under len(legal)/2^64.
        actions = tuple(legal[(int(word) * len(legal)) >> 64] for word in words)
        return Reply(text=seat.action_separator.join(actions), reasoning="", actions=actions)


class OracleAgent:
    """Plays what the environment's oracle advises: the best possible, or the best known, player."""

    name = "oracle"
    samples = False
    wants_legal_actions = False
    wants_advice = True

    @property
    def description(self) -> dict[str, str]:
        return {"kind": "scripted", "rule": "the environment's oracle, asked anew before every turn"}

    def start(self, seats: Sequence[Seat], decoding: Decoding) -> None:
        self._seats = tuple(seats)

    def act(self, views: Sequence[View]) -> Sequence[Reply]:
        return [self._reply(self._seats[view.seat], view) for view in views]

    def _reply(self, seat: Seat, view: View) -> Reply:
        if view.advice is None:
            raise AgentUnavailable(f"no oracle in {seat.environment!r}: it advises nothing")
        # An oracle that knows no way on gives up the turn; the empty action is an invalid one, and play goes on.
        actions = view.advice.actions or ("",)
        text = seat.action_separator.join(actions)
        return Reply(text=text, reasoning=view.advice.explanation, actions=actions)
