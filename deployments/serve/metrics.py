"""Tells Ray a process's metrics every two seconds, with Serve's labels. Ray's exporter shows them to Prometheus.

A histogram is told as gauges with the names that Prometheus knows its buckets, sum and count by: Ray's own histogram
takes one observation at a time and tells its sum as a guess. Ray drops a gauge that is not told again, so all are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ray.serve.metrics import Counter, Gauge

from configs.schema import BatonConfig
from deployments.metrics.registry import Registry, Sample

EVERY_S = 2.0


class Exporter:
    """Tells Ray the values of one registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._told: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def tell(self) -> None:
        """Tell all values."""
        for sample in self._registry.samples():
            if sample.grows:
                self._add(sample)
            else:
                self._gauge(sample).set(sample.value, tags=dict(sample.labels))

    def _add(self, sample: Sample) -> None:
        key = sample.name, sample.labels
        if (more := sample.value - self._told.get(key, 0.0)) > 0:
            self._counter(sample).inc(more, tags=dict(sample.labels))
            self._told[key] = sample.value

    def _gauge(self, sample: Sample) -> Gauge:
        if sample.name not in self._gauges:
            self._gauges[sample.name] = Gauge(sample.name, description=sample.help, tag_keys=_keys(sample))
        return self._gauges[sample.name]

    def _counter(self, sample: Sample) -> Counter:
        if sample.name not in self._counters:
            self._counters[sample.name] = Counter(sample.name, description=sample.help, tag_keys=_keys(sample))
        return self._counters[sample.name]


def _keys(sample: Sample) -> tuple[str, ...]:
    return tuple(key for key, _ in sample.labels)


def registry_of(config: BatonConfig, **fixed: str) -> Registry | None:
    """The registry of a process; None where the configuration has no metrics."""
    return Registry(model_name=config.model.name, **fixed) if config.metrics else None


async def publish(registry: Registry, collect: Callable[[], Awaitable[None]] | None = None) -> None:
    """Tell Ray the values, again and again, without end. `collect`: brings them up to date before."""
    exporter = Exporter(registry)
    while True:
        if collect is not None:
            await collect()
        exporter.tell()
        await asyncio.sleep(EVERY_S)
