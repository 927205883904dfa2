"""The values of one process's metrics. Counting costs well under a microsecond; telling them costs more, and waits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from deployments.metrics.metric import Kind, Metric


class Value:
    """A counter's or a gauge's value. A counter only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        """A gauge's value, or a counter's total that is counted elsewhere."""
        self.value = value


class Histogram:
    """Observations by bucket, and their sum. `bounds`: the upper bounds; one more bucket takes what is above them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def reach(self, total: float, count: int) -> None:
        """Take over a sum and a count that are counted elsewhere."""
        self.total, self.counts[-1] = total, count

    @property
    def count(self) -> int:
        return sum(self.counts)


class Sample(NamedTuple):
    """One number to tell. `grows`: it is a counter, which is told by what was added."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    grows: bool
    help: str


class Registry:
    """`fixed`: labels that are the same for all of this process, such as `model_name`, for those metrics that have
    them."""

    def __init__(self, **fixed: str) -> None:
        self._fixed = fixed
        self._values: dict[tuple[str, ...], tuple[Metric, Value]] = {}
        self._histograms: dict[tuple[str, ...], tuple[Metric, Histogram]] = {}

    def value(self, metric: Metric, **labels: str) -> Value:
        """The counter or gauge with these labels. Keep it where it is used often. Raises KeyError without a label."""
        key = self._key(metric, labels)
        if key not in self._values:
            self._values[key] = metric, Value()
        return self._values[key][1]

    def histogram(self, metric: Metric, **labels: str) -> Histogram:
        """The histogram with these labels, as `value`."""
        key = self._key(metric, labels)
        if key not in self._histograms:
            self._histograms[key] = metric, Histogram(metric.buckets)
        return self._histograms[key][1]

    def total(self, metric: Metric) -> float:
        """The sum of a counter over all its labels."""
        return sum(value.value for of, value in self._values.values() if of is metric)

    def merged(self, metric: Metric, buckets: int) -> tuple[int, ...]:
        """A histogram's observations by bucket, over all its labels. `buckets`: how many there are."""
        found = [histogram.counts for of, histogram in self._histograms.values() if of is metric]
        return tuple(map(sum, zip(*found, strict=True))) if found else (0,) * buckets

    def samples(self) -> Iterator[Sample]:
        """Every number, as Prometheus knows it."""
        for key, (metric, value) in self._values.items():
            yield Sample(metric.told, _pairs(metric, key), value.value, metric.kind is Kind.COUNTER, metric.help)
        for key, (metric, histogram) in self._histograms.items():
            yield from _of_histogram(metric, _pairs(metric, key), histogram)

    def _key(self, metric: Metric, labels: dict[str, str]) -> tuple[str, ...]:
        given = self._fixed | labels
        return (metric.name, *(given[name] for name in metric.labels))


def _pairs(metric: Metric, key: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple(zip(metric.labels, key[1:], strict=True))


def _of_histogram(metric: Metric, labels: tuple[tuple[str, str], ...], histogram: Histogram) -> Iterator[Sample]:
    count = 0
    if metric.kind is Kind.HISTOGRAM:
        for bound, inside in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            count += inside
            le = "+Inf" if bound == float("inf") else str(bound)
            yield Sample(f"{metric.told}_bucket", (*labels, ("le", le)), count, grows=False, help=metric.help)
    yield Sample(f"{metric.told}_sum", labels, histogram.total, grows=False, help=metric.help)
    yield Sample(f"{metric.told}_count", labels, histogram.count, grows=False, help=metric.help)
