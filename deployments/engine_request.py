"""What a request of vLLM's frontend is for a session: to placement, to each engine, and when a part is answered.

One of the five files that import vllm.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from deployments.messages import Handoff, Placement, ReplicaInfo, Role, SessionRequest
from deployments.policy.split import RequestTraits, split_rule
from deployments.request_context import RequestContext
from transfer.blocks import chained_hashes


def session_request(
    request: EngineCoreRequest,
    context: RequestContext | None,
    handoff: Handoff,
    block_size: int,
    session_id: str,
    attempt: int,
) -> SessionRequest:
    """What placement is asked; `request` is what is to be done in this attempt."""
    params = request.sampling_params
    assert params is not None
    assert params.max_tokens is not None
    allowed, rule = split_rule(traits(request), handoff)
    adapter = request.lora_request.lora_name if request.lora_request else ""
    return SessionRequest(
        session_id,
        len(request.prompt_token_ids or ()),
        params.max_tokens,
        allowed,
        rule,
        hashes=_hashes(request, block_size, adapter),
        priority=context.priority if context else "",
        client=context.client if context else "",
        affinity=context.affinity if context else "",
        adapter=adapter,
        chat=context.chat if context else False,
        attempt=attempt,
    )


def _hashes(request: EngineCoreRequest, block_size: int, adapter: str) -> tuple[int, ...]:
    """The prompt's blocks as replicas name theirs; none where KV depends on more than tokens and the adapter."""
    tokens = request.prompt_token_ids or []
    if len(tokens) < block_size or request.cache_salt or request.mm_features or request.prompt_embeds is not None:
        return ()
    return chained_hashes(tokens, block_size, salt=adapter)


def traits(request: EngineCoreRequest) -> RequestTraits:
    """What of a vLLM request bears on splitting it."""
    params = request.sampling_params
    assert params is not None
    assert params.max_tokens is not None
    return RequestTraits(
        max_tokens=params.max_tokens,
        prompt_logprobs=params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None,
        seeded_sampling=params.seed is not None and params.temperature > 0,
        output_penalties=params.presence_penalty != 0 or params.frequency_penalty != 0,
        structured_output=params.structured_outputs is not None,
        bad_words=bool(params.bad_words),
        stateful_logits=params.thinking_token_budget is not None or bool(params.watermarking),
        has_embeds_or_multimodal=bool(request.mm_features) or request.prompt_embeds is not None,
        lora=request.lora_request is not None,
        repetition_detection=params.repetition_detection is not None,
    )


def pushed(placement: Placement, role: Role, peer: ReplicaInfo) -> dict[str, Any]:
    """What Baton's connector is told: which handoff, and where the other side's workers are."""
    return {
        "baton": {
            "role": str(role),
            "session": placement.session_id,
            "epoch": placement.epoch,
            "peers": list(peer.endpoints),
        }
    }


def part(
    request: EngineCoreRequest, role: Role, handoff: Handoff, transfer: dict[str, Any] | None
) -> EngineCoreRequest:
    """The request as one replica gets it. What a client may have said of KV transfers does not reach an engine."""
    assert request.sampling_params is not None
    part, params = copy.copy(request), copy.copy(request.sampling_params)
    if transfer is not None:
        params = _split(params, role, handoff)
    # A client's `kv_cache_report_mode` would have the engine tell of blocks as cached that it has told of before.
    told = {**(params.extra_args or {}), "kv_transfer_params": transfer, "kv_cache_report_mode": None}
    params.extra_args = {name: value for name, value in told.items() if value is not None} or None
    part.sampling_params = params
    return part


def _split(params: SamplingParams, role: Role, handoff: Handoff) -> SamplingParams:
    """One role's share of the sampling; `params` is changed."""
    assert params.max_tokens is not None
    match handoff, role:
        case Handoff.PULLED, Role.PREFILL:
            return SamplingParams(temperature=0.0, max_tokens=1)  # nobody sees its token: no grammar, no stops
        case Handoff.PUSHED, Role.PREFILL:
            params.max_tokens, params.min_tokens = 1, min(1, params.min_tokens)
        case Handoff.PUSHED, Role.DECODE:
            params.max_tokens, params.min_tokens = params.max_tokens - 1, max(0, params.min_tokens - 1)
    return params


def rest(request: EngineCoreRequest, sent: Sequence[int], attempt: int) -> EngineCoreRequest:
    """What is left of a request when `sent` has been answered: those tokens are the end of the prompt now.

    It has an id of its own, so that nothing of an older attempt can be taken for its output, nor ends it.
    """
    assert request.sampling_params is not None
    assert request.sampling_params.max_tokens is not None
    left, params = copy.copy(request), copy.copy(request.sampling_params)
    left.request_id = f"{request.request_id}~{attempt}"
    left.sampling_params = params
    if sent:
        left.prompt_token_ids = [*(request.prompt_token_ids or ()), *sent]
        params.max_tokens = request.sampling_params.max_tokens - len(sent)
        params.min_tokens = max(0, params.min_tokens - len(sent))
        params.prompt_logprobs = params.prompt_logprob_token_ids = None  # told with the first of them
    return left
