"""The guard: which signals of a run say that it collapses, and since when.

`watch` looks at one iteration's metrics after another. It is a pure function of what it has seen, kept in a `Watch`
that goes into checkpoints, so a resumed run is warned of the same things at the same iterations. What is done about an
alarm is for the caller to decide. Source: RAGEN's echo trap (arXiv 2504.20073, section 4.3); a healthy run that solves
its task loses spread and entropy too, so those two alarms also ask for a fall of the return, and are off once it is
solved.

A policy that is nearly sure of everything has gradients of nearly nothing, and many times that is still little: only
what is over the norms of the start, too, is a spike.

Spread, entropy, return and format are moving averages (`signals.smooth`); gradient norms and validations are not.
Entropy and gradients are looked at after updates only. Spread and format are at every iteration: where all groups fare
alike there may be no update any more, and that is when it matters.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

Metrics = Mapping[str, float | int | None]

BASELINE: Final = 10
"""First looks, whose mean is what spread and entropy are compared with."""
LOOKS: Final = 10
"""In a row, at which spread or entropy must be off."""
SPREAD_SHARE: Final = 0.1
ENTROPY_LEAST: Final = 0.1
ENTROPY_MOST: Final = 3.0
RETURN_FALL: Final = 0.5
"""How far the return must have fallen from its best, in baselines of the spread."""
GRADIENT_TIMES: Final = 10.0
GRADIENT_WINDOW: Final = 50
GRADIENT_LEAST: Final = 10
"""Updates before a median means anything."""
GRADIENT_SPIKES: Final = 3
FORMAT_FALL: Final = 0.30
FORMAT_NEAR: Final = 0.02
"""How far under its best the average of format may be where nothing is wrong yet."""
SUCCESS_SHARE: Final = 0.5
SUCCESS_VALIDATIONS: Final = 3
REFUSED: Final = 5
SOLVED_SHARE: Final = 0.95


class Kind(Enum):
    """What collapses."""

    SPREAD = "spread"
    ENTROPY = "entropy"
    GRADIENT = "gradient"
    FORMAT = "format"
    SUCCESS = "success"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Alarm:
    """A signal that has been wrong for long enough.

    Attributes:
        iteration, optimiser_step: where the alarm was given.
        since: iteration with which it began; checkpoints before it are sound.
        told: what was seen, and what would be right.
    """

    kind: Kind
    iteration: int
    optimiser_step: int
    since: int
    told: str


@dataclass(frozen=True, slots=True)
class Watch:
    """What the guard has seen so far; all of it is plain data.

    Attributes:
        spreads, entropies, norms: the first ones (norms: of gradients), until there are enough for a baseline.
        best_return, best_format: greatest moving averages. best_format_at: last iteration near the latter.
        gradients: norms of the last updates.
        spikes: iterations of those among them that were spikes.
        breaches: by kind, iterations of the row of breaches that goes on.
        best_success: greatest lower bound of a validation's success.
        solved: the task was solved at the last validation.
        given: kinds whose alarm was given and whose row goes on; each is given once.
    """

    spreads: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    best_return: float | None = None
    best_format: float | None = None
    best_format_at: int = 0
    gradients: tuple[float, ...] = ()
    spikes: tuple[int, ...] = ()
    breaches: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    best_success: float = 0.0
    solved: bool = False
    given: tuple[str, ...] = ()
    norms: tuple[float, ...] = ()

    @classmethod
    def from_plain(cls, plain: Mapping[str, object]) -> "Watch":
        """What `dataclasses.asdict` and JSON made of one. Raises TypeError where it is none."""
        watch = cls(**plain)  # pyright: ignore[reportArgumentType]  # Lists become tuples below.
        return replace(
            watch,
            spreads=tuple(watch.spreads),
            entropies=tuple(watch.entropies),
            gradients=tuple(watch.gradients),
            spikes=tuple(watch.spikes),
            breaches={kind: tuple(row) for kind, row in watch.breaches.items()},
            given=tuple(watch.given),
            norms=tuple(watch.norms),
        )


@dataclass(frozen=True, slots=True)
class _Breach:
    """A signal that is wrong now.

    Attributes:
        needed: of its looks in a row, for an alarm.
        since: iteration with which it began; 0: with the first look of the row.
    """

    kind: Kind
    needed: int
    told: str
    since: int = 0


def watch(seen: Watch, metrics: Metrics, *, ceiling: float | None) -> tuple[Watch, list[Alarm]]:
    """Takes one iteration's metrics in.

    Args:
        metrics: as the run writes them, with `iteration`, `optimiser_step` and the moving averages.
        ceiling: success rate of the best possible player; None: not known, and the task counts as never solved.

    Returns:
        What has been seen now, and the alarms that this iteration gives.
    """
    iteration = int(metrics["iteration"] or 0)
    updated = bool(metrics.get("update/optimiser_steps"))
    validated = metrics.get("validation/success") is not None
    if validated:
        seen = _validated(seen, metrics, ceiling)
    seen = _played(seen, metrics, iteration)
    if updated:
        seen = _updated(seen, metrics, iteration)

    looked: dict[Kind, _Breach | None] = {Kind.SPREAD: _spread(seen, metrics), Kind.FORMAT: _format(seen, metrics)}
    if updated:
        looked |= {Kind.ENTROPY: _entropy(seen, metrics), Kind.GRADIENT: _gradient(seen, metrics)}
    if validated:
        looked[Kind.SUCCESS] = _success(seen, metrics)
    breaches, given, alarms = dict(seen.breaches), set(seen.given), list[Alarm]()
    for kind, breach in looked.items():
        if breach is None:
            breaches.pop(kind.value, None)
            given.discard(kind.value)
            continue
        row = breaches[kind.value] = (*breaches.get(kind.value, ()), iteration)
        if len(row) >= breach.needed and kind.value not in given:
            given.add(kind.value)
            alarms.append(
                Alarm(kind, iteration, int(metrics.get("optimiser_step") or 0), breach.since or row[0], breach.told)
            )
    alarms += _refused(breaches, given, metrics, iteration, updated=updated)
    return replace(seen, breaches=breaches, given=tuple(sorted(given))), alarms


def _validated(seen: Watch, metrics: Metrics, ceiling: float | None) -> Watch:
    low = metrics.get("validation/low") or 0.0
    solved = ceiling is not None and low >= SOLVED_SHARE * ceiling
    return replace(seen, best_success=max(seen.best_success, low), solved=solved)


def _played(seen: Watch, metrics: Metrics, iteration: int) -> Watch:
    spread, reward = metrics.get("train/group_std"), metrics.get("average/train/reward")
    valid = metrics.get("average/train/valid_format")
    if spread is not None and len(seen.spreads) < BASELINE:
        seen = replace(seen, spreads=(*seen.spreads, float(spread)))
    if reward is not None and (seen.best_return is None or reward > seen.best_return):
        seen = replace(seen, best_return=float(reward))
    if valid is not None:
        best = valid if seen.best_format is None else max(valid, seen.best_format)
        near = iteration if valid >= best - FORMAT_NEAR else seen.best_format_at
        seen = replace(seen, best_format=float(best), best_format_at=near)
    return seen


def _updated(seen: Watch, metrics: Metrics, iteration: int) -> Watch:
    entropy, norm = metrics.get("update/entropy"), metrics.get("update/gradient_norm")
    if entropy is not None and len(seen.entropies) < BASELINE:
        seen = replace(seen, entropies=(*seen.entropies, float(entropy)))
    if norm is None:
        return seen
    spikes = seen.spikes
    if len(seen.norms) < BASELINE:
        seen = replace(seen, norms=(*seen.norms, float(norm)))
    usual = statistics.fmean(seen.norms)
    if len(seen.gradients) >= GRADIENT_LEAST and norm > max(usual, GRADIENT_TIMES * statistics.median(seen.gradients)):
        spikes = (*spikes, iteration)
    else:
        # Spikes stay out of the norms that others are compared with.
        seen = replace(seen, gradients=(*seen.gradients, float(norm))[-GRADIENT_WINDOW:])
    return replace(seen, spikes=tuple(each for each in spikes if each > iteration - GRADIENT_WINDOW))


def _spread(seen: Watch, metrics: Metrics) -> _Breach | None:
    now = metrics.get("average/train/group_std")
    if now is None or len(seen.spreads) < BASELINE or not (fall := _fall(seen, metrics)):
        return None
    baseline = statistics.fmean(seen.spreads)
    if now >= SPREAD_SHARE * baseline:
        return None
    told = f"returns within a group spread by {now:.3g}, under {SPREAD_SHARE:g} of {baseline:.3g} at the start; {fall}"
    return _Breach(Kind.SPREAD, LOOKS, told)


def _entropy(seen: Watch, metrics: Metrics) -> _Breach | None:
    now = metrics.get("average/update/entropy")
    if now is None or len(seen.entropies) < BASELINE or not (fall := _fall(seen, metrics)):
        return None
    start = statistics.fmean(seen.entropies)
    if ENTROPY_LEAST * start <= now <= ENTROPY_MOST * start:
        return None
    told = (
        f"entropy is {now:.3g}, not within {ENTROPY_LEAST:g} to {ENTROPY_MOST:g} times {start:.3g} at the start; {fall}"
    )
    return _Breach(Kind.ENTROPY, LOOKS, told)


def _fall(seen: Watch, metrics: Metrics) -> str:
    """How the return has fallen from its best; "" where it has not, or the task is solved."""
    now = metrics.get("average/train/reward")
    if seen.solved or now is None or seen.best_return is None or len(seen.spreads) < BASELINE:
        return ""
    if now >= seen.best_return - RETURN_FALL * statistics.fmean(seen.spreads):
        return ""
    return f"the return fell from {seen.best_return:.3g} to {now:.3g}"


def _gradient(seen: Watch, metrics: Metrics) -> _Breach | None:
    if len(seen.spikes) < GRADIENT_SPIKES:
        return None
    median = statistics.median(seen.gradients)
    told = (
        f"gradient norms over {GRADIENT_TIMES:g} times their median {median:.3g} at iterations "
        f"{', '.join(map(str, seen.spikes))}"
    )
    return _Breach(Kind.GRADIENT, 1, told, since=seen.spikes[0])


def _format(seen: Watch, metrics: Metrics) -> _Breach | None:
    now = metrics.get("average/train/valid_format")
    if now is None or seen.best_format is None or now > seen.best_format - FORMAT_FALL:
        return None
    told = f"{now:.0%} of the turns can be parsed, at best it were {seen.best_format:.0%}"
    # A moving average falls slowly: what it tells of may have begun with the last update that it was near its best.
    return _Breach(Kind.FORMAT, 1, told, since=seen.best_format_at)


def _success(seen: Watch, metrics: Metrics) -> _Breach | None:
    high = metrics.get("validation/high")
    if high is None or high >= SUCCESS_SHARE * seen.best_success:
        return None
    told = (
        f"validation's success is at most {high:.1%} (95 %), under {SUCCESS_SHARE:g} of the {seen.best_success:.1%} "
        "that it was at least"
    )
    return _Breach(Kind.SUCCESS, SUCCESS_VALIDATIONS, told)


def _refused(
    breaches: dict[str, tuple[int, ...]], given: set[str], metrics: Metrics, iteration: int, *, updated: bool
) -> Iterator[Alarm]:
    """Counts optimiser steps that were refused in a row; one that was taken ends it."""
    kind = Kind.REFUSED.value
    refused = int(metrics.get("update/refused") or 0)
    if updated:
        breaches.pop(kind, None)
        given.discard(kind)
    elif refused:
        row = breaches[kind] = (*breaches.get(kind, ()), *[iteration] * refused)
        if len(row) >= REFUSED and kind not in given:
            given.add(kind)
            told = f"{len(row)} optimiser steps in a row were refused: their loss or gradient was not finite"
            yield Alarm(Kind.REFUSED, iteration, int(metrics.get("optimiser_step") or 0), row[0], told)
