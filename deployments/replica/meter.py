"""What a replica tells of itself for Prometheus. Nothing is counted twice: it reads what the replica counts anyway."""

from __future__ import annotations

import itertools
from typing import Protocol

from deployments.engine.protocol import EngineLoad
from deployments.metrics import catalogue as names
from deployments.metrics.metric import Metric
from deployments.metrics.registry import Registry

READ_EVERY = 5
"""Every so many rounds, the counters of an engine that works are read: that costs the engine a moment."""

_TOTALS: tuple[tuple[Metric, str], ...] = (
    (names.CACHE_QUERIES, "cache_queries"),
    (names.CACHE_HITS, "cached_tokens"),
    (names.LOADED, "loaded_tokens"),
    (names.PREEMPTIONS, "preemptions"),
    (names.MOVED_OUT, "moved_out"),
    (names.NIXL_FAILED, "handoffs_failed"),
    (names.FETCHED_BLOCKS, "blocks_fetched"),
    (names.FETCHES_CORRUPT, "fetches_corrupt"),
    (names.FETCH_SECONDS, "fetch_s"),
    (names.TIER_MISSES, "tier_misses"),
)
_TOKENS = ("computed", "cached", "loaded", "generated")
_HANDOFFS = ("landed", "failed", "received", "broken")
_FETCHES = ("landed", "failed", "broken")
_TIERS, _TIER_EVENTS, _TIER_WAYS = (
    ("host", "disk"),
    ("hits", "stored", "evicted"),
    {"loaded": "load", "stored": "store"},
)
_TIER_ERRORS = {"digest": "digest_failures", "disk": "disk_errors"}
_BAD = {"unreadable": "bad_messages", "refused": "messages_refused"}


class Measured(Protocol):
    """A replica; see `replica.Replica`."""

    @property
    def open_runs(self) -> int: ...

    @property
    def ended_runs(self) -> int: ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def total_blocks(self) -> int: ...

    @property
    def totals(self) -> dict[str, float]: ...

    async def refresh(self) -> None: ...


class ReplicaMeter:
    """Brings a replica's metrics up to date. `registry`: has `model_name` and `pool`."""

    def __init__(self, registry: Registry, replica: Measured) -> None:
        self._registry, self._replica, self._rounds = registry, replica, 0

    async def collect(self) -> None:
        """One round."""
        self._rounds += 1
        if self._rounds % READ_EVERY == 0:
            await self._replica.refresh()
        self._now(self._replica.load)
        self._since_start(self._replica.totals)

    def _now(self, load: EngineLoad) -> None:
        value, total = self._registry.value, self._replica.total_blocks
        value(names.PARTS).set(self._replica.open_runs)
        value(names.PARTS_ENDED).set(self._replica.ended_runs)
        value(names.RUNNING).set(load.running)
        value(names.WAITING).set(load.waiting)
        value(names.WAITING_BY_REASON, reason="deferred").set(load.deferred)
        value(names.WAITING_BY_REASON, reason="capacity").set(load.waiting - load.deferred)
        value(names.KV_USAGE).set(load.used_blocks / total if total else 0.0)

    def _since_start(self, totals: dict[str, float]) -> None:
        """Which counters there are depends on the engine and on the role."""
        value = self._registry.value
        for metric, name in _TOTALS:
            value(metric).set(totals.get(name, 0.0))
        for kind in _TOKENS:
            value(names.TOKENS_DONE, kind=kind).set(totals.get(f"{kind}_tokens", 0.0))
        for outcome in _HANDOFFS:
            value(names.HANDOFFS, outcome=outcome).set(totals.get(f"handoffs_{outcome}", 0.0))
        overlapped = totals.get("bytes_overlapped", 0.0)
        value(names.HANDOFF_BYTES, when="during_prefill").set(overlapped)
        value(names.HANDOFF_BYTES, when="after_prefill").set(totals.get("bytes_written", 0.0) - overlapped)
        for kind, name in _BAD.items():
            value(names.BAD_MESSAGES, kind=kind).set(totals.get(name, 0.0))
        self._of_caches(totals)
        for metric, name in ((names.NIXL_TIME, "write_s"), (names.NIXL_BYTES, "bytes_written")):
            self._registry.histogram(metric).reach(totals.get(name, 0.0), int(totals.get("writes", 0)))

    def _of_caches(self, totals: dict[str, float]) -> None:
        """Fetches from other replicas' caches, and KV tiers."""
        value = self._registry.value
        for outcome in _FETCHES:
            value(names.FETCHES, outcome=outcome).set(totals.get(f"fetches_{outcome}", 0.0))
        for tier, event in itertools.product(_TIERS, _TIER_EVENTS):
            value(names.TIER_BLOCKS, tier=tier, event=event).set(totals.get(f"tier_{tier}_{event}", 0.0))
        for way, name in _TIER_WAYS.items():
            value(names.TIER_BYTES, way=way).set(totals.get(f"tier_{way}_bytes", 0.0))
            value(names.TIER_SECONDS, way=way).set(totals.get(f"tier_{name}_s", 0.0))
        for kind, name in _TIER_ERRORS.items():
            value(names.TIER_ERRORS, kind=kind).set(totals.get(f"tier_{name}", 0.0))
