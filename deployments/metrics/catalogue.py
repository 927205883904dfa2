"""Every metric that Baton tells through Ray: name, type, labels, buckets, help. docs/reference/metrics.md has the same.

Those of vLLM have its names and meanings. vLLM's frontend runs in the ingress, so what vLLM counts by request is told
there, once for each answer, whichever replicas it was on. What vLLM counts by engine is told by the replica.
"""

from __future__ import annotations

from deployments.metrics.metric import FIRST_TOKEN_S, GAP_S, LATENCY_S, RATIO, TOKENS, Kind, Metric

_ALL: list[Metric] = []


def _add(name: str, kind: Kind, source: str, labels: str, help_text: str, buckets: tuple[float, ...] = ()) -> Metric:
    """`labels`: those after `model_name`, with spaces between them."""
    metric = Metric(name, kind, source, ("model_name", *labels.split()), help_text, buckets)
    _ALL.append(metric)
    return metric


def _histogram(name: str, help_text: str, buckets: tuple[float, ...], labels: str = "pool") -> Metric:
    return _add(name, Kind.HISTOGRAM, "ingress", labels, help_text, buckets)


def _ingress(name: str, help_text: str, labels: str = "pool") -> Metric:
    return _add(name, Kind.COUNTER, "ingress", labels, help_text)


def _replica(name: str, help_text: str, kind: Kind = Kind.COUNTER, labels: str = "pool") -> Metric:
    return _add(name, kind, "replica", labels, help_text)


def _manager(name: str, help_text: str, kind: Kind = Kind.COUNTER, labels: str = "") -> Metric:
    return _add(name, kind, "manager", labels, help_text)


# ---- an answer, by vLLM's names; `pool`: of the replica that writes the answer

TTFT = _histogram("vllm:time_to_first_token_seconds", "From a request's arrival until its first token.", FIRST_TOKEN_S)
ITL = _histogram("vllm:inter_token_latency_seconds", "From one output of an answer to the next.", GAP_S)
TPOT = _histogram(
    "vllm:request_time_per_output_token_seconds", "The mean time of an answer's tokens after the first.", GAP_S
)
E2E = _histogram("vllm:e2e_request_latency_seconds", "From a request's arrival until its answer's end.", LATENCY_S)
QUEUE = _histogram("vllm:request_queue_time_seconds", "In the engine, until the prompt's first step.", LATENCY_S)
PREFILL = _histogram("vllm:request_prefill_time_seconds", "In the engine, from there to the first token.", LATENCY_S)
DECODE = _histogram("vllm:request_decode_time_seconds", "From the first to the last token.", LATENCY_S)
PROMPT_LENGTH = _histogram("vllm:request_prompt_tokens", "Tokens of the prompts of ended requests.", TOKENS)
COMPUTED_LENGTH = _histogram(
    "vllm:request_prefill_kv_computed_tokens", "Of these, computed: no cache had them.", TOKENS
)
ANSWER_LENGTH = _histogram("vllm:request_generation_tokens", "Tokens of ended answers.", TOKENS)
PROMPT_TOKENS = _ingress("vllm:prompt_tokens", "Prompt tokens, each request once.")
BY_SOURCE = _ingress(
    "vllm:prompt_tokens_by_source",
    "Of these: `local_compute`, `local_cache_hit`, `external_kv_transfer`.",
    "pool source",
)
CACHED = _ingress("vllm:prompt_tokens_cached", "Of these, found in a cache.")
GENERATED = _ingress("vllm:generation_tokens", "Tokens of answers, each once.")
SUCCESS = _ingress("vllm:request_success", "Ended answers: `stop`, `length`, `abort`, `error`.", "pool finished_reason")

# ---- an engine, by vLLM's names

RUNNING = _replica("vllm:num_requests_running", "Requests in the engine's batch.", Kind.GAUGE)
WAITING = _replica("vllm:num_requests_waiting", "Requests that wait in the engine.", Kind.GAUGE)
WAITING_BY_REASON = _replica(
    "vllm:num_requests_waiting_by_reason",
    "Of these: `capacity`; `deferred`, such as for their KV.",
    Kind.GAUGE,
    "pool reason",
)
KV_USAGE = _replica("vllm:kv_cache_usage_perc", "The share of KV blocks in use; 1: all.", Kind.GAUGE)
CACHE_QUERIES = _replica("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.")
CACHE_HITS = _replica("vllm:prefix_cache_hits", "Tokens found there.")
LOADED = _replica("vllm:external_prefix_cache_hits", "Tokens that came through a KV connector.")
PREEMPTIONS = _replica("vllm:num_preemptions", "Requests that the engine preempted.")
NIXL_TIME = _replica("vllm:nixl_xfer_time_seconds", "KV writes, and how long they were under way.", Kind.SUMS)
NIXL_BYTES = _replica("vllm:nixl_bytes_transferred", "KV writes, and their bytes.", Kind.SUMS)
NIXL_FAILED = _replica(
    "vllm:nixl_num_failed_transfers",
    "Handoffs that were not written whole. A total, by the name of Ray's panel.",
    Kind.GAUGE,
)

# ---- requests and sessions

