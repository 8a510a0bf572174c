"""A server's certificate and tokens, and the callers that show one: some may, others may not.

Knows nothing of how a server is started or asked.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from turngym.v1 import environment_pb2 as pb
from turngym_server.access.roles import Role
from turngym_server.access.tokens import digest_of, new_token

ROLES: Final = tuple(role.value for role in Role)
STRANGERS: Final = ("nobody", "unknown", "forged", "expired", "basic", "empty", "long", "twice")
"""Callers that may do nothing: without a token, with one that is not known, another's secret, one that is over, another
scheme, none behind the scheme, one that is too long, and a good one twice."""
CALLERS: Final = (*ROLES, *ROLES, *STRANGERS)

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Access:
    """What `write_access` made.

    Attributes:
        server: arguments of the server. certificate: by which clients know it, PEM.
        shown: each caller's metadata.
        secrets: what no reply and no log may hold.
    """

    server: tuple[str, ...]
    certificate: bytes
    shown: Mapping[str, Metadata]
    secrets: tuple[bytes, ...]


def write_access(folder: Path) -> Access:
    """Makes a certificate for 127.0.0.1 and a file with a token for each role, and one that has expired."""
    certificate = write_certificate(folder)
    tokens = {name: new_token(name) for name in (*ROLES, "expired", "unknown")}
    sections = [
        f'[{name}]\nrole = "{name if name in ROLES else "admin"}"\nsha256 = "{digest_of(token).hex()}"\n'
        + ("expires = 2020-01-01T00:00:00Z\n" if name == "expired" else "")
        for name, token in tokens.items()
        if name != "unknown"
    ]
    file = folder / "tokens.toml"
    file.touch(mode=0o600)
    file.write_text("\n".join(sections))
    secret = {name: token.partition(".")[2] for name, token in tokens.items()}
    shown: dict[str, Metadata] = {name: _bearer(token) for name, token in tokens.items()}
    shown["nobody"] = ()
    shown["forged"] = _bearer(f"admin.{secret['train']}")
    shown["basic"] = (("authorization", f"Basic {tokens['admin']}"),)
    shown["empty"] = (("authorization", "Bearer "),)
    shown["long"] = _bearer(tokens["admin"] + "x" * 1_000)
    shown["twice"] = shown["admin"] * 2
    arguments = ("--tokens", str(file), "--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem"))
    return Access(arguments, certificate, shown, tuple(each.encode() for each in secret.values()))


def write_certificate(folder: Path) -> bytes:
    """Makes cert.pem and key.pem, good for 127.0.0.1; returns the certificate."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-subj", "/CN=fuzz", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", "key.pem", "-out", "cert.pem"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return (folder / "cert.pem").read_bytes()


def _bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


def trespass(rpc: str, session_id: str, reply: Any) -> str:
    """What a reply tells or does about a session that is another's; "": nothing."""
    match rpc:
        case "Step" | "StepStream" | "Advise" | "KeepAlive":
            mine = [each for each in reply.outcomes if each.WhichOneof("outcome") != "error"]
            return f"{rpc} of another's session" if any(each.session_id == session_id for each in mine) else ""
        case "Fork":
            made = any(each.WhichOneof("outcome") != "error" for each in reply.outcomes)
            return "a copy of another's session" if made else ""
        case "Close":
            return "another's session was closed" if any(each.closed for each in reply.outcomes) else ""
        case _:
            return ""


def withheld(rpc: str, reply: Any) -> str:
    """What a reply gives to a token for training that it may not have; "": nothing."""
    if rpc not in ("Reset", "Fork"):
        return ""
    started = [each.started for each in reply.outcomes if each.HasField("started")]
    return "a held-out instance" if any(each.split == pb.SPLIT_HELD_OUT for each in started) else ""
