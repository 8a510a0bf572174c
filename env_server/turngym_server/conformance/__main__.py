"""The command `python -m turngym_server.conformance`: exit status 0 when every rule holds, 1 when one fails, 2 for
wrong arguments or no server.
"""

import functools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, cast

import grpc
import typer

from turngym_server.conformance.connection import CallFailed, Connection, dial
from turngym_server.conformance.rule import RULES, Verdict
from turngym_server.conformance.suite import check

FAILED: Final = 1
USAGE_ERROR: Final = 2
UsageError: Final = cast("type[Exception]", typer.BadParameter.__bases__[0])
"""What typer raises for wrong arguments; see turngym_server.cli."""
PAGE: Final = 1_000

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def conformance(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server to check.")],
    env: Annotated[
        list[str] | None,
        typer.Option(help="Environment to check with. May be given several times.  [default: all that are served]"),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File that holds the bearer token to send.")] = None,
    other_token_file: Annotated[
        Path | None, typer.Option(help="File that holds another's token, whose sessions must be out of reach.")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="File of the certificates (PEM) that vouch for the server; makes the call TLS.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="File of the kit's own certificate (PEM), where the server asks for one.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="File of the key (PEM) of that certificate.")] = None,
    rule: Annotated[str, typer.Option(help="Only the rules whose sentences hold these words.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the rules that hold too.")] = False,
) -> None:
    """Checks a server against the contract of environment.proto, and prints what fails."""
    metadata = _bearer(token_file) if token_file else []
    other_metadata = _bearer(other_token_file) if other_token_file else None
    dial_it = functools.partial(dial, credentials=_credentials(tls_ca, tls_cert, tls_key))
    with dial_it(address) as channel:
        connection = Connection(channel, metadata, dial_it, other_metadata)
        try:
            ids = env or [each.id for each in connection.list_environments(page_size=PAGE).environments]
            if not ids:
                raise ValueError(f"{address} serves no environment: there is nothing to check with")
            if not any(rule in each.sentence for each in RULES):
                raise ValueError(f"no rule holds the words {rule!r}")
            counts = Counter[Verdict]()
            for finding in check(connection, ids, rule):
                counts[finding.verdict] += 1
                if verbose or finding.verdict is not Verdict.HOLDS:
                    typer.echo(f"{finding.verdict.value:8}{finding}")
        except CallFailed as failure:
            raise ValueError(f"{address}: {failure}") from failure
    fails, skipped, holds = counts[Verdict.FAILS], counts[Verdict.SKIPPED], counts[Verdict.HOLDS]
    typer.echo(f"{address} with {', '.join(ids)}: {holds} hold, {fails} fail, {skipped} skipped")
    if fails:
        raise SystemExit(FAILED)


def _credentials(ca: Path | None, certificate: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    """What TLS needs; None: no TLS. Raises ValueError where one of the files is not enough without another."""
    if (certificate is None) != (key is None) or (certificate and not ca):
        raise ValueError("--tls-cert needs --tls-key, the other way round too, and both need --tls-ca")
    if ca is None:
        return None
    return grpc.ssl_channel_credentials(
        ca.read_bytes(), key.read_bytes() if key else None, certificate.read_bytes() if certificate else None
    )


def _bearer(path: Path) -> list[tuple[str, str]]:
    """The metadata that carries the file's token. Raises ValueError, which does not show it, unless it is one word."""
    words = path.read_text(encoding="utf-8").split()
    if len(words) != 1:
        raise ValueError(f"{path} holds {len(words)} words; expected one token")
    return [("authorization", f"Bearer {words[0]}")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; on a wrong argument, or where no server answers, prints one line and exits with status 2."""
    try:
        app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except UsageError as error:
        _exit(str(getattr(error, "format_message", error.__str__)()))
    except (OSError, ValueError) as error:
        _exit(str(error))


def _exit(message: str) -> None:
    print(f"conformance: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(USAGE_ERROR)


if __name__ == "__main__":
    main()
