"""How a client shows who it is, and how it knows the server: tokens and TLS.

What `connect` is not told is read from the environment, so that programs which pass nothing on, such as the commands
`trainer` and `leaderboard`, can be given it too, and no secret has to stand in a command line:

    TURNGYM_TOKEN             the token
    TURNGYM_TOKEN_FILE        a file that holds it
    TURNGYM_TLS               1: TLS, by the certificate authorities that the system trusts
    TURNGYM_TLS_ROOTS         TLS, by the authorities in this PEM file
    TURNGYM_TLS_CERTIFICATE   PEM file with the client's own certificate, for servers that ask for one
    TURNGYM_TLS_KEY           PEM file with its key
    TURNGYM_TLS_SERVER_NAME   the name that the server's certificate has, where it is not the address's
    TURNGYM_INSECURE          1: send the token in the clear to other machines

Knows nothing of RPCs.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
_LOCAL_TARGET: Final = re.compile(r"(unix|unix-abstract|vsock):")
_SCHEME: Final = re.compile(r"dns:(//[^/]*/)?|ipv[46]:")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS towards the server; every field is optional.

    Attributes:
        root_certificates: PEM file of the authorities that the server's certificate may be signed by; None: those that
            the system trusts.
        certificate: PEM file with the client's own certificate chain, for servers that ask for one. key: its key's.
        server_name: the name that the server's certificate has, where it is not the address's.

    Raises:
        ValueError: a certificate without a key, or the other way round.
    """

    root_certificates: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a client's certificate and its key go together; give both, or neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a client's channels are made with.

    Attributes:
        token: "": none.
        insecure: send the token in the clear, to other machines too.
    """

    token: str = field(default="", repr=False)
    tls: TlsConfig | None = None
    insecure: bool = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def check(self, address: str) -> None:
        """Raises ValueError where the token would be sent to another machine in the clear."""
        if self.token and self.tls is None and not self.insecure and not is_local(address):
            raise ValueError(
                f"the token would go to {address} in the clear; give tls=TlsConfig(…) or TURNGYM_TLS_ROOTS, or where"
                " the network is safe insecure=True or TURNGYM_INSECURE=1"
            )

    def channel(self, address: str, options: tuple[tuple[str, object], ...]) -> grpc.aio.Channel:
        """A channel to this address.

        Raises:
            OSError: a certificate's or key's file cannot be read.
        """
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        if self.tls.server_name:
            options = (*options, ("grpc.ssl_target_name_override", self.tls.server_name))
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_read(self.tls.root_certificates),
            private_key=_read(self.tls.key),
            certificate_chain=_read(self.tls.certificate),
        )
        return grpc.aio.secure_channel(address, credentials, options=options)


NO_CREDENTIALS: Final = Credentials()


def find_credentials(
    token: str | None, tls: TlsConfig | None, insecure: bool | None, environ: Mapping[str, str] = os.environ
) -> Credentials:
    """What is given, and of the rest what the environment says.

    Raises:
        ValueError: both TURNGYM_TOKEN and TURNGYM_TOKEN_FILE are set, or the token is none. OSError: no such file.
    """
    return Credentials(
        token=_checked(_token(environ) if token is None else token),
        tls=_tls(environ) if tls is None else tls,
        insecure=environ.get("TURNGYM_INSECURE") == "1" if insecure is None else insecure,
    )


def _token(environ: Mapping[str, str]) -> str:
    token, file = environ.get("TURNGYM_TOKEN", ""), environ.get("TURNGYM_TOKEN_FILE", "")
    if token and file:
        raise ValueError("TURNGYM_TOKEN and TURNGYM_TOKEN_FILE are both set; set one")
    return Path(file).read_text(encoding="utf-8") if file else token


def _checked(token: str) -> str:
    """The token without the line's end that files have."""
    token = token.strip()
    if token and not _TOKEN.fullmatch(token):
        raise ValueError("what is given as a token has spaces or characters beyond ASCII; expected NAME.SECRET")
    return token


def _tls(environ: Mapping[str, str]) -> TlsConfig | None:
    names = ("TURNGYM_TLS_ROOTS", "TURNGYM_TLS_CERTIFICATE", "TURNGYM_TLS_KEY", "TURNGYM_TLS_SERVER_NAME")
    roots, certificate, key, server_name = (environ.get(name) or None for name in names)
    if environ.get("TURNGYM_TLS") != "1" and not (roots or certificate or key or server_name):
        return None
    return TlsConfig(root_certificates=roots, certificate=certificate, key=key, server_name=server_name or "")


def _read(file: str | Path | None) -> bytes | None:
    return None if file is None else Path(file).read_bytes()


def is_local(address: str) -> bool:
    """Whether every endpoint of a gRPC target is this machine, by its own name or number for itself."""
    if _LOCAL_TARGET.match(address):
        return True
    return all(_is_loopback(endpoint.rpartition(":")[0]) for endpoint in _SCHEME.sub("", address).split(","))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False
