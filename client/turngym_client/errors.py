"""Everything that can go wrong, as one tree.

    TurngymError
    ├── InvalidRequest        a field, option, limit or size that the server does not take
    ├── UnknownEnvironment    no such environment; the message offers the nearest name
    ├── Unauthenticated       no token, one that the server does not know, or one that has expired
    ├── NotServed             this server refuses it: the split, for want of a role, or a sealed session
    ├── VersionMismatch       the server has another version of the environment than was asked for
    ├── NoSuchInstance        the split has no such instance under these options
    ├── NoOracle              the environment advises nothing
    ├── StepOrderError        a step that is not the next one
    ├── EpisodeEnded          a step after the end, or after `close`
    ├── ServerBusy            no free session within the client's patience
    ├── ServerUnavailable     no server could be reached within the client's patience; the episode is intact
    ├── EnvironmentFailed     the environment raised or ran past its deadline; that is the episode's result
    ├── EpisodeLost           the server is gone and the episode cannot be played again elsewhere
    └── ProtocolError         an answer that the contract does not know

Whatever is none of the caller's fault and none of an agent's is an error here, never a reward of 0. A wrong *action*
is no error at all: it is play, and comes back as a transition with `action_valid` False.
"""

from __future__ import annotations

from collections.abc import Mapping


class TurngymError(Exception):
    """Base of all errors of a turngym client.

    Attributes:
        reason: the contract's reason, for example "SPLIT_NOT_SERVED"; "" where there is none.
        metadata: what the server tells beside it, for example {"nearest": "sokoban"}.
    """

    def __init__(self, message: str, *, reason: str = "", metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata: Mapping[str, str] = dict(metadata or {})


class InvalidRequest(TurngymError):
    """The server does not take a field, an option, a limit, or a message of this size."""


class UnknownEnvironment(TurngymError):
    """No environment of this id is served."""


class Unauthenticated(TurngymError):
    """The server needs a token, and was shown none, one that it does not know, or one that has expired."""


class NotServed(TurngymError):
    """The server refuses it to this caller: the split, for want of a role, or a sealed session's secrets."""


class VersionMismatch(TurngymError):
    """The environment has another version than `expected_version`."""


class NoSuchInstance(TurngymError):
    """The split has no such instance: none within the server's draws, or a seed past a level file's end."""


class NoOracle(TurngymError):
    """The environment advises nothing."""


class StepOrderError(TurngymError):
    """The step is not the session's next one, usually because another step was cut off before its result came."""


class EpisodeEnded(TurngymError):
    """A step of an episode that has ended or been closed."""


class ServerBusy(TurngymError):
    """All sessions are taken, or as much waits as may, and none came free within the client's patience."""


class ServerUnavailable(TurngymError):
    """No server could be reached within the client's patience. Episodes are intact: the same call may be made again."""


class EnvironmentFailed(TurngymError):
    """The environment raised, or a turn ran past its deadline. Never replayed: the failure is the result."""


class EpisodeLost(TurngymError):
    """The session is gone and cannot be made again: another version, no determinism, or another digest."""


class ProtocolError(TurngymError):
    """The server answered something that the contract does not know."""
