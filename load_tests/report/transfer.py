"""Turns many handoffs into the figures of the transfer benchmark. Pure: no engines, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from load_tests.report.handoffs import Handoff, median, percentile

GB = 1e9


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that was handed over. Times are in seconds.

    `prefill_s`: from the engine's first chunk scheduled to its token received. `step_s`: one later decode step.
    `cpu_s`: CPU of both engines' processes. `alone_*`: the request of the same length in the same round that was served
    without a transfer.
    """

    system: str
    prompt_tokens: int
    handoff: Handoff
    handoff_s: float
    step_s: float
    prefill_s: float
    cpu_s: float
    alone_prefill_s: float
    alone_cpu_s: float

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds beyond those of the request without a transfer, per 10^9 bytes moved."""
        return (self.cpu_s - self.alone_cpu_s) / self.handoff.size * GB


def by_prompt(samples: Sequence[Sample]) -> dict[str, dict[str, dict[str, Any]]]:
    """The figures, by prompt tokens and then by system."""
    groups: dict[int, dict[str, list[Sample]]] = {}
    for sample in sorted(samples, key=lambda sample: sample.prompt_tokens):
        groups.setdefault(sample.prompt_tokens, {}).setdefault(sample.system, []).append(sample)
    return {
        str(prompt): {system: _figures(of_system) for system, of_system in systems.items()}
        for prompt, systems in groups.items()
    }


def _figures(samples: Sequence[Sample]) -> dict[str, Any]:
    handoffs = [sample.handoff for sample in samples]
    ready_ms = [handoff.kv_ready_s * 1e3 for handoff in handoffs]
    cpu = [sample.cpu_s_per_gb for sample in samples]
    return {
        "repeats": len(samples),
        "bytes": handoffs[0].size,
        "kv_ready_ms_p50": round(median(ready_ms), 2),
        "kv_ready_ms_p99": round(percentile(ready_ms, 0.99), 2),
        "kv_written_ms_p50": round(median([handoff.kv_written_s * 1e3 for handoff in handoffs]), 2),
        "handoff_ms_p50": round(median([sample.handoff_s * 1e3 for sample in samples]), 2),
        "decode_step_ms_p50": round(median([sample.step_s * 1e3 for sample in samples]), 2),
        "overlap_share": round(median([handoff.overlap_share for handoff in handoffs]), 4),
        "gb_per_s": round(median([handoff.size / handoff.span_s / GB for handoff in handoffs]), 3),
        "in_flight_gb_per_s": round(median([handoff.size / handoff.in_flight_s / GB for handoff in handoffs]), 3),
        "cpu_s_per_gb": round(median(cpu), 2),
        "cpu_s_per_gb_range": [round(min(cpu), 2), round(max(cpu), 2)],
        "prefill_s_p50": round(median([sample.prefill_s for sample in samples]), 3),
    }


def prefill_slowdown(samples: Sequence[Sample], system: str) -> dict[str, Any] | None:
    """How much longer the prefill takes with a transfer than without, as a share, at about 1000 tokens."""
    mine = [sample for sample in samples if sample.system == system]
    if not mine:
        return None
    prompt = min({sample.prompt_tokens for sample in mine}, key=lambda tokens: abs(tokens - 1000))
    shares = [s.prefill_s / s.alone_prefill_s - 1 for s in mine if s.prompt_tokens == prompt]
    return {
        "prompt_tokens": prompt,
        "share": round(median(shares), 4),
        "range": [round(min(shares), 4), round(max(shares), 4)],
        "repeats": len(shares),
    }


def targets(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each target with its figure, and whether it is met. A target that this run did not measure is left out."""
    rows = figures["by_prompt"]
    ours = {int(prompt): systems["baton"] for prompt, systems in rows.items() if "baton" in systems}
    found: dict[str, tuple[float, float]] = {}
    if 1500 in ours and "vllm_pull" in rows["1500"]:
        pull_ms = rows["1500"]["vllm_pull"]["kv_ready_ms_p50"]
        found["kv_ready_at_1500_over_vllm_pull"] = (ours[1500]["kv_ready_ms_p50"] / pull_ms, 0.2)
    if 4096 in ours and 512 in ours:
        found["kv_ready_at_4096_over_512"] = (ours[4096]["kv_ready_ms_p50"] / ours[512]["kv_ready_ms_p50"], 1.5)
    if long := [row for prompt, row in ours.items() if prompt >= 1000]:
        found["bytes_after_prefill_from_1000"] = (1 - min(row["overlap_share"] for row in long), 0.05)
    if (slowdown := figures.get("prefill_slowdown")) is not None:
        found["prefill_slowdown"] = (slowdown["share"], 0.03)
    if "baton" in figures["idle_cpu_cores"]:
        found["idle_cpu_cores"] = (figures["idle_cpu_cores"]["baton"], 0.02)
    return {
        name: {"value": round(value, 4), "at_most": limit, "met": value <= limit}
        for name, (value, limit) in found.items()
    }
