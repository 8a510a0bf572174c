"""The commands `leaderboard board …` and `leaderboard worker`.

What they need beyond the other commands (pip install 'turngym[board]') is imported when one of them runs.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from turngym_leaderboard.console import connected, needs_board, one_line_errors

if TYPE_CHECKING:
    from turngym_leaderboard.store import Store

board: Final = typer.Typer(
    help="Makes boards and ends their seasons.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)

Data = Annotated[Path, typer.Argument(metavar="DATA", help="The board's folder: database and submissions.")]
Database = Annotated[
    str,
    typer.Option(
        envvar="TURNGYM_BOARD_DATABASE",
        help="postgresql://user:password@host/name instead of SQLite in the folder; better told by the variable.",
    ),
]
Server = Annotated[list[str], typer.Option(help="host:port of an environment server; several may be given.")]
Memory = Annotated[
    float,
    typer.Option(
        "--memory-gibibytes",
        min=0.0,
        help="Of a checkpoint that plays, on cpu; 0: a slot's part of four fifths of the machine's.",
    ),
]
SecondsPerToken = Annotated[
    float,
    typer.Option(
        min=0.001,
        help="That a turn of all conversations together may take, per token that an answer may have; a checkpoint that "
        "takes longer has failed.",
    ),
]
MaxGibibytes = Annotated[float, typer.Option(min=0.001, help="Of a submission's files together.")]
EndpointsFile = Annotated[
    Path | None, typer.Option(help="TOML that registers endpoints, which may then be submitted by name.")
]
Slug = Annotated[str, typer.Argument(metavar="BOARD", help="Its name and season, as NAME-SEASON.")]


@board.command("new")
def new_command(
    data: Data,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML that defines the board.")],
    server: Server,
    database: Database = "",
) -> None:
    """Makes a board: draws its secret, deals its instances from the server, and queues the scripted rows.

    FILE holds name, title, season and a list of environments; `turngym_leaderboard.boards` shows one with every field.
    """
    with _board_store(data, database) as store:
        from turngym_leaderboard.boards import load_definition
        from turngym_leaderboard.dealing import deal_board, new_secret
        from turngym_leaderboard.store import boards

        console = Console()
        definition, secret = load_definition(file), new_secret()
        with connected(server) as client:
            deals = deal_board(client, definition, secret, progress=lambda label: console.print(f"dealing {label}"))
        made = boards.create(store, definition, secret, deals)
        console.print(
            f"board {made.slug}: {made.definition.episodes} episodes a submission, SHA-256 of its secret "
            f"{made.secret_hash}",
            soft_wrap=True,
            highlight=False,
        )


@board.command("close")
def close_command(data: Data, slug: Slug, database: Database = "") -> None:
    """Ends a season: its secret is published, its episodes can be seen, and nothing more is submitted to it."""
    with _board_store(data, database) as store:
        from turngym_leaderboard.store import boards

        closed = boards.close(store, slug)
        Console().print(f"board {slug} is closed; its secret was {closed.secret}", soft_wrap=True, highlight=False)


@board.command("list")
def list_command(data: Data, database: Database = "") -> None:
    """Shows the boards of a folder and where their submissions stand."""
    with _board_store(data, database) as store:
        from turngym_leaderboard.store import boards, submissions

        console = Console()
        for each in boards.every(store):
            season = f"closed {each.closed:%Y-%m-%d}" if each.closed else "open"
            table = Table(title=f"{each.slug}: {each.definition.title} ({season})", title_justify="left")
            for heading in ("submission", "name", "kind", "owner", "state", "episodes", "reason"):
                table.add_column(heading, overflow="fold")
            for row in submissions.of_board(store, each):
                owner = row.owner.name if row.owner else ""
                done = f"{row.episodes}/{row.total}"
                table.add_row(row.public_id, row.name, row.kind.value, owner, row.state.value, done, row.reason)
            console.print(table, markup=False)


@board.command("retry")
def retry_command(
    data: Data,
    submission: Annotated[str, typer.Argument(help="Public id of one that is incomplete or has failed.")],
    database: Database = "",
) -> None:
    """Queues a submission again: what was played of it stays, what is missing or unresolved is played."""
    with _board_store(data, database) as store:
        from turngym_leaderboard.store import submissions
        from turngym_leaderboard.store.values import State

        again = submissions.set_state(store, submission, State.QUEUED)
        Console().print(f"{again.name} is queued; {again.episodes} of {again.total} episodes are played", markup=False)


def worker_command(
    data: Data,
    server: Server,
    database: Database = "",
    device: Annotated[
        list[str] | None, typer.Option(help="Where checkpoints run: cpu, cuda or cuda:N; several may be given.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Submissions played at once on each device.")] = 1,
    threads: Annotated[
        int, typer.Option(min=1, help="Torch threads of a slot; the same for all workers of a board.")
    ] = 1,
    memory: Memory = 0.0,
    seconds_per_token: SecondsPerToken = 5.0,
    max_gibibytes: MaxGibibytes = 16.0,
    lease: Annotated[
        float, typer.Option(min=1.0, help="Seconds without a sign of life after which a submission is taken over.")
    ] = 60.0,
    until_idle: Annotated[bool, typer.Option("--until-idle", help="End when nothing waits any more.")] = False,
    seal_key: Annotated[
        Path | None,
        typer.Option(help="The servers' --seal-key: they then get seeds sealed, and log and tell none of them."),
    ] = None,
    endpoints: EndpointsFile = None,
) -> None:
    """Plays what is submitted to the boards of a folder, and scores it; may be stopped or killed at any moment."""
    with needs_board():
        from turngym_leaderboard.intake import GIBIBYTE, IntakeLimits
        from turngym_leaderboard.store import StoreError
        from turngym_leaderboard.worker import WorkerConfig, run_worker, start_logging
    start_logging()
    config = WorkerConfig(
        data=data,
        database=database,
        servers=tuple(server),
        devices=tuple(device or ["cpu"]),
        slots=slots,
        threads=threads,
        memory=int(memory * GIBIBYTE),
        seconds_per_token=seconds_per_token,
        intake=IntakeLimits(max_bytes=int(max_gibibytes * GIBIBYTE)),
        lease_seconds=lease,
        until_idle=until_idle,
        seal_key=seal_key,
        endpoints=endpoints,
    )
    with one_line_errors(StoreError, ValueError):
        connected(server).close()  # An address that is none is told here, not by every slot.
        code = run_worker(config)
    if code:
        raise typer.Exit(code)


@contextmanager
def _board_store(data: Path, database: str) -> "Generator[Store]":
    """The board's store; what the user can mend is one line."""
    with needs_board():
        from turngym_leaderboard.boards import BoardError
        from turngym_leaderboard.store import StoreError, open_store
    with one_line_errors(StoreError, BoardError), open_store(data, database) as store:
        yield store
