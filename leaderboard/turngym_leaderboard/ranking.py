"""Who is better than whom on a board, and how sure that is. Pure functions; knows nothing of episodes or servers.

Every pair of agents is tested on the instances that both have played, by flipping the signs of the per-instance
differences. The flip needs differences that are symmetric between equals: of a pair in which one was dealt a single
attempt of each instance, only the first attempts of both are compared. Holm's adjustment over all pairs of the board
holds the chance of any false difference at the level. An agent's rank is the range that the tests leave open:
[1 + number significantly better, M − number significantly worse]. Nothing is drawn at random: the distributions over
all sign patterns are computed, not sampled.

Letters: M agents, I instances, m attempts on each, E environments. Sources: Holm (1979); McNemar (1947) for one
attempt, whose exact test the sign-flip test then is; Demšar (JMLR 2006) for groups of agents that are not told apart.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray
from scipy import signal, stats

from turngym_leaderboard.binomial import Floats
from turngym_leaderboard.statistics import flip_p_value, flipped_sums, holm

LEVEL: Final = 0.05
"""Chance of any false difference on a board of equals, at most."""
POWER: Final = 0.8
"""Chance to find a difference of the size that is called detectable."""
MISSING: Final = -1
"""Stands for an instance that an agent has not played, or on which an attempt is unresolved."""
GRID: Final = 1 << 12
"""Steps from 0 to the farthest sum, where environments are put together."""

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Environment:
    """What all agents of a board came to in one environment.

    Attributes:
        solved: [M, I], how many of an instance's attempts an agent solved; MISSING where that is not known.
        attempts: m.
        weight: what a success rate counts for in the score; `overall_weights` gives those of several environments.
        first: [M, I], the same as if the first attempt had been the only one, so 0, m or MISSING.
        single: [M], whether an agent was dealt one attempt of each instance. Both None: every agent was dealt all.
    """

    solved: Counts
    attempts: int
    weight: float = 1.0
    first: Counts | None = None
    single: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if self.solved.ndim != 2 or self.attempts < 1 or not 0 < self.weight < math.inf:
            raise ValueError(
                f"solved attempts of shape {self.solved.shape}, {self.attempts} attempts, weight {self.weight}: "
                "expected [agents, instances], at least 1 attempt and a positive weight"
            )
        if self.solved.size and not MISSING <= self.solved.min() <= self.solved.max() <= self.attempts:
            raise ValueError(
                f"{self.solved.min()} to {self.solved.max()} solved attempts: expected 0 to {self.attempts}, or "
                f"{MISSING} where that is not known"
            )

    def of(self, agents: Sequence[bool], weight: float) -> "Environment":
        """The same of some of the agents, with another weight."""
        chosen = np.array(agents, np.bool_)
        first = self.first[chosen] if self.first is not None else None
        single = self.single[chosen] if self.single is not None else None
        return Environment(self.solved[chosen], self.attempts, weight, first, single)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two agents, as indices.

    Attributes:
        difference: score of `second` less that of `first`, over the instances that both have; 0 where there are none.
        instances: that both have, over all environments.
        p_value: two-sided. adjusted: by Holm over all pairs of the board.
    """

    first: int
    second: int
    difference: float
    instances: int
    p_value: float
    adjusted: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """The agents of a board in their order.

    Attributes:
        order: agents, the best score first; of equal scores the earlier one.
        scores: by agent.
        ranks: by agent, the best and the worst rank that the tests leave open.
        ties: longest runs of `order` in which no two differ significantly; an agent may be in several, or in none.
        pairs: all of them, the first agent the earlier one.
        detectable: the smallest true difference between two agents that a board like this finds in 80 % of cases or
            more; None where there are no two agents.
    """

    order: tuple[int, ...]
    scores: tuple[float, ...]
    ranks: tuple[tuple[int, int], ...]
    ties: tuple[tuple[int, ...], ...]
    pairs: tuple[Pair, ...]
    level: float
    detectable: float | None


def solved_attempts(agents: Sequence[Mapping[int, Sequence[bool | None]]], attempts: int) -> Counts:
    """Solved attempts [M, I] of agents whose outcomes are told by instance; instances in ascending order.

    An instance counts where all its attempts have an outcome that is not None.

    Raises:
        ValueError: an instance has more attempts than were dealt.
    """
    instances = sorted({instance for outcomes in agents for instance in outcomes})
    return np.array(
        [[_solved(outcomes.get(instance, ()), attempts) for instance in instances] for outcomes in agents],
        dtype=np.int64,
    ).reshape(len(agents), len(instances))


def _solved(outcomes: Sequence[bool | None], attempts: int) -> int:
    if len(outcomes) > attempts:
        raise ValueError(f"{len(outcomes)} attempts on an instance on which {attempts} were dealt")
    return sum(map(bool, outcomes)) if len(outcomes) == attempts and None not in outcomes else MISSING


