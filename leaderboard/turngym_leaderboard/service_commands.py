"""The commands `leaderboard serve`, `submit`, `status` and `token …`: a board's service, and what its users do with it.

What they need beyond the other commands (pip install 'turngym[board]') is imported when one of them runs.
"""

import os
import re
import signal
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from turngym.sealed import read_seal_key
from turngym_leaderboard.board_commands import Data, Database, EndpointsFile, MaxGibibytes, Memory, SecondsPerToken
from turngym_leaderboard.console import connected, fail, needs_board, one_line_errors, progress_bar
from turngym_leaderboard.lifecycle import Role, State, Visibility

if TYPE_CHECKING:
    from turngym_leaderboard.client import BoardClient
    from turngym_leaderboard.service.messages import Board, Result, Submission

PROXY_PATIENCE: Final = 10.0
"""Seconds for which environment servers are tried before a remote agent is told to come back."""
POLLED_EVERY: Final = 2.0
"""Seconds between two looks at a submission that is watched."""
TOKEN: Final = "TURNGYM_BOARD_TOKEN"  # noqa: S105 — the variable's name
_BOARDS: Final = "/boards/"
_ENDPOINT: Final = "endpoint:"

token: Final = typer.Typer(
    help="Tokens of those who submit.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)

BoardAddress = Annotated[
    str,
    typer.Option(
        "--board",
        envvar="TURNGYM_BOARD",
        help="Address of the board, as in https://board.example/boards/grids-2026; or of a service with one board.",
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option(help=f"File with your token.  [default: what the variable {TOKEN} holds]")
]
Id = Annotated[str, typer.Argument(metavar="ID", help="Of the submission.")]


def serve_command(
    data: Data,
    server: Annotated[
        list[str] | None,
        typer.Option(help="host:port of an environment server for worker and remote agents; several may be given."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes a free one and prints it.")] = 8000,
    database: Database = "",
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the certificate chain, for TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines in the clear.")] = False,
    proxy: Annotated[
        str, typer.Option(help="Address of a reverse proxy whose X-Forwarded-For is believed.  [default: nobody's is]")
    ] = "",
    max_gibibytes: MaxGibibytes = 16.0,
    requests_per_second: Annotated[float, typer.Option(min=0.1, help="Of one address.")] = 50.0,
    owner_requests_per_second: Annotated[
        float, typer.Option(min=0.1, help="Of an owner's tokens together; five times as many at once.")
    ] = 20.0,
    turn_minutes: Annotated[
        float, typer.Option(min=0.01, help="That a remote agent has for a turn; then its episode has failed.")
    ] = 10.0,
    idle_hours: Annotated[
        float,
        typer.Option(min=0.01, help="After which the rest of a remote agent's episodes, not asked for, has failed."),
    ] = 24.0,
    worker: Annotated[
        bool, typer.Option("--worker/--no-worker", help="Play submissions too; otherwise start `leaderboard worker`.")
    ] = True,
    device: Annotated[
        list[str] | None, typer.Option(help="Where the worker's checkpoints run: cpu, cuda or cuda:N.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Submissions played at once on each device.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads of a slot.")] = 1,
    memory: Memory = 0.0,
    seconds_per_token: SecondsPerToken = 5.0,
    seal_key: Annotated[
        Path | None, typer.Option(help="File of the key that the servers' --seal-key names too.")
    ] = None,
    endpoints: EndpointsFile = None,
) -> None:
    """Serves the boards of a folder: pages, the API under /api/v1 (described at /api/v1/docs), and a worker."""
    with needs_board():
        from turngym_leaderboard.endpoints import check_keys, load_endpoints, warn_of_unowned
        from turngym_leaderboard.intake import GIBIBYTE, IntakeLimits
        from turngym_leaderboard.remote.keeper import kept
        from turngym_leaderboard.remote.proxy import Proxy, Times
        from turngym_leaderboard.service.app import create_app
        from turngym_leaderboard.service.serving import ServiceConfig, run
        from turngym_leaderboard.service.state import RateLimits
        from turngym_leaderboard.service.worker_process import kept_running
        from turngym_leaderboard.store import StoreError, open_store
        from turngym_leaderboard.worker import WorkerConfig, start_logging
    start_logging()
    if worker and not server:
        fail("a worker needs --server HOST:PORT of an environment server; --no-worker serves without one")
    limits = IntakeLimits(max_bytes=int(max_gibibytes * GIBIBYTE))
    rates = RateLimits(
        address_rate=requests_per_second,
        address_burst=max(1, int(4 * requests_per_second)),
        owner_rate=owner_requests_per_second,
        owner_burst=max(1, int(5 * owner_requests_per_second)),
    )
    config = ServiceConfig(
        host=host,
        port=port,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        proxy=proxy,
        intake=limits,
        rates=rates,
    )
    signal.signal(signal.SIGTERM, _end)
    with one_line_errors(StoreError, ValueError), ExitStack() as stack:
        registered = load_endpoints(endpoints) if endpoints is not None else None
        if registered is not None:
            warn_of_unowned(registered)
            if worker:
                check_keys(registered)
        store = stack.enter_context(open_store(data, database))
        if worker:
            work = WorkerConfig(
                data=data,
                database=database,
                servers=tuple(server or []),
                devices=tuple(device or ["cpu"]),
                slots=slots,
                threads=threads,
                memory=int(memory * GIBIBYTE),
                seconds_per_token=seconds_per_token,
                intake=limits,
                seal_key=seal_key,
                endpoints=endpoints,
            )
            stack.enter_context(kept_running(work))
        remote_proxy = None
        if server:
            client = stack.enter_context(connected(server, patience=PROXY_PATIENCE))
            key = read_seal_key(seal_key) if seal_key is not None else None
            times = Times(turn=timedelta(minutes=turn_minutes), idle=timedelta(hours=idle_hours))
            remote_proxy = Proxy(store, client, seal_key=key, times=times)
            stack.enter_context(kept(remote_proxy))
        run(
            create_app(store, limits, rates, remote_proxy, registered),
            config,
            lambda address: typer.echo(f"leaderboard listening on {address}"),
        )


def _end(number: int, frame: FrameType | None) -> NoReturn:
    # By default SIGTERM, which the server raises again when it has ended, leaves no time to stop the worker.
    raise SystemExit(0)


def submit_command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER|endpoint:NAME", help="A checkpoint, or an endpoint that the board knows."),
    ],
    board: BoardAddress,
    name: Annotated[str, typer.Option(help="What the board calls it.  [default: the folder's name]")] = "",
    public: Annotated[bool, typer.Option("--public", help="Show it to everybody, not to you alone.")] = False,
    resume: Annotated[str, typer.Option(metavar="ID", help="Go on with this submission, whose upload broke off.")] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Wait until it is scored.")] = False,
    token_file: TokenFile = None,
) -> None:
    """Submits a checkpoint to a board; what a board does not take of the folder is left out. Or an endpoint."""
    console = Console()
    with needs_board():
        from turngym_leaderboard.client import BoardError
        from turngym_leaderboard.intake import Refused
    with one_line_errors(BoardError, Refused), _client(board, token_file) as client:
        slug = _slug(client, board) if not resume else ""
        visibility = Visibility.PUBLIC if public else Visibility.PRIVATE
        if str(folder).startswith(_ENDPOINT):
            endpoint = str(folder).removeprefix(_ENDPOINT)
            submitted = client.submit_endpoint(endpoint, slug, name=name or endpoint, visibility=visibility)
            _follow(console, client, submitted, watch=watch)
            return
        with _upload_bar(console) as bar:
            task = bar.add_task("upload", total=None)

            def progress(arrived: int, total: int) -> None:
                bar.update(task, completed=arrived, total=total)

            def begun(submission: "Submission") -> None:
                console.print(
                    f"submission {submission.id}; if this breaks off, go on with --resume {submission.id}",
                    highlight=False,
                    soft_wrap=True,
                )

            if resume:
                submission = client.resume(resume, folder, progress=progress)
            else:
                submission = client.submit(
                    folder,
                    slug,
                    name=name or folder.resolve().name,
                    visibility=visibility,
                    progress=progress,
                    begun=begun,
                )
        _follow(console, client, submission, watch=watch)


def status_command(
    id: Id,
    board: BoardAddress,
    watch: Annotated[bool, typer.Option("--watch", help="Wait until it is scored.")] = False,
    token_file: TokenFile = None,
) -> None:
    """Tells where a submission stands, and its numbers once there are any."""
    with needs_board():
        from turngym_leaderboard.client import BoardError
    if not re.fullmatch("[0-9a-f]{16}", id):
        fail(f"{id[:80]!r} is no submission; expected the 16 hexadecimal digits that `leaderboard submit` printed")
    with one_line_errors(BoardError), _client(board, token_file) as client:
        _follow(Console(), client, client.status(id), watch=watch)


@token.command("new")
def new_token_command(
    data: Data,
    owner: Annotated[str, typer.Argument(metavar="OWNER", help="Who it is for; made if there is no such owner.")],
    role: Annotated[Role, typer.Option(help="admin sees and may do everything.")] = Role.SUBMIT,
    days: Annotated[int, typer.Option(min=1, help="That it is good for.")] = 365,
    database: Database = "",
) -> None:
    """Prints a new token, this once: the database keeps its SHA-256."""
    with needs_board():
        from turngym_leaderboard.naming import checked_name
        from turngym_leaderboard.store import NotFound, StoreError, open_store, owners
    with one_line_errors(StoreError), open_store(data, database) as store:
        if not 0 < len(owner) <= 64:
            fail(f"{owner[:80]!r} cannot name an owner: expected 1 to 64 characters")
        try:
            checked_name(owner)
        except ValueError as error:
            fail(f"{owner!r} cannot name an owner: {error}")
        try:
            found = owners.find(store, owner)
        except NotFound:
            found = owners.create(store, owner)
        typer.echo(owners.add_token(store, found, role, expires=datetime.now(UTC) + timedelta(days=days)))


@token.command("list")
def list_tokens_command(data: Data, database: Database = "") -> None:
    """Shows whose tokens there are, by number."""
    with needs_board():
        from turngym_leaderboard.store import StoreError, open_store, owners
    with one_line_errors(StoreError), open_store(data, database) as store:
        table = Table("number", "owner", "role", "made", "expires", "revoked")
        for owner in owners.every(store):
            for each in owners.tokens(store, owner):
                times = (f"{when:%Y-%m-%d}" if when else "" for when in (each.created, each.expires, each.revoked))
                table.add_row(str(each.id), owner.name, each.role.value, *times)
        Console().print(table, markup=False)


@token.command("revoke")
def revoke_token_command(
    data: Data,
    number: Annotated[int, typer.Argument(help="As `leaderboard token list` shows it.")],
    database: Database = "",
) -> None:
    """Makes a token worthless from the next request on."""
    with needs_board():
        from turngym_leaderboard.store import StoreError, open_store, owners
    with one_line_errors(StoreError), open_store(data, database) as store:
        owners.revoke(store, number)


def show_submission(id: str, board: str) -> None:
    """Prints a submission and its numbers."""
    status_command(id, board)


def _follow(console: Console, client: "BoardClient", submission: "Submission", *, watch: bool) -> None:
    """Prints where a submission stands, after its end where it is watched. Ends with exit code 1 where it failed."""
    if watch and not submission.done:
        with progress_bar(console) as bar:
            task = bar.add_task(submission.state.value, total=submission.total)
            while not submission.done:
                waits = f": {submission.reason}" if submission.reason else ""
                bar.update(task, description=escape(submission.state.value + waits), completed=submission.episodes)
                time.sleep(POLLED_EVERY)
                submission = client.status(submission.id)
            bar.update(task, description=submission.state.value, completed=submission.episodes)
    told = f"{submission.name} ({submission.id}) on {submission.board}: {submission.state.value}"
    if submission.state in (State.QUEUED, State.RUNNING):
        told += f", {submission.episodes} of {submission.total} episodes"
    if submission.examined_after is not None:
        told += f", waits for its examination, {submission.examined_after} before it"
    told += f": {submission.reason}" if submission.reason else ""
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    console.print(f"page: {client.page(submission)}", markup=False, highlight=False, soft_wrap=True)
    if results := client.results(submission.id):
        _show(console, results)
    if submission.state is State.FAILED:
        raise typer.Exit(1)


def _show(console: Console, results: "list[Result]") -> None:
    table = Table("environment", "success (95 %)", "normalised (95 %)", "episodes", "")
    for result in results:
        numbers = result.statistics
        if numbers is None:
            table.add_row(result.environment, "–", "–", "–", result.unavailable)
            continue
        rate, score = numbers.success, numbers.score
        success = f"{rate.rate:.1%} ({rate.low:.1%} to {rate.high:.1%})" if rate else "–"
        normalised = f"{score.value:.2f} ({score.low:.2f} to {score.high:.2f})" if score else "–"
        unresolved = f"{numbers.unresolved} unresolved" if numbers.unresolved else ""
        table.add_row(result.environment, success, normalised, str(numbers.episodes), unresolved)
    console.print(table, markup=False)


def _upload_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _client(board: str, token_file: Path | None) -> "BoardClient":
    from turngym_leaderboard.client import BoardClient

    text = token_file.read_text(encoding="utf-8") if token_file else os.environ.get(TOKEN, "")
    if set(board) & {"?", "#"}:
        fail(f"{board!r} is no address of a board: expected nothing after its name, as in https://host{_BOARDS}NAME")
    return BoardClient(board.partition(_BOARDS)[0], text.strip() or None)


def _slug(client: "BoardClient", address: str) -> str:
    """The board that an address names; of a service with one open board, that one."""
    if slug := address.partition(_BOARDS)[2].partition("/")[0]:
        return slug
    found: list[Board] = [board for board in client.boards() if board.closed is None]
    if len(found) != 1:
        names = ", ".join(board.slug for board in found[:10])
        fail(
            f"{address} has {len(found)} open boards ({names}); name one as --board {address.rstrip('/')}{_BOARDS}NAME"
        )
    return found[0].slug
