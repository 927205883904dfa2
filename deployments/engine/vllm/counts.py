"""What an engine's outputs and statistics add up to."""

from __future__ import annotations

from vllm.v1.metrics.stats import SchedulerStats

from deployments.engine.protocol import EngineLoad
from deployments.engine.vllm.outputs import Seen
from deployments.messages import StepSample

COUNTERS = (
    "prompt_tokens",
    "computed_tokens",
    "cached_tokens",
    "cache_queries",
    "loaded_tokens",
    "generated_tokens",
    "preemptions",
)


class Counts:
    """`totals`: the counters since the engine's start. `load`: what it said in its last step."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(COUNTERS, 0.0)
        self.load = EngineLoad()

    def output(self, output: Seen) -> None:
        """Count one request's part of a step."""
        if (stats := output.prefill_stats) is not None:
            self.totals["prompt_tokens"] += stats.num_prompt_tokens
            self.totals["computed_tokens"] += stats.num_computed_tokens
        self.totals["generated_tokens"] += len(output.new_token_ids)

    def observe(self, stats: SchedulerStats, total_blocks: int, cached_blocks: int) -> tuple[StepSample, ...]:
        """Count a step's statistics, and bring `load` up to date. Returns the steps that the statistics report."""
        steps = steps_of(stats)
        local, remote = stats.prefix_cache_stats, stats.connector_prefix_cache_stats
        self.totals["cached_tokens"] += local.hits
        self.totals["cache_queries"] += local.queries
        self.totals["preemptions"] += local.preempted_requests
        self.totals["loaded_tokens"] += remote.hits if remote is not None else 0
        self.load = EngineLoad(
            used_blocks=round(stats.kv_cache_usage * total_blocks),
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            cached_blocks=cached_blocks,
            deferred=stats.num_skipped_waiting_reqs,
            running_tokens=sum(step.decode_context for step in steps),
            counters=dict(self.totals),
            pinned=(stats.kv_connector_stats or {}).get("pins", self.load.pinned),
        )
        return steps


def steps_of(stats: SchedulerStats) -> tuple[StepSample, ...]:
    """The step that an engine's statistics report, as its connector saw it (`transfer.vllm.step_clock`)."""
    step = (stats.kv_connector_stats or {}).get("step")
    return () if step is None else (StepSample(*step),)
