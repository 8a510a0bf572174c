"""Whom the service is open to. Other machines are served by TLS, or where the operator says so.

A reverse proxy on the same machine that does TLS is the usual way; then the service stays on the loopback.
"""

import ssl
from pathlib import Path

from turngym.loopback import is_loopback


def check_exposure(host: str, *, tls_cert: Path | None, tls_key: Path | None, insecure: bool) -> None:
    """Refuses to serve other machines in the clear, where tokens could be read, unless the operator says so.

    Raises:
        ValueError: says what is missing, or wrong with certificate and key.
        OSError: one of them cannot be read.
    """
    if (tls_cert is None) != (tls_key is None):
        raise ValueError("--tls-cert and --tls-key belong together; give both")
    if tls_cert is not None and tls_key is not None:
        try:
            # A key with a pass phrase is refused instead of asked for.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls_cert, tls_key, password="")
        except ssl.SSLError as error:
            raise ValueError(f"{tls_cert} and {tls_key} are no certificate and its key, in PEM: {error}") from error
    elif not insecure and not is_loopback(host):
        raise ValueError(
            f"--host {host} is reached from other machines: give --tls-cert and --tls-key, or --insecure where "
            "something before the service does TLS"
        )
