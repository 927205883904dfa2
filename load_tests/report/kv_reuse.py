"""Turns times to first tokens of second turns into the figures of the benchmark `kv_reuse`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from load_tests.report.handoffs import median, percentile

GB = 1e9
FETCH_TARGET, DISK_TARGET, SLOWDOWN_TARGET = 0.25, 0.4, 0.03
TARGET_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class Sample:
    """One second turn. `history`: the tokens of the first one. `way`: where the history's KV came from.

    `reused_bytes`: of the history's whole blocks. `brought_s`: the time in which they came.
    """

    history: int
    way: str
    ttft_s: float
    reused_bytes: int
    brought_s: float = 0.0


def by_tokens(samples: Sequence[Sample]) -> dict[str, dict[str, dict[str, Any]]]:
    """The figures by tokens of the history, and then by way.

    `gb_per_s`: the bytes over what the way adds to the median time to a first token where all is cached; None for a way
    that moves nothing, or adds nothing that can be measured. `layered_saves_at_most`: the time in which the KV comes,
    or that of a cached turn where that is shorter, over the time to a first token; None for a way that moves nothing.
    """
    groups: dict[int, dict[str, list[Sample]]] = {}
    for sample in samples:
        groups.setdefault(sample.history, {}).setdefault(sample.way, []).append(sample)
    return {str(history): _by_way(ways) for history, ways in sorted(groups.items())}


def _by_way(ways: Mapping[str, Sequence[Sample]]) -> dict[str, dict[str, Any]]:
    cached = median([sample.ttft_s for sample in ways["cached"]]) if "cached" in ways else None
    return {way: _figures(way, samples, cached) for way, samples in ways.items()}


def _figures(way: str, samples: Sequence[Sample], cached_s: float | None) -> dict[str, Any]:
    ttfts, brought_s = [sample.ttft_s for sample in samples], median([sample.brought_s for sample in samples])
    is_moved = cached_s is not None and way not in ("cached", "recompute")
    added, hidden_s = (median(ttfts) - cached_s, min(brought_s, cached_s)) if cached_s and is_moved else (0.0, None)
    return {
        "repeats": len(samples),
        "ttft_s_p50": round(median(ttfts), 4),
        "ttft_s_p99": round(percentile(ttfts, 0.99), 4),
        "gb_per_s": round(samples[0].reused_bytes / added / GB, 2) if added > 0 else None,
        "brought_s_p50": round(brought_s, 4),
        "layered_saves_at_most": None if hidden_s is None else round(hidden_s / median(ttfts), 3),
    }


def of_recomputing(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """The median of each way over that of recomputing, by tokens of the history."""
    return {
        history: {
            way: round(each["ttft_s_p50"] / ways["recompute"]["ttft_s_p50"], 3)
            for way, each in ways.items()
            if way != "recompute"
        }
        for history, ways in figures.items()
        if "recompute" in ways
    }


def slowdown(alone_s: Sequence[float], beside_s: Sequence[float]) -> dict[str, float]:
    """How much longer a prefill takes beside fetches: the median ratio of neighbours less 1, and its range."""
    ratios = [beside / alone - 1 for alone, beside in zip(alone_s, beside_s, strict=True)]
    return {"p50": round(median(ratios), 4), "least": round(min(ratios), 4), "most": round(max(ratios), 4)}


def targets(
    ratios: Mapping[str, Mapping[str, float]], slowed: Mapping[str, Mapping[str, float]] | None
) -> dict[str, bool]:
    """Which targets are met. Those of what was not measured are left out."""
    at = ratios.get(str(TARGET_TOKENS), {})
    limits = {"fetch_prefill": FETCH_TARGET, "fetch_decode": FETCH_TARGET, "host": FETCH_TARGET, "disk": DISK_TARGET}
    met = {f"{way}_at_most_{limit}": at[way] <= limit for way, limit in limits.items() if way in at}
    return met | ({"prefill_slowed_under_3_percent": slowed["over_alone"]["p50"] < SLOWDOWN_TARGET} if slowed else {})
