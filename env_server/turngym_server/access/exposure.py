"""Whom a port is open to: which addresses may be bound, and with what TLS.

Knows nothing of what is served.
"""

import ssl
from pathlib import Path

import grpc

from turngym.loopback import is_loopback


def check_exposure(host: str, *, tokens: bool, tls: bool, insecure: bool) -> None:
    """Refuses to serve other machines without tokens, or in the clear, unless the operator says so.

    Raises:
        ValueError: says what is missing.
    """
    missing = [option for option, given in (("--tokens", tokens), ("--tls-cert and --tls-key", tls)) if not given]
    if missing and not insecure and not is_loopback(host):
        raise ValueError(
            f"--host {host} is reached from other machines: give {' and '.join(missing)}, or --insecure where "
            "everybody who reaches it may do everything, or something before it sees to that"
        )


def server_credentials(cert: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """TLS by a certificate chain and its key, both in PEM.

    Args:
        client_ca: authorities that every client's certificate must be signed by; None: clients need none.

    Raises:
        OSError: a file cannot be read.
        ValueError: one is no certificate or key, or the two do not belong together.
    """
    chain, private = cert.read_bytes(), key.read_bytes()
    authorities = None if client_ca is None else client_ca.read_bytes()
    _check_certificates(cert, "--tls-cert: the server's certificate, then those that vouch for it")
    if client_ca is not None:
        _check_certificates(client_ca, "--client-ca: certificates of the authorities that sign those of clients")
    _check_key(cert, key)
    return grpc.ssl_server_credentials(
        [(private, chain)], root_certificates=authorities, require_client_auth=authorities is not None
    )


def _check_certificates(file: Path, expected: str) -> None:
    """Raises ValueError where a file holds no certificates. gRPC would say only that it cannot listen."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(file)
    except ssl.SSLError as error:
        raise ValueError(
            f"{file}: no certificates that can be read; expected for {expected}, in PEM: {error}"
        ) from None


def _check_key(cert: Path, key: Path) -> None:
    """Raises ValueError where a file holds no key, or not that of the first certificate in `cert`, which holds some."""
    try:
        # A key with a pass phrase is refused instead of asked for.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise ValueError(
                f"{key}: not the key of the first certificate in {cert}; expected two that belong together, "
                "and the server's own certificate before those that vouch for it"
            ) from None
        raise ValueError(
            f"{key}: no key that can be read; expected for --tls-key: one in PEM, without pass phrase: {error}"
        ) from None
