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

from turngym_leaderboard.console import connected, fail, needs_board, one_line_errors, tell

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
        help="Of a checkpoint that plays, on cpu; 0: what one of its size needs, at most a slot's part of "
        "four fifths of the machine's.",
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
SealKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--seal-key", help="The servers' --seal-key: they then get seeds sealed, and log and tell none of them."
    ),
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
        boards.check_free(store, definition)
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
    """Ends a season: its secret is published, its episodes can be seen, and nothing more is submitted to it.

    Uploads and remote agents that are not at their end have failed by that. Where a worker has still something to
    finish, nothing more is submitted from now on, and the season is ended by the same command when that is done.
    """
    with _board_store(data, database) as store:
        from turngym_leaderboard.examining import discard
        from turngym_leaderboard.store import boards

        for ended in boards.begin_closing(store, slug):
            discard(store, ended.public_id)
            owner = f" of {ended.owner.name}" if ended.owner else ""
            tell(f"{ended.name}{owner} ({ended.public_id}): {ended.reason}")
        closed = boards.close(store, slug)
        Console().print(f"board {slug} is closed; its secret was {closed.secret}", soft_wrap=True, highlight=False)


@board.command("list")
def list_command(data: Data, database: Database = "") -> None:
    """Shows the boards of a folder and where their submissions stand."""
    with _board_store(data, database) as store:
        from turngym_leaderboard.store import boards, submissions

        console = Console()
        for each in boards.every(store):
            season = f"closed {each.closed:%Y-%m-%d}" if each.closed else "ending" if each.closing else "open"
            table = Table(title=f"{each.slug}: {each.definition.title} ({season})", title_justify="left")
            for heading in ("submission", "name", "kind", "owner", "state", "episodes", "reason"):
                table.add_column(heading, overflow="fold")
            for row in submissions.of_board(store, each):
                owner = row.owner.name if row.owner else ""
                done = f"{row.episodes}/{row.total}"
                table.add_row(
                    row.public_id, row.name, row.kind.value, owner, row.state.value, done, row.reason_on(each)
                )
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


@board.command("hide")
def hide_command(
    data: Data,
    submission: Annotated[str, typer.Argument(help="Public id.")],
    database: Database = "",
    undo: Annotated[bool, typer.Option("--undo", help="Show it again, as its owner has it.")] = False,
) -> None:
    """Shows a submission to nobody but its owner and admins: for others it has no row and widens no rank.

    Its owner cannot change that. It goes on counting against its owner's number.
    """
    with _board_store(data, database) as store:
        from turngym_leaderboard.store import submissions

        hidden = submissions.set_hidden(store, submission, not undo)
        told = "hidden" if hidden.hidden else f"{hidden.visibility.value} again"
        Console().print(f"{hidden.name} is {told}", markup=False, highlight=False, soft_wrap=True)


@board.command("record")
def record_command(
    data: Data,
    submission: Annotated[str, typer.Argument(help="Public id of one that was played to its end.")],
    out: Annotated[Path, typer.Option(help="Folder that records are written into.")],
    database: Database = "",
) -> None:
    """Writes a submission as records, one for each environment, which `leaderboard verify` plays again.

    A record holds the board's secret: while the season lasts it is for nobody else.
    """
    with _board_store(data, database) as store:
        from turngym_leaderboard import record as records
        from turngym_leaderboard.board_record import board_records
        from turngym_leaderboard.store import boards, submissions

        found = submissions.find(store, submission)
        of = boards.of_id(store, found.board_id)
        console = Console()
        for each in board_records(store, of, found):
            folder = records.save(each.record, each.trajectories(), out)
            console.print(f"{each.environment.label}: {folder / records.RECORD}", soft_wrap=True, highlight=False)
        if of.closed is None:
            tell("these records hold the secret of a season that still lasts; keep them to yourself")


@board.command("replay")
def replay_command(
    data: Data,
    submission: Annotated[str, typer.Argument(help="Public id of a checkpoint that was played to its end.")],
    server: Server,
    database: Database = "",
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of the scored episodes; at least one batch.")] = 0.05,
    device: Annotated[str, typer.Option(help="Where it runs, as it did: cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Torch threads, as it had.")] = 1,
    memory: Memory = 0.0,
    seconds_per_token: SecondsPerToken = 5.0,
    seal_key: SealKeyFile = None,
) -> None:
    """Plays a sample of a checkpoint's episodes anew, drawn by the board's secret; its page tells what came of it.

    Exit code 1: some came out otherwise.
    """
    with _board_store(data, database) as store:
        from turngym_leaderboard.anew import TOLD, play_anew
        from turngym_leaderboard.intake import GIBIBYTE
        from turngym_leaderboard.playing import CannotPlay, ServersGone, check_board
        from turngym_leaderboard.sealing import seal_of
        from turngym_leaderboard.slot import agent_of
        from turngym_leaderboard.store import boards, submissions
        from turngym_leaderboard.store.values import Kind, State
        from turngym_leaderboard.worker import WorkerConfig

        found = submissions.find(store, submission)
        if found.kind is not Kind.CHECKPOINT or found.state not in (State.SCORED, State.INCOMPLETE):
            fail(f"{found.name} is a {found.kind.value} that is {found.state.value}; expected a scored checkpoint")
        of = boards.of_id(store, found.board_id)
        config = WorkerConfig(
            data=data,
            servers=tuple(server),
            threads=threads,
            memory=int(memory * GIBIBYTE),
            seconds_per_token=seconds_per_token,
            seal_key=seal_key,
        )
        with one_line_errors(CannotPlay, ServersGone, ValueError), connected(server) as client:
            slot = config.slot(device)
            check_board(client, of)
            with agent_of(store, of, found, slot) as agent:
                anew = play_anew(
                    client, store, of, found, agent, lambda each: seal_of(slot.seal_key, each), share=share
                )
        submissions.describe(store, found.public_id, {TOLD: str(anew)})
        Console().print(f"{found.name}: {anew}", markup=False, highlight=False, soft_wrap=True)
        if anew.differing:
            raise typer.Exit(1)


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
    seal_key: SealKeyFile = None,
    endpoints: EndpointsFile = None,
) -> None:
    """Plays what is submitted to the boards of a folder, and scores it; may be stopped or killed at any moment."""
    with needs_board():
        from turngym_leaderboard.endpoints import load_endpoints, warn_of_unowned
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
        if endpoints is not None:
            warn_of_unowned(load_endpoints(endpoints))
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
