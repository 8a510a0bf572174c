"""Runs a command: what is wrong with its arguments is one line and exit status 2.

Knows nothing of what a command does, and imports no server.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, cast

import typer

USAGE_ERROR: Final = 2
_UsageError: Final = cast("type[Exception]", typer.BadParameter.__bases__[0])
"""What typer raises for wrong arguments. Depending on its release it is click's, or that of a copy of click."""


def run_command(
    app: typer.Typer,
    name: str,
    arguments: Sequence[str] | None = None,
    *,
    told: Callable[[OSError], str] = str,
) -> None:
    """Runs `app`; on a wrong argument prints one line and exits with status 2.

    Args:
        name: begins the line.
        arguments: None: those of the process.
        told: what the line says of an OSError.
    """
    try:
        app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except _UsageError as error:
        _exit(name, str(getattr(error, "format_message", error.__str__)()))
    except OSError as error:
        _exit(name, told(error))
    except ValueError as error:
        _exit(name, str(error))


def _exit(name: str, message: str) -> NoReturn:
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(USAGE_ERROR)