def first_attempts(agents: Sequence[Mapping[int, Sequence[bool | None]]], attempts: int) -> Counts:
    """As `solved_attempts`, if each agent had done in all attempts as in the first one."""
    return np.where((first := solved_attempts(_firsts(agents), 1)) == MISSING, MISSING, attempts * first)


def _firsts(agents: Sequence[Mapping[int, Sequence[bool | None]]]) -> list[dict[int, Sequence[bool | None]]]:
    return [{instance: told[:1] for instance, told in outcomes.items()} for outcomes in agents]


def rank(environments: Sequence[Environment], *, level: float = LEVEL) -> Ranking:
    """Ranks the agents of a board, in one environment or in several together.

    Takes M² tests, each O((m·I)²) at most; one attempt in one environment is a table of binomials. Several environments
    are put together on a grid of 2¹³ sums: its rounding may raise a p-value by a hundredth of it, and never lowers one.

    Raises:
        ValueError: no environment, different numbers of agents, or an agent without any instance in one of them.
    """
    agents = {len(environment.solved) for environment in environments}
    if len(agents) != 1:
        raise ValueError(f"{len(environments)} environments with {sorted(agents)} agents: expected as many in each")
    (count,) = agents
    scores = _scores(environments)
    places = list(itertools.combinations(range(count), 2))
    compared = [_compare(environment, places) for environment in environments]
    differences = cast(Floats, sum(each.shares * e.weight for each, e in zip(compared, environments, strict=True)))
    p_values = _p_values(compared, [environment.weight for environment in environments], differences)
    adjusted = holm(p_values)
    instances = sum(each.instances for each in compared)
    pairs = tuple(
        Pair(first, second, float(differences[k]), int(cast(Counts, instances)[k]), p_values[k], adjusted[k])
        for k, (first, second) in enumerate(places)
    )
    order = tuple(sorted(range(count), key=lambda agent: -scores[agent]))
    return Ranking(
        order=order,
        scores=tuple(scores.tolist()),
        ranks=rank_ranges(count, pairs, level),
        ties=tie_groups(order, pairs, level),
        pairs=pairs,
        level=level,
        detectable=_detectable(environments, compared, level) if pairs else None,
    )


def overall_weights(spans: Sequence[float]) -> list[float]:
    """Weights of environments by which differences of scores are those of the overall normalised score.

    Args:
        spans: mean ceiling less mean floor of each; of the normalised score they are what a success rate is divided by.
    """
    return [1 / (len(spans) * span) for span in spans]


def rank_ranges(agents: int, pairs: Sequence[Pair], level: float = LEVEL) -> tuple[tuple[int, int], ...]:
    """For each agent [1 + number significantly better, M − number significantly worse]."""
    better, worse = [0] * agents, [0] * agents
    for pair in pairs:
        if pair.adjusted <= level:
            lower, higher = (pair.first, pair.second) if pair.difference > 0 else (pair.second, pair.first)
            better[lower] += 1
            worse[higher] += 1
    return tuple((1 + better[agent], agents - worse[agent]) for agent in range(agents))


def tie_groups(order: Sequence[int], pairs: Sequence[Pair], level: float = LEVEL) -> tuple[tuple[int, ...], ...]:
    """Longest runs of `order`, of two agents or more, in which no two differ significantly."""
    differ = {frozenset((pair.first, pair.second)) for pair in pairs if pair.adjusted <= level}
    groups: list[tuple[int, ...]] = []
    end = 0
    for start in range(len(order)):
        reached = end
        while end < len(order) and not any(frozenset((order[k], order[end])) in differ for k in range(start, end)):
            end += 1
        # A run that ends where an earlier one did lies within it.
        if end > reached and end - start > 1:
            groups.append(tuple(order[start:end]))
    return tuple(groups)


def smallest_detectable(error: float, unit: float, pairs: int, *, level: float = LEVEL, power: float = POWER) -> float:
    """The smallest true difference that is found with this power, if nothing else on the board differs.

    D² = z²·(error² + unit·D) with z = z(1 − level/(2·pairs)) + z(power), Holm's first and hardest step. A better agent
    solves what its equals did not, so its differences vary more than theirs, by unit·D at most where attempts count
    alone; agents that never differed have D = z²·unit.

    Args:
        error: standard error of a difference between two agents that are equal.
        unit: what one attempt more on one instance adds to a difference.
    """
    z = float(cast(float, stats.norm.isf(level / (2 * pairs)))) + float(cast(float, stats.norm.ppf(power)))
    half = z * z * unit / 2
    return half + math.hypot(half, z * error)


