"""Episodes on the environment servers, each made again by replay where there is none, or not at the right turn.

Knows nothing of databases, or of whose episodes they are.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from turngym_client import (
    Client,
    CloseReason,
    Episode,
    EpisodeLost,
    EpisodeRequest,
    InvalidRequest,
    NoSuchInstance,
    NotServed,
    ServerBusy,
    ServerUnavailable,
    Transition,
    TurngymError,
    Unauthenticated,
    UnknownEnvironment,
    VersionMismatch,
)

AWAY: Final = (ServerBusy, ServerUnavailable)
"""Nothing can be said until a server answers, or has room."""
NOT_SERVED: Final = (
    InvalidRequest,
    UnknownEnvironment,
    Unauthenticated,
    NotServed,
    VersionMismatch,
    NoSuchInstance,
)
"""The servers are not those that the board was dealt from: for its operator to mend."""


@dataclass(frozen=True, slots=True)
class Step:
    """A turn that was played: its actions, and the digest of the episode after it, in hexadecimal."""

    actions: tuple[str, ...]
    digest: str


class Sessions:
    """Sessions by the names of their episodes. May be shared by threads, one at a time for each episode."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._live: dict[str, Episode] = {}

    def start(self, wanted: Mapping[str, EpisodeRequest]) -> dict[str, Episode | TurngymError]:
        """Starts episodes; what a server says of one that it does not start stands in its place."""
        outcomes = self._client.reset_many(list(wanted.values()), return_exceptions=True)
        started = dict(zip(wanted, outcomes, strict=True))
        self._live |= {name: each for name, each in started.items() if isinstance(each, Episode)}
        return started

    def step(
        self, name: str, request: EpisodeRequest, first: str, before: Sequence[Step], actions: tuple[str, ...]
    ) -> Transition:
        """Plays a turn.

        Args:
            request: what the episode was started by.
            first: its digest after that.
            before: its turns so far.

        Raises:
            TurngymError: as the client does, and EpisodeLost where its turns come to another digest now. The same call
                may be made again; it begins from the start.
        """
        episode = self._live.pop(name, None)
        if episode is None or episode.step_index != len(before):
            episode = self._again(request, first, before)
        try:
            transition = episode.step(actions)
        except BaseException:
            self._close([episode])
            raise
        if transition.done:
            self._close([episode])
        else:
            self._live[name] = episode
        return transition

    def forget(self, name: str) -> None:
        """Closes the session of an episode that is over, if there is one."""
        self._close([episode] if (episode := self._live.pop(name, None)) else [])

    def forget_all_but(self, names: Collection[str]) -> None:
        """Closes the sessions of all episodes but those."""
        for name in self._live.keys() - set(names):
            self.forget(name)

    def _again(self, request: EpisodeRequest, first: str, before: Sequence[Step]) -> Episode:
        [episode] = self._client.reset_many([request])
        try:
            _check(episode, first)
            for step in before:
                episode.step(step.actions)
                _check(episode, step.digest)
        except BaseException:
            self._close([episode])
            raise
        return episode

    def _close(self, episodes: Sequence[Episode]) -> None:
        with suppress(TurngymError):
            self._client.close_many(episodes, CloseReason.FINISHED)


def _check(episode: Episode, digest: str) -> None:
    if episode.state.digest.hex() != digest:
        raise EpisodeLost(
            f"{episode.environment_id}: replayed to turn {episode.step_index} its digest is "
            f"{episode.state.digest.hex()}, not {digest}"
        )
