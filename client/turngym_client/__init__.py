"""A thin client for turngym servers.

    with turngym_client.connect("localhost:50051") as client:
        episode = client.reset("sokoban", level_seed=7)
        while not episode.done:
            print(episode.state.observation)
            episode.step("Up")

`connect` gives a client for ordinary code, `aconnect` the same for asyncio. Gymnasium's interfaces are in
`turngym_client.gym` and `turngym_client.gym_vector`, which alone load gymnasium and numpy.
"""

from turngym import __version__  # First: it says how gRPC waits, before that is imported.
from turngym_client.aio import AsyncClient, AsyncEpisode, aconnect
from turngym_client.answer import ParsedAnswer, answer_form, parse_answer
from turngym_client.credentials import TlsConfig
from turngym_client.errors import (
    EnvironmentFailed,
    EpisodeEnded,
    EpisodeLost,
    InvalidRequest,
    NoOracle,
    NoSuchInstance,
    NotServed,
    ProtocolError,
    ServerBusy,
    ServerUnavailable,
    StepOrderError,
    TurngymError,
    Unauthenticated,
    UnknownEnvironment,
    VersionMismatch,
)
from turngym_client.sync import Client, Episode, connect
from turngym_client.types import (
    ActionKind,
    Advice,
    CloseReason,
    Determinism,
    EndReason,
    EnvironmentInfo,
    EnvironmentSummary,
    EpisodeRequest,
    Limits,
    NoiseSegment,
    Reference,
    ServerInfo,
    Split,
    SplitInfo,
    Transition,
)

__all__ = [
    "ActionKind",
    "Advice",
    "AsyncClient",
    "AsyncEpisode",
    "Client",
    "CloseReason",
    "Determinism",
    "EndReason",
    "EnvironmentFailed",
    "EnvironmentInfo",
    "EnvironmentSummary",
    "Episode",
    "EpisodeEnded",
    "EpisodeLost",
    "EpisodeRequest",
    "InvalidRequest",
    "Limits",
    "NoOracle",
    "NoSuchInstance",
    "NoiseSegment",
    "NotServed",
    "ParsedAnswer",
    "ProtocolError",
    "Reference",
    "ServerBusy",
    "ServerInfo",
    "ServerUnavailable",
    "Split",
    "SplitInfo",
    "StepOrderError",
    "TlsConfig",
    "Transition",
    "TurngymError",
    "Unauthenticated",
    "UnknownEnvironment",
    "VersionMismatch",
    "__version__",
    "aconnect",
    "answer_form",
    "connect",
    "parse_answer",
]
