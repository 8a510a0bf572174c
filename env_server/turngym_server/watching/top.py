"""The command `turngym`: `turngym top HOST:PORT` shows live what a server does, from its /metrics."""

import contextlib
import http.client
import time
import unicodedata
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, NoReturn
from urllib.parse import urlsplit

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from turngym.command import run_command
from turngym_server.watching.snapshot import Snapshot, Window, read

FETCH_SECONDS: Final = 5.0
MEDIAN_AND_TAIL: Final = (0.5, 0.99)
NOTHING: Final = "–"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


class NotReachable(Exception):
    """There are no metrics of a server at an address; the message says why, in one line."""


@app.callback()
def turngym() -> None:
    """Tools around servers of turngym."""


@app.command()
def top(
    address: Annotated[str, typer.Argument(help="Where env_server --metrics-port listens: HOST:PORT, or a URL.")],
    interval: Annotated[float, typer.Option(min=0.01, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table, over one interval, and exit.")] = False,
) -> None:
    """Shows live what a server does: turns, sessions, latencies and errors."""
    try:
        url = metrics_url(address)
        before = fetch(url)
        time.sleep(interval)
        window = Window(before, fetch(url))
    except (NotReachable, ValueError) as error:
        _fail(str(error))
    console = Console()
    if once:
        console.print(render(url, window))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=True) as live:
        trouble = ""
        while True:
            live.update(render(url, window, trouble), refresh=True)
            time.sleep(interval)
            try:
                window, trouble = Window(window.after, fetch(url)), ""
            except NotReachable as error:  # It may be starting again.
                trouble = str(error)


def metrics_url(address: str) -> str:
    """The URL of /metrics.

    Raises:
        ValueError: the address is neither HOST:PORT nor a URL, or holds credentials. Shows none.
    """
    if "@" in unicodedata.normalize("NFKC", address):
        raise ValueError("the address holds a user or a password; expected HOST:PORT alone, /metrics asks for neither")
    try:
        url = urlsplit(address if "://" in address else f"http://{address}")
        known = url.scheme in ("http", "https") and url.hostname and url.port
    except ValueError:
        url = known = None
    if url is None or not known:
        raise ValueError(
            f"{shown(address)!r} is no address; expected HOST:PORT, as env_server --metrics-port prints it"
        )
    return url._replace(path=url.path.rstrip("/") or "/metrics").geturl()


def shown(url: str) -> str:
    """A URL without its query, which may hold a key."""
    return url.partition("?")[0]


def fetch(url: str) -> Snapshot:
    """One scrape.

    Raises:
        NotReachable: nobody answers, or somebody else.
    """
    try:
        with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as reply:  # noqa: S310  # metrics_url checked it.
            return read(reply.read().decode(), time.monotonic())
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NotReachable(
            f"no metrics at {shown(url)}: {cause}; is env_server running with --metrics-port?"
        ) from error


def render(url: str, window: Window, trouble: str = "") -> RenderableType:
    """All tables of a window."""
    parts: list[RenderableType] = [_headline(url, window), _environments(window), _rpcs(window)]
    if errors := _errors(window):
        parts.append(errors)
    if trouble:
        parts.insert(0, Text(trouble, style="bold red"))
    return Group(*parts)


def _headline(url: str, window: Window) -> Text:
    now = window.after
    version = next(iter(now.by("build_info", "version")), ("?",))[0]
    workers = len(now.by("build_info", "worker"))
    words = [
        f"turngym {version} at {shown(url)}",
        f"{_sum(now, 'sessions_admitted'):,.0f} of {_sum(now, 'sessions_limit'):,.0f} sessions",
        f"CPU {100 * sum(window.rate('process_cpu_seconds_total').values()):.0f} %",
        f"memory {_sum(now, 'process_resident_memory_bytes') / 2**20:,.0f} MiB",
    ]
    if workers > 1:
        words.insert(1, f"{workers} workers")
    if lost := _sum(now, "log_records_dropped_total"):
        words.append(f"{lost:,.0f} log records lost")
    return Text(" · ".join(words), style="bold")


def _environments(window: Window) -> Table:
    table = _table(
        "environment", "turns/s", "actions/s", "resets/s", "running", "idle", "ended", *_latencies("turn", "reset")
    )
    turns = window.rate("turns_total", "environment")
    actions = window.rate("actions_total", "environment")
    started = window.rate("sessions_started_total", "environment")
    held = window.after.by("sessions", "environment", "state")
    turn_seconds = window.quantiles("turn_seconds", MEDIAN_AND_TAIL, "environment")
    reset_seconds = window.quantiles("reset_seconds", MEDIAN_AND_TAIL, "environment")
    for name in sorted(turns):
        table.add_row(
            *name,
            _rate(turns[name]),
            _rate(actions.get(name, 0.0)),
            _rate(started.get(name, 0.0)),
            *(f"{held.get((*name, state), 0):,.0f}" for state in ("running", "idle", "ended")),
            *_milliseconds(turn_seconds.get(name)),
            *_milliseconds(reset_seconds.get(name)),
        )
    return table


def _rpcs(window: Window) -> Table:
    table = _table("RPC", "calls/s", "items/call", *_latencies("call"))
    calls = window.rate("call_seconds_count", "rpc")
    batches, items = window.rate("call_items_count", "rpc"), window.rate("call_items_sum", "rpc")
    seconds = window.quantiles("call_seconds", MEDIAN_AND_TAIL, "rpc")
    for name in sorted(calls):
        if calls[name]:
            size = f"{items[name] / batches[name]:,.1f}" if batches.get(name) else NOTHING
            table.add_row(*name, _rate(calls[name]), size, *_milliseconds(seconds.get(name)))
    return table


def _errors(window: Window) -> Table | None:
    """Errors by reason, the most frequent now first; None where there never was one."""
    rows: list[tuple[float, float, str, str, str]] = []
    for metric, what in (("item_errors_total", "items"), ("calls_refused_total", "calls")):
        now = window.rate(metric, "rpc", "reason")
        rows += [
            (now[rpc, reason], total, reason, rpc, what)
            for (rpc, reason), total in window.after.by(metric, "rpc", "reason").items()
        ]
    if not rows:
        return None
    table = _table("error", "RPC", "of", "errors/s", "in all")
    for rate, total, reason, rpc, what in sorted(rows, reverse=True):
        table.add_row(reason, rpc, what, _rate(rate), f"{total:,.0f}", style="red" if rate else None)
    return table


def _table(*columns: str) -> Table:
    """A table whose first column is a name, and whose other columns are numbers; where it is narrow, they fold."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", overflow="fold")
    return table


def _latencies(*names: str) -> Iterable[str]:
    return (f"{name} {quantile} ms" for name in names for quantile in ("p50", "p99"))


def _milliseconds(seconds: Sequence[float] | None) -> Iterable[str]:
    return (f"{value * 1e3:,.1f}" for value in seconds) if seconds else (NOTHING for _ in MEDIAN_AND_TAIL)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.1f}"


def _sum(snapshot: Snapshot, name: str) -> float:
    return sum(snapshot.by(name).values())


def _fail(message: str) -> NoReturn:
    typer.echo(f"turngym: {' '.join(message.split())}", err=True)
    raise typer.Exit(1)


def main() -> None:
    """Runs the command."""
    run_command(app, "turngym")


if __name__ == "__main__":
    main()
