"""How a server runs, as its operator wants it. Read by everything that serves; decides nothing itself."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from turngym.sealed import SealKey
from turngym_server.access.tokens import Token
from turngym_server.splits import Split

DEFAULT_SPLITS: Final = frozenset({Split.TRAIN, Split.VALIDATION})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How a server runs.

    Attributes:
        port: 0 takes a free one.
        splits: offered to clients, where an environment has worlds enough to divide.
        max_sessions: held at once. max_sessions_per_caller: None: as many.
        lease_seconds: a session untouched for so long is dropped.
        grace_seconds: how long a draining server waits for running turns.
        threads: turns of environments that are not inline, played at once.
        max_queued_per_caller: turns, resets, forks and oracles of one caller that wait for threads or are under way.
        seal_key: opens the sealed seeds of a board; None: none are opened.
        metrics_port: where Prometheus finds /metrics; 0 takes a free one; None: nowhere. metrics_host: its address.
        workers: processes of this server. With more than one, each is given its share of what is divided among them,
            and a front answers on `port`.
        worker_port: of the first worker, the others follow; None: those after `port`, or free ones where that is 0.
        number: of this worker, from 1. ledger: file descriptor of the memory in which workers count what each token
            uses; None: there is only one.
        tag: begins every session id; "": one is drawn.
        front_socket: path of a unix socket that is answered too; "": none.
        tokens: file of the tokens that callers need; see `turngym_server.access.tokens`. None: whoever reaches the
            port may do everything. known_tokens: what it held when it was last read, for a worker that is started
            while it cannot be; None: nothing is known.
        tls_cert: PEM file of the certificate chain that the server shows, tls_key: of its key. None: no TLS.
        client_ca: PEM file of the authorities that clients' certificates must be signed by; None: they need none.
        insecure: serve other machines without tokens or in the clear.
        otlp_endpoint: URL of an OpenTelemetry collector that gets a span for every call; None: no traces are made.
    """

    host: str = "127.0.0.1"
    port: int = 0
    splits: Collection[Split] = DEFAULT_SPLITS
    max_sessions: int = 4_096
    max_sessions_per_caller: int | None = None
    lease_seconds: float = 600.0
    grace_seconds: float = 10.0
    threads: int = 64
    max_queued_per_caller: int = 4_096
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    workers: int = 1
    worker_port: int | None = None
    number: int = 1
    ledger: int | None = None
    tag: str = ""
    front_socket: str = ""
    tokens: Path | None = None
    known_tokens: Mapping[str, Token] | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    insecure: bool = False
    otlp_endpoint: str | None = None
    seal_key: SealKey | None = None
