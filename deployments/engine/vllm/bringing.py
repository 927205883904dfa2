"""The request by which an engine gets KV from another replica's cache, without an answer that is of use."""

from __future__ import annotations

import copy

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from deployments.messages import Bring
from transfer.control.fetch_request import fetch_request
from transfer.memory.blocks import chained_hashes, salt_of


def brought(request: EngineCoreRequest, bring: Bring) -> EngineCoreRequest:
    """It has the beginning of the prompt of `request`, and one token more, which is computed for an output."""
    made = copy.copy(request)
    made.request_id, made.trace_headers = bring.id, None
    made.prompt_token_ids = [*(request.prompt_token_ids or ())[: bring.tokens], 0]
    fetch = fetch_request(bring.id, 1, bring.source.endpoints, bring.tokens, bring.timeout_s)
    told = {"kv_transfer_params": fetch}
    made.sampling_params = SamplingParams(temperature=0.0, max_tokens=1, extra_args=told)
    return made


def prompt_hashes(request: EngineCoreRequest, block_size: int) -> tuple[int, ...]:
    """The full blocks of its prompt, as the cluster core names them; none where KV depends on images or embeddings."""
    if request.prompt_token_ids is None or request.mm_features or request.prompt_embeds is not None:
        return ()
    adapter = request.lora_request.lora_name if request.lora_request else ""
    return chained_hashes(request.prompt_token_ids, block_size, salt=salt_of(adapter, request.cache_salt))
