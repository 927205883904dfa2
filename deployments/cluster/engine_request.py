"""What a request of vLLM's frontend is for a session: to placement, to each engine, and when a part is answered.

One of the seven files that import vllm.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from deployments.cluster.request_context import RequestContext
from deployments.messages import Handoff, Placement, ReplicaInfo, Role, SessionRequest
from deployments.policy.placement.split import RequestTraits, split_rule
from transfer.memory.blocks import chained_hashes


def session_request(
    request: EngineCoreRequest,
    context: RequestContext | None,
    handoff: Handoff,
    block_size: int,
    session_id: str,
    attempt: int,
    answered: Sequence[int] = (),
) -> SessionRequest:
    """What placement is asked. What was answered before is computed like a prompt."""
    what = traits(request, len(answered))
    allowed, rule = split_rule(what, handoff)
    adapter = request.lora_request.lora_name if request.lora_request else ""
    tokens = [*(request.prompt_token_ids or ()), *answered]
    return SessionRequest(
        session_id,
        len(tokens),
        what.max_tokens,
        allowed,
        rule,
        hashes=_hashes(request, tokens, block_size, adapter),
        priority=context.priority if context else "",
        client=context.client if context else "",
        affinity=context.affinity if context else "",
        adapter=adapter,
        chat=context.chat if context else False,
        attempt=attempt,
    )


def _hashes(request: EngineCoreRequest, tokens: list[int], block_size: int, adapter: str) -> tuple[int, ...]:
    """The blocks of `tokens` as replicas name theirs; none where KV depends on more than tokens and the adapter."""
    if len(tokens) < block_size or request.cache_salt or request.mm_features or request.prompt_embeds is not None:
        return ()
    return chained_hashes(tokens, block_size, salt=adapter)


def traits(request: EngineCoreRequest, answered_tokens: int = 0) -> RequestTraits:
    """What of a vLLM request bears on splitting it, and on going on with it."""
    params = request.sampling_params
    assert params is not None
    assert params.max_tokens is not None
    return RequestTraits(
        max_tokens=params.max_tokens - answered_tokens,
        prompt_logprobs=params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None,
        stateful_logits=params.thinking_token_budget is not None or bool(params.watermarking),
        has_embeds_or_multimodal=bool(request.mm_features) or request.prompt_embeds is not None,
        lora=request.lora_request is not None,
    )


def is_seeded(request: EngineCoreRequest) -> bool:
    """Whether a client expects the same sample each time."""
    params = request.sampling_params
    return params is not None and params.seed is not None and params.temperature > 0


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
    request: EngineCoreRequest,
    role: Role,
    handoff: Handoff,
    transfer: dict[str, Any] | None,
    answered: Sequence[int] = (),
) -> EngineCoreRequest:
    """The request as one replica gets it.

    `answered`: the tokens of its answer before (`transfer/vllm/continued_answer.py`).

    What a client may have said of KV transfers, or of an answer, does not reach an engine.
    """
    assert request.sampling_params is not None
    part, params = copy.copy(request), copy.copy(request.sampling_params)
    before: list[int] | None = list(answered) or None
    if transfer is not None and role is Role.PREFILL:
        if handoff is Handoff.PULLED:  # nobody sees its token: no grammar, no stops; decode pulls the prompt's KV alone
            params, before = SamplingParams(temperature=0.0, max_tokens=1), None
        else:
            params.max_tokens = len(answered) + 1
            params.min_tokens = min(params.max_tokens, params.min_tokens)
    # A client's `kv_cache_report_mode` would have the engine tell of blocks as cached that it has told of before.
    ours = {"kv_transfer_params": transfer, "baton_answered": before, "kv_cache_report_mode": None}
    told = {**(params.extra_args or {}), **ours}
    params.extra_args = {name: value for name, value in told.items() if value is not None} or None
    part.sampling_params = params
    return part


def remainder(request: EngineCoreRequest, sent: Sequence[int], attempt: int) -> EngineCoreRequest:
    """A request that is placed again, when `sent` has been answered.

    It has an id of its own, so that nothing of an older attempt can be taken for its output, nor ends it.
    """
    left = copy.copy(request)
    left.request_id = f"{request.request_id}~{attempt}"
    if sent:
        left.sampling_params = params = copy.copy(request.sampling_params)
        assert params is not None
        params.prompt_logprobs = params.prompt_logprob_token_ids = None  # told with the first of them
    return left