@dataclass(frozen=True, slots=True, eq=False)
class _Compared:
    """All pairs of agents in one environment; P pairs.

    Attributes:
        sizes: [P, m + 1], on how many instances the two differ by 0 … m attempts.
        sums: [P], attempts that the second solved more, over all instances.
        instances: [P], that both have.
        attempts: m.
    """

    sizes: Counts
    sums: Counts
    instances: Counts
    attempts: int

    @property
    def scale(self) -> Floats:
        """[P], what one attempt more adds to a difference of success rates."""
        return 1 / (self.attempts * np.maximum(self.instances, 1))

    @property
    def shares(self) -> Floats:
        """[P], differences of success rates."""
        return self.sums * self.scale

    @property
    def variance(self) -> Floats:
        """[P], of these differences, about 0."""
        return (self.sizes * np.arange(self.attempts + 1) ** 2).sum(1) * self.scale**2


def _scores(environments: Sequence[Environment]) -> Floats:
    """[M], over the instances that each agent has."""
    scores = np.zeros(len(environments[0].solved))
    for environment in environments:
        known = environment.solved != MISSING
        if not known.any(1).all():
            raise ValueError(f"agent {int(np.argmin(known.any(1)))} has no instance in one of the environments")
        solved = np.where(known, environment.solved, 0).sum(1)
        scores += environment.weight * solved / (environment.attempts * known.sum(1))
    return scores


def _compare(environment: Environment, places: Sequence[tuple[int, int]]) -> _Compared:
    solved, attempts = environment.solved, environment.attempts
    once = environment.first if environment.first is not None else solved
    single = environment.single if environment.single is not None else np.zeros(len(solved), np.bool_)
    sizes = np.zeros((len(places), attempts + 1), np.int64)
    sums, instances = np.zeros(len(places), np.int64), np.zeros(len(places), np.int64)
    start = 0
    for first in range(len(solved) - 1):
        of_first = (single[first] | single[first + 1 :])[:, np.newaxis]
        others = np.where(of_first, once[first + 1 :], solved[first + 1 :])
        own = np.where(of_first, once[first : first + 1], solved[first : first + 1])
        rows = slice(start, start := start + len(others))
        both = (others != MISSING) & (own != MISSING)
        differences = np.where(both, others - own, 0)
        instances[rows], sums[rows] = both.sum(1), differences.sum(1)
        for size in range(1, attempts + 1):
            sizes[rows, size] = (np.abs(differences) == size).sum(1)
    sizes[:, 0] = instances - sizes[:, 1:].sum(1)
    return _Compared(sizes, sums, instances, attempts)


def _p_values(compared: Sequence[_Compared], weights: Sequence[float], differences: Floats) -> list[float]:
    if len(compared) > 1:
        steps = [each.scale * weight for each, weight in zip(compared, weights, strict=True)]
        return [
            _combined_p_value([each.sizes[k].tolist() for each in compared], [float(s[k]) for s in steps], difference)
            for k, difference in enumerate(differences.tolist())
        ]
    (alone,) = compared
    if alone.attempts == 1:
        flips = alone.sizes[:, 1]
        fewer = (flips - np.abs(alone.sums)) // 2
        return np.minimum(1.0, 2 * stats.binom.cdf(fewer, flips, 0.5)).tolist()
    return [flip_p_value(sizes, total) for sizes, total in zip(alone.sizes.tolist(), alone.sums.tolist(), strict=True)]


def _combined_p_value(sizes: Sequence[Sequence[int]], steps: Sequence[float], observed: float) -> float:
    """The sign-flip test on a weighted sum: each environment's sums are exact, and are then rounded to one grid.

    Args:
        sizes: of each environment, how many differences have size 0 … m. steps: what 1 of it is worth in the sum.
    """
    chances = [flipped_sums(each) for each in sizes]
    farthest = sum(step * (len(each) // 2) for step, each in zip(steps, chances, strict=True))
    if farthest == 0:
        return 1.0
    mesh = farthest / GRID
    together = np.ones(1)
    for step, each in zip(steps, chances, strict=True):
        total = len(each) // 2
        places = np.rint(np.arange(-total, total + 1) * (step / mesh)).astype(np.int64)
        rounded = np.bincount(places - places[0], weights=each)
        together = cast(Floats, signal.fftconvolve(together, rounded)) if len(together) > 1 else rounded
    reach = len(together) // 2
    # Each environment's sum was moved by half a mesh at most, so nothing as far as the observed one is left out.
    sums = np.abs(np.arange(-reach, reach + 1)) + len(steps) / 2
    tail = float(np.maximum(together, 0)[sums >= abs(observed) / mesh * (1 - 1e-9)].sum())
    # No pattern is rarer than one and its mirror image; below that the transform's rounding would speak.
    return min(1.0, max(tail, 2.0 ** (1 - sum(sum(each[1:]) for each in sizes))))


def _detectable(environments: Sequence[Environment], compared: Sequence[_Compared], level: float) -> float:
    variance = sum(float(each.variance.mean()) * e.weight**2 for each, e in zip(compared, environments, strict=True))
    unit = min(float(each.scale.min()) * e.weight for each, e in zip(compared, environments, strict=True))
    return smallest_detectable(math.sqrt(variance), unit, len(compared[0].sums), level=level)