REQUESTS = _ingress(
    "baton_requests",
    "HTTP requests by how they were placed, by the rule that kept them whole, and by HTTP status.",
    "mode rule status",
)
SESSIONS = _ingress("baton_sessions", "Ended sessions by mode, rule and outcome.", "pool mode rule outcome")
TTFT_PART = _ingress(
    "baton_ttft_seconds", "Seconds of all first tokens by part. The parts add up to the whole.", "pool part"
)
HANDOFF = _histogram("baton_handoff_gap_seconds", "From a split answer's first token to decode's first.", GAP_S)
TTFT_RATIO = _histogram("baton_ttft_prediction_ratio", "Time from placement to first token, to predicted.", RATIO)
TPOT_RATIO = _histogram("baton_tpot_prediction_ratio", "An answer's TPOT, to predicted.", RATIO)
BATCH_LINES = _ingress("baton_batch_lines", "Lines of batches, by what became of them.", "outcome")
BATCHES = _add("baton_batches_running", Kind.GAUGE, "ingress", "", "Batches that the ingress works on.")
AGAIN = _ingress("baton_sessions_placed_again", "Placements after a `move` or a `loss`, by error.", "pool cause error")

# ---- a replica

PARTS = _replica("baton_sessions_running", "Sessions that have a part on the replica.", Kind.GAUGE)
PARTS_ENDED = _replica("baton_sessions_ended", "Parts of sessions that have ended on the replica.")
MOVED_OUT = _replica("baton_sessions_moved_out", "Sessions that went to other replicas.")
TOKENS_DONE = _replica(
    "baton_engine_tokens", "Tokens `computed`, `cached`, `loaded`, `generated` here.", labels="pool kind"
)
HANDOFFS = _replica(
    "baton_handoffs", "Handoffs: `landed`, `failed` on prefill; `received`, `broken` on decode.", labels="pool outcome"
)
HANDOFF_BYTES = _replica(
    "baton_handoff_bytes", "KV bytes written to decode: `during_prefill`, `after_prefill`.", labels="pool when"
)
BAD_MESSAGES = _replica("baton_bad_messages", "Messages between replicas that were wrong.", labels="pool kind")

FETCHES = _replica(
    "baton_fetches",
    "Fetches of cached KV: `landed`, `failed` of others here; `broken` of this one.",
    labels="pool outcome",
)
FETCHES_CORRUPT = _replica(
    "baton_fetches_corrupt", "Of the `broken` ones: a block came with other bytes than its source had."
)
FETCHED_BLOCKS = _replica("baton_fetched_blocks", "KV blocks that came from other replicas' caches.")
FETCH_SECONDS = _replica("baton_fetch_seconds", "The time of the fetches that brought them.")
TIER_BLOCKS = _replica("baton_tier_blocks", "KV blocks by tier: `hits`, `stored`, `evicted`.", labels="pool tier event")
TIER_MISSES = _replica("baton_tier_misses", "KV blocks that no tier had when they were to be loaded.")
TIER_BYTES = _replica("baton_tier_bytes", "KV bytes `loaded` from tiers and `stored` there.", labels="pool way")
TIER_SECONDS = _replica("baton_tier_seconds", "How long that took.", labels="pool way")
TIER_ERRORS = _replica(
    "baton_tier_errors",
    "Blocks with another `digest` than when they were stored; failed calls of the `disk`.",
    labels="pool kind",
)

# ---- the session manager

PLACEMENTS = _manager("baton_placements", "Placements by policy, mode and reason.", labels="policy mode reason")
REFUSALS = _manager("baton_refusals", "Sessions refused, by code.", labels="code")
CLOSED = _manager("baton_placements_closed", "Placements that ended, by outcome.", labels="outcome")
HANDED_ON = _manager(
    "baton_prompts_handed_on",
    "Beginnings of prompts that were to go from a leaving replica's cache to others: `came`, `failed`.",
    labels="outcome",
)
HANDED_ON_BLOCKS = _manager("baton_blocks_handed_on", "KV blocks that came to others so.")
LET_GO = _manager("baton_sessions_let_go", "Sessions of classes that yield that gave way to others.")
OPEN = _manager("baton_sessions_open", "Sessions that are placed.", Kind.GAUGE)
QUEUED = _manager("baton_sessions_queued", "Sessions that wait for a place.", Kind.GAUGE, "class")
PROMISED = _manager("baton_promised_blocks", "KV blocks promised to sessions.", Kind.GAUGE, "pool")
USED = _manager("baton_used_blocks", "KV blocks in use, as replicas report them.", Kind.GAUGE, "pool")
PINNED = _manager("baton_pinned_blocks", "KV blocks that pinned prefixes hold.", Kind.GAUGE, "pool")
TOTAL = _manager("baton_total_blocks", "KV blocks there are.", Kind.GAUGE, "pool")
READY = _manager("baton_replicas_ready", "Replicas that take sessions.", Kind.GAUGE, "pool")
COPIES = _manager("baton_prefix_copies", "Copies of hot prefixes that replicas were told to fetch.")
BREAKERS = _manager("baton_breakers_open", "Replicas that get nothing for a while, after a loss.", Kind.GAUGE)
COVERAGE = _manager(
    "baton_length_prediction_coverage", "The share of answers no longer than predicted.", Kind.GAUGE, "quantile"
)
TARGET = _manager("baton_scaling_target", "Replicas that the pool should have.", Kind.GAUGE, "pool")
SHORT = _manager("baton_scaling_short", "1 for the pool that lacks most, 0 for others.", Kind.GAUGE, "pool")
DECISIONS = _manager(
    "baton_scaling_decisions", "Changed targets, by direction and code of the reason.", labels="pool direction reason"
)
PLANS = _manager("baton_scaling_plans", "Plans, by the code of the pool's reason.", labels="pool reason")
FAILURES = _manager("baton_scaling_failures", "Plans that failed, so that the last one stayed.")

METRICS = tuple(_ALL)
