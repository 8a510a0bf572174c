"""What the commands of `leaderboard` share: one line for what a user can mend, connections, progress bars."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from turngym_client import Client, TurngymError, connect
from turngym_leaderboard.agents import AgentUnavailable
from turngym_leaderboard.evaluation import CannotEvaluate
from turngym_leaderboard.record import RecordError


def connected(server: Sequence[str], patience: float = 60.0) -> Client:
    """A client, or in one line why there can be none: an address or token that is none, or a file that is missing.

    Args:
        patience: seconds for which it goes on trying while servers are away or full.
    """
    try:
        return connect(server, patience=patience)
    except (ValueError, OSError) as error:
        raise CannotEvaluate(str(error)) from error


def progress_bar(console: Console) -> Progress:
    """Bars with what is done, how much of how much, and the time that is left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


@contextmanager
def one_line_errors(*further: type[Exception]) -> Generator[None]:
    """Turns what the user can mend into one line and exit code 2.

    Args:
        further: errors of the command beside those of all.
    """
    try:
        yield
    except (CannotEvaluate, AgentUnavailable, RecordError, TurngymError, OSError, *further) as error:
        fail(str(error))


def tell(message: str) -> None:
    """One line on standard error."""
    typer.echo(f"leaderboard: {' '.join(message.split())}", err=True)


def fail(message: str) -> NoReturn:
    """Says why in one line and ends with exit code 2."""
    tell(message)
    raise typer.Exit(2)


@contextmanager
def needs_board() -> Generator[None]:
    """Tells what boards need to be installed where a module is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        fail(f"boards need more than evaluations: pip install 'turngym[board]' ({error})")
