"""Trajectory filters: learn from the groups whose members fared differently.

A filter sees each group's spread and a uniform draw for each, and says which groups stay. Adding one is a function
under `@register`. Knows nothing of seeds, tokens, policies or advantages. Sources: RAGEN (StarPO-S, arXiv 2504.20073,
section 3.2) and RAGEN-2 (arXiv 2604.06268).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turngym_trainer.config import FilterConfig

CONSTANT_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Spreads:
    """How returns spread within each of P groups, in ascending order of group index.

    Attributes:
        groups: group index, int64 [P].
        std: U, the sample standard deviation (ddof 1) of a group's returns; 0 for a group of one, float64 [P].
        constant: U is 0 up to rounding, so no member tells anything that another does not, bool [P].
        environments: environment id of each group.
    """

    groups: NDArray[np.int64]
    std: NDArray[np.float64]
    constant: NDArray[np.bool_]
    environments: tuple[str, ...]


FilterFunction = Callable[[Spreads, FilterConfig, NDArray[np.float64]], NDArray[np.bool_]]
"""Spreads of P groups and a uniform draw for each, [P], to which of them are kept, bool [P]."""

FILTERS: dict[str, FilterFunction] = {}


def register(name: str) -> Callable[[FilterFunction], FilterFunction]:
    """Adds a filter under the name that `filter.kind` asks for it by."""

    def add(function: FilterFunction) -> FilterFunction:
        FILTERS[name] = function
        return function

    return add


def spreads(returns: NDArray[np.float64], groups: NDArray[np.int64], environments: tuple[str, ...]) -> Spreads:
    """Spread of each group. `returns`, `groups` and `environments` have one entry for each of B episodes, in any order.

    A group is constant when U ≤ 1e-6 · max(1, max|R| of the group).
    """
    assert returns.shape == groups.shape == (len(environments),), (returns.shape, groups.shape, len(environments))
    names, first = np.unique(groups, return_index=True)
    members = [returns[groups == group] for group in names]
    std = np.array([float(np.std(r, ddof=1)) if len(r) > 1 else 0.0 for r in members], dtype=np.float64)
    scale = np.array([max(1.0, float(np.abs(r).max())) for r in members], dtype=np.float64)
    return Spreads(
        groups=names.astype(np.int64),
        std=std,
        constant=std <= CONSTANT_TOLERANCE * scale,
        environments=tuple(environments[int(i)] for i in first),
    )


@register("none")
def keep_all(of: Spreads, config: FilterConfig, draws: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Keeps every group, the constant ones too."""
    return np.ones(len(of.groups), dtype=np.bool_)


@register("std")
def keep_widest(of: Spreads, config: FilterConfig, draws: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Keeps the max(1, ⌈ρ·P_env⌉) widest groups of each environment, never constant ones; ties by group index."""
    kept = np.zeros(len(of.groups), dtype=np.bool_)
    for inside in _environments(of):
        widest_first = _widest_first(of, inside)
        kept[widest_first[: _share(len(inside), config.keep)]] = True
    return kept


@register("top_p")
def keep_most_spread(of: Spreads, config: FilterConfig, draws: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Keeps the fewest widest groups of each environment that hold the share p of its spread (RAGEN-2).

    The smallest prefix of descending U with ΣU ≥ p·ΣU_all, never constant groups; ties by group index.
    """
    kept = np.zeros(len(of.groups), dtype=np.bool_)
    for inside in _environments(of):
        widest_first = _widest_first(of, inside)
        held = np.cumsum(of.std[widest_first])
        # Less a trifle: sums of the same numbers differ in their last bits by their order.
        wanted = config.top_p * held[-1:] * (1.0 - 1e-12)
        kept[widest_first[: 1 + int((held < wanted).sum())]] = True
    return kept


@register("random")
def keep_at_random(of: Spreads, config: FilterConfig, draws: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Keeps as many groups of each environment as `std` would, whichever have the least draws: a control for it."""
    assert draws.shape == of.groups.shape, (draws.shape, of.groups.shape)
    kept = np.zeros(len(of.groups), dtype=np.bool_)
    for inside in _environments(of):
        count = min(_share(len(inside), config.keep), int((~of.constant[inside]).sum()))
        kept[inside[np.argsort(draws[inside], kind="stable")][:count]] = True
    return kept


def _environments(of: Spreads) -> list[NDArray[np.int64]]:
    """Positions of each environment's groups, ascending."""
    return [
        np.flatnonzero([name == environment for name in of.environments])
        for environment in sorted(set(of.environments))
    ]


def _share(groups: int, keep: float) -> int:
    # The product is rounded first: ⌈0.28 · 25⌉ must be 7, and in floating point it is 8.
    return max(1, math.ceil(round(keep * groups, 9)))


def _widest_first(of: Spreads, inside: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of some groups that are not constant, in descending order of their spread."""
    candidates = inside[~of.constant[inside]]
    return candidates[np.argsort(-of.std[candidates], kind="stable")]
