"""What a metric is, and vLLM's buckets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
"""vLLM's end at the model's length; these do not, so that all replicas have the same."""
RATIO = (0.125, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)
"""Of what came to what was predicted."""


class Kind(StrEnum):
    """SUMS: the sum and the count of something, without buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMS = "sums"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name`: vLLM's own where it begins with `vllm:`. `labels`: without those that Ray and Serve add.

    `source`: what tells it: `ingress`, `replica` or `manager`. `buckets`: upper bounds, of a histogram.
    """

    name: str
    kind: Kind
    source: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def told(self) -> str:
        """The name that Ray is told: as vLLM tells it where it runs in Ray."""
        return self.name.replace(":", "_")

    @property
    def shown(self) -> tuple[str, ...]:
        """The names that Prometheus scrapes."""
        base = f"ray_{self.told}"
        match self.kind:
            case Kind.COUNTER:
                return (f"{base}_total",)
            case Kind.GAUGE:
                return (base,)
            case Kind.HISTOGRAM:
                return (f"{base}_bucket", f"{base}_sum", f"{base}_count")
            case Kind.SUMS:
                return (f"{base}_sum", f"{base}_count")
