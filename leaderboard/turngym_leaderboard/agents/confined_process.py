"""The process that a stranger's checkpoint plays in; `confined_checkpoint` starts it, says what it gets and answers."""

import signal
import sys
from typing import Final

from turngym_leaderboard.agents import AgentFault, AgentUnavailable
from turngym_leaderboard.agents.confined_checkpoint import (
    Act,
    Load,
    Said,
    Start,
    connection_of,
    most_tokens_of,
)
from turngym_leaderboard.agents.guarded import MOST_CHARACTERS, Guarded
from turngym_leaderboard.confined import bound_this_process

_CHARACTERS_A_TOKEN: Final = 64
"""A tokenizer may make any text of a token; this is ten times what those of languages do."""
_LEAST_CHARACTERS: Final = 4_096


def main() -> None:
    """Loads what the first order names, and plays until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Whoever asks decides when it ends.
    with connection_of(int(sys.argv[1])) as connection:
        order = connection.recv()
        assert isinstance(order, Load), order
        bound_this_process(memory=order.memory if order.device == "cpu" else 0)
        try:
            agent = _load(order)
        except AgentUnavailable as error:
            connection.send_bytes(_json(Said(unavailable=_told(error))))
            return
        connection.send_bytes(_json(Said(description=agent.description)))
        while True:
            try:
                order = connection.recv()
            except EOFError:
                return
            connection.send_bytes(_json(_answer(agent, order)))


def _load(order: Load) -> Guarded:
    """The agent.

    Raises:
        AgentUnavailable: whatever its files made of the attempt.
    """
    try:
        from turngym_leaderboard.agents.checkpoint import CheckpointAgent

        agent = CheckpointAgent(
            order.folder,
            name=order.name,
            device=order.device,
            threads=order.threads,
            most_tokens=order.most_tokens,
        )
    except AgentUnavailable:
        raise
    except Exception as error:
        raise AgentUnavailable(f"the checkpoint cannot be loaded: {type(error).__name__}: {error}") from error
    most = _LEAST_CHARACTERS + _CHARACTERS_A_TOKEN * most_tokens_of(agent.description)
    return Guarded(agent, most_characters=min(most, MOST_CHARACTERS))


def _answer(agent: Guarded, order: Load | Start | Act) -> Said:
    try:
        match order:
            case Start():
                agent.start(order.seats, order.decoding)
                return Said()
            case Act():
                return Said(replies=tuple(agent.act(order.views)))
            case Load():
                raise AssertionError("it is loaded already")
    except AgentFault as error:
        return Said(fault=_told(error))
    except AgentUnavailable as error:
        return Said(unavailable=_told(error))


def _told(error: Exception) -> str:
    return str(error).encode("utf-8", "replace").decode() or type(error).__name__


def _json(said: Said) -> bytes:
    return said.model_dump_json(exclude_defaults=True).encode()


if __name__ == "__main__":
    main()
