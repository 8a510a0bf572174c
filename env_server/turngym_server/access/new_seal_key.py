"""The command `env_server_seal_key`: makes the key of a board whose seeds are sealed, for `env_server --seal-key`."""

import base64
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from turngym.command import run_command
from turngym.private_file import write_private
from turngym.sealed import KEY_BYTES

app: Final = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def make(file: Annotated[Path, typer.Argument(help="The file to make; there must be none.")]) -> None:
    """Writes a new seal key that only you can read. Board and server need the same one."""
    try:
        write_private(file, base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode() + "\n")
    except FileExistsError as error:
        raise ValueError(f"{file} exists already; what was sealed with its key needs it") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; on a wrong argument prints one line and exits with status 2."""
    run_command(app, "env_server_seal_key", arguments, expected=(OSError, ValueError))


if __name__ == "__main__":
    main()
