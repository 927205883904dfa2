"""TTFT, time between tokens and tokens per second of one ingress: in the last minute, and in each of the last hour."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from deployments.metrics.catalogue import GENERATED, ITL, TTFT
from deployments.metrics.metric import FIRST_TOKEN_S, GAP_S
from deployments.metrics.registry import Registry

LOOK_S = 5.0
"""Seconds between two looks at the metrics."""
LOOKS_A_MINUTE = 12
MINUTES = 60


@dataclass(frozen=True, slots=True)
class Look:
    """What the metrics have counted since the ingress began. `ttft`, `itl`: observations by bucket."""

    at_s: float
    ttft: tuple[int, ...]
    itl: tuple[int, ...]
    tokens: float


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The quantile of observations by bucket, in seconds, as Prometheus interpolates it. None where there are none.

    `bounds`: the upper bounds; what is above the last one counts as that.
    """
    rank, below = share * sum(counts), 0
    if not rank:
        return None
    for index, (bound, count) in enumerate(zip(bounds, counts, strict=False)):
        if below + count >= rank:
            lower = bounds[index - 1] if index else 0.0
            return lower + (bound - lower) * (rank - below) / count
        below += count
    return bounds[-1]


@dataclass(slots=True)
class Latencies:
    """Looks at a registry every `LOOK_S` seconds, and keeps one look a minute for an hour. Times: monotonic."""

    registry: Registry
    clock: Callable[[], float] = time.monotonic
    _looks: deque[Look] = field(default_factory=lambda: deque(maxlen=LOOKS_A_MINUTE + 1))
    _minutes: deque[Look] = field(default_factory=lambda: deque(maxlen=MINUTES + 1))

    def look(self) -> None:
        """Take one look."""
        ttft = self.registry.merged(TTFT, len(FIRST_TOKEN_S) + 1)
        itl = self.registry.merged(ITL, len(GAP_S) + 1)
        look = Look(self.clock(), ttft, itl, self.registry.total(GENERATED))
        self._looks.append(look)
        if not self._minutes or look.at_s - self._minutes[-1].at_s >= LOOK_S * LOOKS_A_MINUTE - LOOK_S / 2:
            self._minutes.append(look)

    def shown(self) -> dict[str, Any]:
        """`{"now": POINT, "hour": [POINT, ...]}`, the newest minute last; `now` is the last minute.

        A point: `ttft_p50_s`, `ttft_p99_s`, `itl_p50_s`, `itl_p99_s` (None without observations), `tokens_per_s`.
        """
        minutes = list(self._minutes)
        hour = [_between(first, last) for first, last in pairwise(minutes)]
        return {"now": _between(self._looks[0], self._looks[-1]) if self._looks else None, "hour": hour}


def _between(first: Look, last: Look) -> dict[str, float | None]:
    ttft = [after - before for before, after in zip(first.ttft, last.ttft, strict=True)]
    itl = [after - before for before, after in zip(first.itl, last.itl, strict=True)]
    return {
        "ttft_p50_s": quantile(FIRST_TOKEN_S, ttft, 0.5),
        "ttft_p99_s": quantile(FIRST_TOKEN_S, ttft, 0.99),
        "itl_p50_s": quantile(GAP_S, itl, 0.5),
        "itl_p99_s": quantile(GAP_S, itl, 0.99),
        "tokens_per_s": (last.tokens - first.tokens) / max(last.at_s - first.at_s, 1e-9),
    }


async def follow(latencies: Latencies) -> None:
    """Look again and again, without end."""
    while True:
        latencies.look()
        await asyncio.sleep(LOOK_S)
