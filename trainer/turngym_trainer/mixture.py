"""Several environments in one run: which there are, and which groups of an iteration belong to which.

An environment's share of the groups is a function of the run's seed and the iteration alone, so that a resumed run has
the shares of an undisturbed one. Knows nothing of episodes.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from turngym_trainer import seeds
from turngym_trainer.config import Config, EnvironmentConfig, MixtureConfig


def environments(config: Config) -> Mapping[str, Config]:
    """The settings of each environment alone, by its name, in order: the run's, with `environment` set to it."""
    if not config.mixture.environments:
        return {config.environment.id: config}
    return {
        each.name or each.id: config.model_copy(
            update={
                "environment": EnvironmentConfig(**each.model_dump(include=set(EnvironmentConfig.model_fields))),
                "mixture": MixtureConfig(),
            }
        )
        for each in config.mixture.environments
    }


def reward_scales(config: Config) -> Mapping[str, float]:
    """What each environment's rewards are multiplied by, by its name."""
    return {name: alone.environment.reward_scale for name, alone in environments(config).items()}


def return_range(config: Config) -> float:
    """Largest absolute return of an episode in any environment, as it is learnt: what the critic's units are."""
    alone = [each.environment for each in environments(config).values()]
    return max(environment.reward_range * environment.reward_scale for environment in alone)


def weights_at(config: MixtureConfig, iteration: int) -> NDArray[np.float64]:
    """Each environment's share of the groups at an iteration (from 1), [E], which sum to 1.

    From the first weight to the second, where there are two, in equal steps over `mixture.iterations`.
    """
    done = 1.0 if config.iterations == 1 else min(1.0, (iteration - 1) / (config.iterations - 1))
    weights = np.array([(1.0 - done) * each.weight[0] + done * each.weight[-1] for each in config.environments])
    return weights / weights.sum()


def allotted(config: Config, iteration: int, groups: int) -> NDArray[np.int64]:
    """The environment, by its number, of each of an iteration's groups, [groups], ascending.

    Every environment has its share of the groups, rounded up or down by one draw for all of them, so that over many
    iterations the mean is its share exactly.
    """
    if not config.mixture.environments:
        return np.zeros(groups, dtype=np.int64)
    [draw] = seeds.group_uniforms(config.run.seed, iteration, 0, np.zeros(1, np.int64), purpose="mixture")
    return _shared_out(weights_at(config.mixture, iteration), groups, float(draw))


def demonstrated(config: Config, episodes: int) -> NDArray[np.int64]:
    """The environment, by its number, of each of a warm start's episodes, [episodes], ascending.

    Where weights change, an environment's share is the mean of its first and its last: a policy must know the form of
    answers in an environment that comes later, too.
    """
    if not config.mixture.environments:
        return np.zeros(episodes, dtype=np.int64)
    first, last = (weights_at(config.mixture, iteration) for iteration in (1, config.mixture.iterations))
    return _shared_out((first + last) / 2, episodes, 0.5)


def _shared_out(weights: NDArray[np.float64], things: int, draw: float) -> NDArray[np.int64]:
    """The number of the weight that each of some things falls to, [things], ascending.

    Weights sum to 1. What is left of shares that are no whole numbers falls where `draw`, in [0, 1), decides.
    """
    # A share begins where those before it end. The sum of all is not asked for: it may round to under 1.
    begins = np.cumsum(weights)[: int(np.flatnonzero(weights)[-1])]
    at = (np.arange(things) + draw) / things
    return (at[:, None] >= begins).sum(axis=1).astype(np.int64)
