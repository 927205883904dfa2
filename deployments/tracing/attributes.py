"""The names of attributes of spans and metrics. Those of spans that begin with `gen_ai` are vLLM's.

docs/guides/tracing.md explains all.
"""

from __future__ import annotations

REQUEST_ID = "gen_ai.request.id"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
MODEL = "gen_ai.response.model"
PROMPT_TOKENS = "gen_ai.usage.prompt_tokens"
OUTPUT_TOKENS = "gen_ai.usage.completion_tokens"
SEQUENCES = "gen_ai.usage.num_sequences"
TTFT_S = "gen_ai.latency.time_to_first_token"
E2E_S = "gen_ai.latency.e2e"
QUEUE_S = "gen_ai.latency.time_in_queue"
PREFILL_S = "gen_ai.latency.time_in_model_prefill"
DECODE_S = "gen_ai.latency.time_in_model_decode"

METHOD, PATH, STATUS = "http.request.method", "url.path", "http.response.status_code"
ERROR_TYPE = "error.type"
OPERATION, PROVIDER = "gen_ai.operation.name", "gen_ai.provider.name"
"""Of metrics alone, as OpenTelemetry has them."""

SESSION = "baton.session"
CLASS = "baton.class"
KEY = "baton.key"
MODE = "baton.mode"
RULE = "baton.rule"
REASON = "baton.reason"
OUTCOME = "baton.outcome"
ATTEMPT = "baton.attempt"
CAUSE = "baton.cause"
CACHED_TOKENS = "baton.cached_tokens"
POOL, REPLICA, FROM_REPLICA = "baton.pool", "baton.replica", "baton.from_replica"
