"""The command `env_server`: serves environments until it is told to stop."""

import os

# gRPC's core writes to stderr by itself, past the log and in its own format, and waits until that is read. What it
# shall write is asked for once, when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import asyncio
import contextlib
import enum
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

import turngym
from turngym.command import run_command
from turngym.sealed import read_seal_key
from turngym_server import lifecycle
from turngym_server.config import DEFAULT_SPLITS, ServerConfig
from turngym_server.discovery import ALL, find_specs
from turngym_server.environment import EnvironmentSpec
from turngym_server.host import EnvironmentHost, did_you_mean, nearest
from turngym_server.processes.front import Front
from turngym_server.processes.workers import Order, check_count
from turngym_server.server import Server
from turngym_server.splits import Split
from turngym_server.watching import logs
from turngym_server.watching.logs import LogFormat

LONGEST_LEASE: Final = 31_536_000.0
"""A year, in seconds."""
_DEFAULTS: Final = ServerConfig(port=50_051)


class LogLevel(enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def serve(
    env: Annotated[
        list[str] | None,
        typer.Option(help="Environment to serve: an id, `all`, or package.module:Class. May be given several times."),
    ] = None,
    isolate: Annotated[
        list[str] | None,
        typer.Option(
            help="Environment whose episodes get a process each, killed where it hangs: an id, or `all`. May be given "
            "several times."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULTS.host,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes a free one and prints it.")] = (
        _DEFAULTS.port
    ),
    option: Annotated[
        list[str] | None,
        typer.Option(help="An operator's option, key=value, or id.key=value where several environments have it."),
    ] = None,
    splits: Annotated[
        str, typer.Option(help="Splits to serve, of train, validation, held_out, all; separated by commas.")
    ] = ",".join(split.value for split in Split if split in DEFAULT_SPLITS),
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions held at once.")] = _DEFAULTS.max_sessions,
    max_sessions_per_caller: Annotated[
        int | None, typer.Option(min=1, help="Sessions of one caller.  [default: as many as in all]")
    ] = None,
    lease_seconds: Annotated[
        float, typer.Option(min=0.001, max=LONGEST_LEASE, help="A session untouched for so long is dropped.")
    ] = _DEFAULTS.lease_seconds,
    grace_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long running turns may take after SIGTERM.")
    ] = _DEFAULTS.grace_seconds,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="Port of /metrics for Prometheus, of all workers; 0 takes a free one and prints it.",
        ),
    ] = _DEFAULTS.metrics_port,
    metrics_host: Annotated[
        str, typer.Option(help="Address of /metrics, which anybody who reaches it may read.")
    ] = _DEFAULTS.metrics_host,
    workers: Annotated[
        int, typer.Option(min=1, help="Worker processes. With several, sessions are divided among them.")
    ] = _DEFAULTS.workers,
    worker_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="Port of the first worker, the others follow; 0 takes free ones.  [default: those after --port]",
        ),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="OpenTelemetry collector, as in http://localhost:4318, for traces. Needs turngym[otel]."),
    ] = _DEFAULTS.otlp_endpoint,
    seal_key: Annotated[
        Path | None,
        typer.Option(
            help="File with the key of a board whose seeds are sealed; env_server_seal_key makes one.  "
            "[default: no sealed seed is opened]"
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(min=1, help="Turns and resets of environments off the event loop, played at once.")
    ] = _DEFAULTS.threads,
    max_queued_per_caller: Annotated[
        int, typer.Option(min=1, help="Turns, resets, forks and oracles of one caller that may wait for these threads.")
    ] = _DEFAULTS.max_queued_per_caller,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="File of the tokens that callers need, each with role and quotas; env_server_token adds one. "
            "Read again when it changes.  [default: no token is needed]"
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the server's certificate chain, for TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(help="PEM file of the authorities that clients' certificates must be signed by.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without tokens or in the clear.")
    ] = False,
    log_level: Annotated[
        LogLevel, typer.Option(help="What goes to stderr; info adds what was refused, debug sessions.")
    ] = LogLevel.WARNING,
    log_format: Annotated[
        LogFormat, typer.Option(help="text, or json: one object a line with session, environment, seeds and step.")
    ] = LogFormat.TEXT,
    list_environments: Annotated[bool, typer.Option("--list", help="Print the environments there are.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Serves text environments for LLM agents over gRPC."""
    if version:
        say(turngym.__version__)
        return
    if list_environments:
        for spec in find_specs([ALL]):
            say(f"{spec.id:24} {spec.version:8} {spec.summary}")
        return
    if not env:
        raise ValueError("nothing to serve: give --env ID, --env all, or see --list")
    check_count(workers)
    specs = find_specs(env, isolate or [])
    given = route_options(option or [], specs)
    config = ServerConfig(
        host=host,
        port=port,
        splits=parse_splits(splits),
        max_sessions=max_sessions,
        max_sessions_per_caller=max_sessions_per_caller,
        lease_seconds=lease_seconds,
        grace_seconds=grace_seconds,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        workers=workers,
        worker_port=worker_port,
        otlp_endpoint=otlp_endpoint,
        seal_key=read_seal_key(seal_key) if seal_key else None,
        threads=threads,
        max_queued_per_caller=max_queued_per_caller,
        tokens=tokens,
        tls_cert=tls_cert,
        tls_key=tls_key,
        client_ca=client_ca,
        insecure=insecure,
    )
    logs.configure(log_level.value.upper(), log_format)
    ids = ", ".join(sorted(spec.id for spec in specs))
    if workers > 1:
        order = Order(
            environments=env,
            isolated=isolate or [],
            options=given,
            config=config,
            log_level=log_level.value.upper(),
            log_format=log_format,
        )
        front = Front(order)
        asyncio.run(lifecycle.run(front, lambda: announce(front.address, ids, front.metrics_url), front.broken))
    else:
        server = Server([EnvironmentHost(spec, given[spec.id]) for spec in specs], config)
        asyncio.run(lifecycle.run(server, lambda: announce(server.address, ids, server.metrics_url)))


def announce(address: str, ids: str, metrics_url: str | None) -> None:
    """Prints the lines by which scripts learn that, and where, the server serves."""
    say(f"env_server {turngym.__version__} listening on {address} serving {ids}")
    if metrics_url:
        say(f"env_server {turngym.__version__} metrics at {metrics_url}")


def say(line: str) -> None:
    """Prints a line to stdout.

    Raises:
        OSError: it cannot be written.
    """
    try:
        print(line, flush=True)
    except OSError as error:
        # What is left in the buffer would fail once more, with a traceback, when the interpreter ends.
        with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise OSError(f"cannot write to stdout: {error.strerror}") from error


def parse_splits(text: str) -> frozenset[Split]:
    """Splits named in a list separated by commas.

    Raises:
        ValueError: one is unknown, or there is none.
    """
    known = [split.value for split in Split]
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"unknown split {name!r}{did_you_mean(nearest(name, known))} Known: {', '.join(known)}")
    if not names:
        raise ValueError(f"no split to serve; expected some of {', '.join(known)}")
    return frozenset(Split(name) for name in names)


def route_options(given: Sequence[str], specs: Sequence[EnvironmentSpec]) -> dict[str, dict[str, object]]:
    """Operator options for each environment id.

    Args:
        given: `key=value` or `id.key=value`; a value that is JSON is read as such, else it is text.

    Raises:
        ValueError: one is malformed, or no environment served, or several, have it.
    """
    routed: dict[str, dict[str, object]] = {spec.id: {} for spec in specs}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option {text!r}: expected key=value")
        owners = [spec for spec in specs if key in spec.operator_options.model_fields]
        if not owners:
            owners = [
                spec
                for spec in specs
                if key.startswith(f"{spec.id}.") and key[len(spec.id) + 1 :] in spec.operator_options.model_fields
            ]
        if not owners:
            raise ValueError(_unknown_option(key, specs))
        if len(owners) > 1:
            raise ValueError(
                f"option {key!r} belongs to several environments: say which, "
                f"{' or '.join(f'{spec.id}.{key}' for spec in owners)}"
            )
        owner = owners[0]
        routed[owner.id][key.removeprefix(f"{owner.id}.")] = _option_value(value)
    return routed


def _unknown_option(key: str, specs: Sequence[EnvironmentSpec]) -> str:
    for spec in specs:
        if key.removeprefix(f"{spec.id}.") in spec.options.model_fields:
            return f"option {key!r} of {spec.id} belongs to the episode: clients set it, not the operator"
    known = sorted({name for spec in specs for name in spec.operator_options.model_fields})
    return f"unknown option {key!r}{did_you_mean(nearest(key, known))} Known: {', '.join(known) or 'none'}"


def _option_value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; on a wrong argument prints one line and exits with status 2."""
    run_command(app, "env_server", arguments, expected=(OSError, ValueError), told=_told)


def _told(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


if __name__ == "__main__":
    main()
