"""Deals a board's instances from a server, once: those that are scored, and behind them those of the showcase.

Knows nothing of databases.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace

from turngym_client import Client, EnvironmentInfo
from turngym_leaderboard.boards import WORLDS_PER_INSTANCE, BoardDefinition, BoardError, EnvironmentDefinition
from turngym_leaderboard.evaluation import CannotEvaluate, check_split
from turngym_leaderboard.protocol import select_instances
from turngym_leaderboard.store.values import Deal

SECRET_BITS = 256


def new_secret() -> int:
    """What nobody can guess, and a board's seeds follow from."""
    return secrets.randbits(SECRET_BITS)


def deal_board(
    client: Client,
    definition: BoardDefinition,
    secret: int,
    *,
    sessions: int = 128,
    progress: Callable[[str], None] = lambda label: None,
) -> tuple[Deal, ...]:
    """The instances of each environment, in the definition's order.

    Args:
        sessions: levels held at once; what is dealt does not depend on it.
        progress: called with an environment's label before it is dealt.

    Raises:
        BoardError: a sealed board's worlds are too few, or fewer were found than are asked for.
        CannotEvaluate: the server does not serve a split.
        TurngymError: as the client does.
    """
    sessions = min(sessions, client.server().max_sessions or sessions)
    deals: list[Deal] = []
    for environment in definition.environments:
        progress(environment.label)
        details = _details(client, environment, secret)
        if definition.sealed:
            _check_worlds(environment, details)
        deals.append(_deal(client, environment, secret, sessions))
    return tuple(deals)


def _details(client: Client, environment: EnvironmentDefinition, secret: int) -> EnvironmentInfo:
    protocol = environment.protocol(secret)
    details = client.environment(environment.id, options=environment.options, limits=protocol.limits)
    try:
        check_split(protocol, details, client.server(), shows_token=client.shows_token)
    except CannotEvaluate as error:
        raise CannotEvaluate(f"environment {environment.label!r}: {error}") from error
    return details


def _check_worlds(environment: EnvironmentDefinition, details: EnvironmentInfo) -> None:
    """Raises BoardError where anybody could play through most of the worlds that a sealed board plays."""
    told = details.splits[environment.split].worlds
    needed = WORLDS_PER_INSTANCE * environment.instances
    if told is None or told < needed:
        raise BoardError(
            f"environment {environment.label!r}: a sealed board of {environment.instances} instances needs {needed:,} "
            f"worlds, but split {environment.split.value} "
            + ("was never counted" if told is None else f"has {told:,.0f}")
            + "; play fewer instances, or make it an open board with sealed = false"
        )


def _deal(client: Client, environment: EnvironmentDefinition, secret: int, sessions: int) -> Deal:
    protocol = environment.protocol(secret)
    wanted = environment.instances + environment.showcase
    found = select_instances(client, replace(protocol, instances=wanted), sessions=sessions)
    if len(found.instances) < wanted:
        raise BoardError(
            f"environment {environment.label!r}: {len(found.instances)} distinct worlds of split "
            f"{environment.split.value} were found, but {environment.instances} are to be scored and "
            f"{environment.showcase} shown"
        )
    scored = found.instances[: environment.instances]
    return Deal(replace(found, instances=scored, draws=scored[-1].draw + 1), found.instances[environment.instances :])
