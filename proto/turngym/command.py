"""Runs a command: what is wrong with its arguments is one line and exit status 2.

Knows nothing of what a command does. Needs typer, which nothing else of this package does.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, cast

import typer

USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130
_UsageError: Final = cast("type[Exception]", typer.BadParameter.__bases__[0])
"""What typer raises for wrong arguments. Depending on its release it is click's, or that of a copy of click."""
_NO_ARGUMENTS: Final = "NoArgsIsHelpError"
"""Name of the one among them whose message is the help; releases of click before 8.2 have none."""


def run_command(
    app: typer.Typer,
    name: str,
    arguments: Sequence[str] | None = None,
    *,
    expected: tuple[type[Exception], ...] = (),
    told: Callable[[Exception], str] = str,
) -> None:
    """Runs `app`; on a wrong argument prints one line, which names the help, and exits with status 2.

    Args:
        name: begins the line.
        arguments: None: those of the process.
        expected: errors of the command that are one line and status 2 too.
        told: what the line says of one of these.
    """
    given = None if arguments is None else list(arguments)
    try:
        status = app(args=given, prog_name=name, standalone_mode=False)
    except _UsageError as error:
        _refuse(name, error)
    except typer.Abort:
        raise SystemExit(INTERRUPTED) from None
    except expected as error:
        _exit(name, told(error))
    if status:
        raise SystemExit(status)


def _refuse(name: str, error: Any) -> NoReturn:
    """Says what is wrong with the arguments, and where the help is; where there are none, the help itself."""
    message = str(error.format_message())
    if type(error).__name__ == _NO_ARGUMENTS:
        print(message, file=sys.stderr)
        raise SystemExit(USAGE_ERROR)
    command = error.ctx.command_path if error.ctx else name
    _exit(name, f"{message.strip().removesuffix('.')} (see {command} --help)")


def _exit(name: str, message: str) -> NoReturn:
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(USAGE_ERROR)
