"""Which episodes a remote agent is dealt, and in which order. Pure functions of a board and its secret."""

from collections.abc import Mapping

from turngym_leaderboard import seeds
from turngym_leaderboard.store.remote import Seat
from turngym_leaderboard.store.values import Board, Deal, Environment


def not_dealt(board: Board) -> dict[int, str]:
    """Why an environment is not dealt to remote agents, by its number.

    Environments of one id and options, such as one that is also shown greedy, play the same levels with the same noise:
    who meets them a second time would know how the first time ended.
    """
    first: dict[tuple[str, str], Environment] = {}
    found: dict[int, str] = {}
    for environment in board.environments:
        known = first.setdefault((environment.definition.id, environment.options_json), environment)
        if known is not environment:
            found[environment.id] = f"it plays the levels of {known.label}, which a remote agent is dealt once"
    return found


def seats(board: Board, deals: Mapping[int, Deal], secret: int, public_id: str) -> list[Seat]:
    """All episodes of a submission, in an order by which nobody can tell which is which.

    Every instance is dealt once, also where other agents have several attempts: who meets a level a second time, which
    its first observation tells, would know how the first time ended.

    Args:
        deals: by the environments' numbers.
        public_id: of the submission.
    """
    left_out = not_dealt(board)
    lots = [
        (_lot(secret, public_id, environment, seat), seat)
        for environment in board.environments
        if environment.id not in left_out
        for seat in _of(environment, deals[environment.id])
    ]
    return [seat for _, seat in sorted(lots, key=lambda each: each[0])]


def _of(environment: Environment, deal: Deal) -> list[Seat]:
    dealt = [(instance, False) for instance in deal.scored.instances] + [(instance, True) for instance in deal.showcase]
    return [Seat(environment.id, instance.draw, 0, showcase=showcase) for instance, showcase in dealt]


def _lot(secret: int, public_id: str, environment: Environment, seat: Seat) -> int:
    return seeds.lot(str(secret).encode(), f"{public_id}/{environment.label}", seat.draw, seat.attempt)
