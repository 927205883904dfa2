"""What a request of vLLM's frontend becomes: a question to placement, a part for each engine, a remainder after a loss.

This file imports vllm.
"""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.engine import EngineCoreRequest, FinishReason

from deployments.checkpoint.adapter import engine_name
from deployments.cluster.request_context import RequestContext
from deployments.cluster.session import Finish
from deployments.messages import Handoff, Placement, ReplicaInfo, Role, SessionRequest
from deployments.policy.placement.split import RequestTraits, split_rule
from transfer.control.fetch_request import fetch_request
from transfer.memory.blocks import chained_hashes, salt_of

FINISH = {
    FinishReason.LENGTH: Finish.LENGTH,
    FinishReason.STOP: Finish.STOP,
    FinishReason.REPETITION: Finish.STOP,
    FinishReason.ABORT: Finish.ABORT,
    FinishReason.ERROR: Finish.ERROR,
}


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left of a request when an attempt begins; for the first attempt that is all of it.

    `number`: the number of this placement of the session, from 1. `answered`: the tokens that the client had before.
    `moved_from`: the replica that gave the session up and hands its KV over; "" for a first attempt and after a loss.
    `after_progress`: the attempt before this one gave more than a first token. `failed_handoffs`: see `SessionRequest`.
    """

    number: int
    request: EngineCoreRequest
    answered: tuple[int, ...] = ()
    moved_from: str = ""
    after_progress: bool = False
    failed_handoffs: tuple[str, ...] = ()


def session_request(
    left: Remainder,
    context: RequestContext | None,
    handoff: Handoff,
    block_size: int,
    session_id: str,
    digest: int = 0,
    traceparent: str = "",
) -> SessionRequest:
    """The request to place a session. Tokens that were answered before are computed like a prompt. `digest`: of it."""
    request = left.request
    what = traits(request, len(left.answered))
    allowed, rule = split_rule(what, handoff)
    adapter = request.lora_request.lora_name if request.lora_request else ""
    tokens = [*(request.prompt_token_ids or ()), *left.answered]
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
        attempt=left.number,
        moved_from=left.moved_from,
        failed_handoffs=left.failed_handoffs,
        progressed=left.after_progress,
        answered_tokens=len(left.answered),
        digest=digest,
        quota=context.next_quota() if context else None,
        traceparent=traceparent,
    )


def _hashes(request: EngineCoreRequest, tokens: list[int], block_size: int, adapter: str) -> tuple[int, ...]:
    """The blocks of `tokens` as replicas name theirs; none where the KV depends on images or embeddings, too."""
    if len(tokens) < block_size or request.mm_features or request.prompt_embeds is not None:
        return ()
    return chained_hashes(tokens, block_size, salt=salt_of(adapter, request.cache_salt))


def name_adapter(request: EngineCoreRequest) -> None:
    """Give a request's adapter the name that engines and the prefix index know it by.

    Clients know it by its name alone. An adapter of the same name that is loaded later has another id.
    """
    if (adapter := request.lora_request) is not None:
        request.lora_request = named = copy.copy(adapter)
        named.lora_name = engine_name(adapter.lora_name, adapter.lora_int_id)


def keep_apart(request: EngineCoreRequest, context: RequestContext | None) -> None:
    """Let a request share cached KV only with those of its namespace, and of its own cache salt in there."""
    if context is not None and context.namespace is not None:
        whole = f"{context.namespace}\0{request.cache_salt or ''}".encode(errors="surrogatepass")
        request.cache_salt = hashlib.blake2b(whole, digest_size=16).hexdigest()


def traits(request: EngineCoreRequest, answered_tokens: int = 0) -> RequestTraits:
    """What of a vLLM request decides whether it can be split, and whether its answer can go on elsewhere."""
    params = request.sampling_params
    assert params is not None
    assert params.max_tokens is not None
    return RequestTraits(
        max_tokens=params.max_tokens - answered_tokens,
        prompt_logprobs=params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None,
        stateful_logits=params.thinking_token_budget is not None or bool(params.watermarking),
        has_embeds_or_multimodal=bool(request.mm_features) or request.prompt_embeds is not None,
    )


def digest(request: EngineCoreRequest) -> int:
    """Equal for requests that ask engines for the same: 64 bits of a hash of the prompt and the parameters."""
    what = hashlib.blake2b(digest_size=8)
    what.update(array("q", request.prompt_token_ids or ()).tobytes())
    for feature in request.mm_features or ():
        what.update(feature.identifier.encode())
    what.update(repr((request.lora_request, request.sampling_params)).encode())
    return int.from_bytes(what.digest(), "big")


def is_seeded(request: EngineCoreRequest) -> bool:
    """Whether a client expects the same sample each time."""
    params = request.sampling_params
    return params is not None and params.seed is not None and params.temperature > 0


def pushed(placement: Placement, role: Role, peer: ReplicaInfo) -> dict[str, Any]:
    """What Baton's connector is told: the handoff, and where the other side's workers are."""
    return {
        "baton": {
            "role": str(role),
            "session": placement.session_id,
            "epoch": placement.epoch,
            "peers": list(peer.endpoints),
        }
    }


def fetched(placement: Placement) -> dict[str, Any]:
    """What Baton's connector is told of a prompt's first part that another replica has; empty: nothing."""
    if (plan := placement.fetch) is None:
        return {}
    session_id, epoch, peers = placement.session_id, placement.epoch, plan.source.endpoints
    return fetch_request(session_id, epoch, peers, plan.tokens, plan.timeout_s)


def part(
    request: EngineCoreRequest,
    role: Role,
    handoff: Handoff,
    transfer: dict[str, Any] | None,
    answered: Sequence[int] = (),
    tpot_s: float = 0.0,
    fetch: dict[str, Any] | None = None,
) -> EngineCoreRequest:
    """The request as one replica gets it.

    `answered`: the tokens that the client had before (`transfer/vllm/continued_answer.py`). `tpot_s`: the TPOT
    objective of its class; 0: none. `fetch`: see `fetched`. What a client may have said of these, or of KV transfers,
    does not reach an engine.
    """
    assert request.sampling_params is not None
    part, params = copy.copy(request), copy.copy(request.sampling_params)
    before: list[int] | None = list(answered) or None
    if transfer is not None and role is Role.PREFILL:
        if handoff is Handoff.PULLED:  # its token is not used: no grammar, no stops; decode pulls the prompt's KV alone
            params, before = SamplingParams(temperature=0.0, max_tokens=1), None
        else:
            params.max_tokens = len(answered) + 1
            params.min_tokens = min(params.max_tokens, params.min_tokens)
    # A client's `kv_cache_report_mode` would make the engine report blocks as cached that it has reported before.
    ours = {
        "kv_transfer_params": {**(transfer or {}), **(fetch or {})} or None,
        "baton_answered": before,
        "baton_tpot_s": tpot_s or None,
        "kv_cache_report_mode": None,
    }
    told = {**(params.extra_args or {}), **ours}
    params.extra_args = {name: value for name, value in told.items() if value is not None} or None
    part.sampling_params = params
    return part


def repeats(request: EngineCoreRequest, tokens: Sequence[int]) -> bool:
    """Whether the answer of a request is over with these tokens, because it repeats itself.

    Prefill's part is over after one token by its own limit. vLLM looks at that first, and so it does not say this.
    """
    params = request.sampling_params
    assert params is not None
    if params.repetition_detection is None or not params.min_tokens <= len(tokens) < (params.max_tokens or 0):
        return False
    return bool(check_sequence_repetition(tokens, params.repetition_detection))


def remainder(request: EngineCoreRequest, sent: Sequence[int], attempt: int) -> EngineCoreRequest:
    """A request that is placed again when the client has the tokens `sent`.

    It has an id of its own, so that no output of an older attempt is taken for its own, and none ends it.
    """
    left = copy.copy(request)
    left.request_id = f"{request.request_id}~{attempt}"
    if sent:
        left.sampling_params = params = copy.copy(request.sampling_params)
        assert params is not None
        params.prompt_logprobs = params.prompt_logprob_token_ids = None  # the client had them with its first token
    return left
