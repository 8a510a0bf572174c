"""What a server's /metrics said at one time, and what happened between two times.

Pure arithmetic over Prometheus' text format. Knows nothing of where the text came from or how it is shown.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Key = tuple[str, ...]
"""Values of the labels that were asked for, in that order."""

PREFIX: Final = "turngym_"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One scrape.

    Attributes:
        seconds: when, on any clock that goes on steadily.
        samples: by name, without `turngym_`, and labels.
    """

    seconds: float
    samples: Mapping[str, Mapping[Labels, float]]

    def by(self, name: str, *labels: str) -> dict[Key, float]:
        """A metric's values for each combination of some labels, added up over all others, workers among them."""
        return _by(self.samples.get(name, {}), labels)


@dataclass(frozen=True, slots=True)
class Window:
    """The time between two scrapes of one server."""

    before: Snapshot
    after: Snapshot

    def rate(self, name: str, *labels: str) -> dict[Key, float]:
        """By how much a counter grew in a second, by labels as in `Snapshot.by`."""
        seconds = max(self.after.seconds - self.before.seconds, 1e-9)
        return {key: grown / seconds for key, grown in _by(self._growth(name), labels).items()}

    def quantiles(self, histogram: str, shares: Sequence[float], *labels: str) -> dict[Key, list[float]]:
        """Quantiles of what a histogram took in, by labels as in `Snapshot.by`; where it took in nothing, none.

        Args:
            shares: 0 to 1; one quantile is returned for each.
        """
        buckets: defaultdict[Key, list[tuple[float, float]]] = defaultdict(list)
        for (*key, bound), count in _by(self._growth(f"{histogram}_bucket"), (*labels, "le")).items():
            buckets[tuple(key)].append((float(bound), count))
        return {
            key: [quantile(sorted(counts), share) for share in shares]
            for key, counts in buckets.items()
            if any(count for _, count in counts)
        }

    def _growth(self, name: str) -> dict[Labels, float]:
        """How much each series grew. One that fell began again at 0, as after a restart."""
        earlier = self.before.samples.get(name, {})
        grown: dict[Labels, float] = {}
        for labels, value in self.after.samples.get(name, {}).items():
            then = earlier.get(labels, 0.0)
            grown[labels] = value - then if value >= then else value
        return grown


def read(text: str, seconds: float) -> Snapshot:
    """What a scrape said.

    Args:
        seconds: when.

    Raises:
        ValueError: it is not what a server of turngym says.
    """
    samples: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name.removeprefix(PREFIX)][frozenset(sample.labels.items())] = sample.value
    if "build_info" not in samples:
        raise ValueError("its metrics are not those of an env_server")
    return Snapshot(seconds, samples)


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """A quantile of values that are known by their buckets only: linear within a bucket, as in Prometheus.

    Args:
        buckets: (upper bound, how many values are at most that), ascending; the last bound is infinite.
        share: 0 to 1.

    Returns:
        At most the largest finite bound, though values above it may have been larger. NaN where there are no values.
    """
    total = buckets[-1][1]
    if not total:
        return math.nan
    rank = share * total
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


def _by(series: Mapping[Labels, float], labels: Sequence[str]) -> dict[Key, float]:
    added: defaultdict[Key, float] = defaultdict(float)
    for own, value in series.items():
        known = dict(own)
        added[tuple(known.get(label, "") for label in labels)] += value
    return dict(added)
