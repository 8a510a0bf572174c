"""How the seeds of an episode are told in logs, in words and as fields; of a sealed one, only the name of its seal."""

from collections.abc import Sequence

from turngym.sealed import Seal
from turngym_server.sessions.episode import NoiseSegment
from turngym_server.watching.logs import Event, Noise


def seeds_in_words(level_seed: int, noise: Sequence[NoiseSegment], seal: Seal | None) -> str:
    """All that is needed to meet the same instance again."""
    if seal is not None:
        return f"sealed seed {seal.name}"
    segments = ", ".join(f"{segment.noise_seed} from step {segment.from_step}" for segment in noise)
    return f"level seed {level_seed}, noise {segments}"


def seeds_event(level_seed: int, noise: Sequence[NoiseSegment], seal: Seal | None) -> Event:
    """The same as fields of a log record."""
    if seal is not None:
        return Event(sealed=seal.name)
    return Event(
        level_seed=str(level_seed),
        noise=[Noise(from_step=each.from_step, noise_seed=str(each.noise_seed)) for each in noise],
    )
