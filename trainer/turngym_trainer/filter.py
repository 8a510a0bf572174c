"""StarPO-S's trajectory filter: learn from the groups whose members fared differently.

A filter sees each group's spread and says which groups stay. Adding one is a function under `@register`.
Knows nothing of tokens, policies or advantages. Source: RAGEN (arXiv 2504.20073), section 3.2.
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


FilterFunction = Callable[[Spreads, FilterConfig], NDArray[np.bool_]]
"""Spreads of P groups to which of them are kept, bool [P]."""

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
def keep_all(of: Spreads, config: FilterConfig) -> NDArray[np.bool_]:
    """Keeps every group, the constant ones too."""
    return np.ones(len(of.groups), dtype=np.bool_)


@register("std")
def keep_widest(of: Spreads, config: FilterConfig) -> NDArray[np.bool_]:
    """Keeps the max(1, ⌈ρ·P_env⌉) widest groups of each environment, never constant ones; ties by group index."""
    kept = np.zeros(len(of.groups), dtype=np.bool_)
    for environment in sorted(set(of.environments)):
        inside = np.array([name == environment for name in of.environments])
        # The product is rounded first: ⌈0.28 · 25⌉ must be 7, and in floating point it is 8.
        count = max(1, math.ceil(round(config.keep * int(inside.sum()), 9)))
        candidates = np.flatnonzero(inside & ~of.constant)
        widest_first = candidates[np.argsort(-of.std[candidates], kind="stable")]
        kept[widest_first[:count]] = True
    return kept
