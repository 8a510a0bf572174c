"""The command `env_server_token`: makes a token, and adds its entry to a file for `env_server --tokens`."""

import os
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from turngym.command import run_command
from turngym_server.access.quotas import (
    MAX_BYTES_PER_SECOND,
    MAX_REQUESTS_PER_SECOND,
    MAX_SESSIONS,
    MIN_BYTES_PER_SECOND,
    MIN_REQUESTS_PER_SECOND,
)
from turngym_server.access.roles import Role
from turngym_server.access.tokens import digest_of, new_token, read_tokens

app: Final = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def make(
    name: Annotated[str, typer.Argument(help="Who it is for: letters, digits, _ and -.")],
    role: Annotated[
        Role,
        typer.Option(help="train: never held-out instances; evaluate: every split served; admin: reflection too."),
    ],
    file: Annotated[Path, typer.Option(help="File of tokens; made where there is none.")],
    expires: Annotated[
        str | None, typer.Option(help="ISO date or date-time, UTC unless it says otherwise.  [default: never]")
    ] = None,
    max_sessions: Annotated[int | None, typer.Option(min=1, max=MAX_SESSIONS, help="Sessions it may hold.")] = None,
    requests_per_second: Annotated[
        float | None,
        typer.Option(min=MIN_REQUESTS_PER_SECOND, max=MAX_REQUESTS_PER_SECOND, help="Calls it may make."),
    ] = None,
    bytes_per_second: Annotated[
        float | None,
        typer.Option(min=MIN_BYTES_PER_SECOND, max=MAX_BYTES_PER_SECOND, help="Of requests and replies."),
    ] = None,
) -> None:
    """Makes a token and prints it, this once; FILE gets its SHA-256, never the token itself."""
    token = new_token(name)
    if file.exists() and name in read_tokens(file):
        raise ValueError(f"{file} has a token {name!r} already; remove its section, or choose another name")
    lines = [f"[{name}]", f'role = "{role.value}"', f'sha256 = "{digest_of(token).hex()}"']
    if expires is not None:
        lines.append(f"expires = {_aware(expires).isoformat()}")
    for key, value in (
        ("max_sessions", max_sessions),
        ("requests_per_second", requests_per_second),
        ("bytes_per_second", bytes_per_second),
    ):
        if value is not None:
            lines.append(f"{key} = {value}")
    _append(file, "\n".join(lines) + "\n")
    print(token)
    print(f"env_server_token: added to {file}; the token above is shown this once", file=sys.stderr)


def _aware(text: str) -> datetime:
    try:
        given = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"--expires {text!r}: expected an ISO date or date-time, such as 2027-06-30") from error
    return given if given.tzinfo else given.replace(tzinfo=UTC)


def _append(file: Path, section: str) -> None:
    """Adds a section, in one move, so that no server reads half of it."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
    if text:
        text = re.sub(r"\n*\Z", "\n\n", text)
    new = file.with_name(f".{file.name}.new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as out:
        out.write(text + section)
    new.replace(file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; on a wrong argument prints one line and exits with status 2."""
    run_command(app, "env_server_token", arguments, expected=(OSError, ValueError))


if __name__ == "__main__":
    main()
