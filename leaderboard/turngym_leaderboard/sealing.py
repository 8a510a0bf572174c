"""How a board's seeds are sent to servers that must not know them."""

from turngym.sealed import Board, SealKey, Seeds
from turngym_leaderboard.protocol import Seal
from turngym_leaderboard.store.values import Environment


def seal_of(key: SealKey | None, environment: Environment) -> Seal | None:
    """Seals seeds of an environment of a board with the key that its servers have too; None: they are sent openly."""
    if key is None:
        return None
    definition = environment.definition
    board = Board(definition.id, environment.options_json, definition.split.value)
    return lambda level_seed, noise_seed: key.seal(board, Seeds(level_seed, noise_seed))
