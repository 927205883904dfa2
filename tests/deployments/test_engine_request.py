"""What the cluster core makes of a request: for the session manager, for an engine, and when a part is answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from deployments.engine_request import part, rest, session_request
from deployments.messages import Handoff, Role, SessionRequest
from deployments.request_context import RequestContext
from transfer.blocks import chained_hashes

PROMPT = list(range(50))


def of(prompt: list[int] = PROMPT, context: RequestContext | None = None, **fields: Any) -> SessionRequest:
    request = EngineCoreRequest("r", prompt, None, SamplingParams(max_tokens=7), None, 0.0, None, None, None)
    for name, value in fields.items():
        setattr(request, name, value)
    return session_request(request, context, Handoff.PUSHED, 16, "r", 1)


def test_full_blocks_are_hashed_as_replicas_hash_theirs() -> None:
    assert of().hashes == chained_hashes(PROMPT[:48], 16)
    assert of(PROMPT[:16]).hashes == of().hashes[:1]
    assert of(PROMPT[:15]).hashes == ()
    assert of().prompt_tokens == 50


def test_an_adapters_prompts_are_its_own() -> None:
    request = of(lora_request=SimpleNamespace(lora_name="tuned"))
    assert request.adapter == "tuned"
    assert request.hashes == chained_hashes(PROMPT, 16, salt="tuned")


@pytest.mark.parametrize("field", [{"cache_salt": "s"}, {"mm_features": [object()]}, {"prompt_embeds": object()}])
def test_what_depends_on_more_than_tokens_is_not_hashed(field: dict[str, Any]) -> None:
    assert of(**field).hashes == ()


def test_the_http_side_says_who_asks() -> None:
    request = of(context=RequestContext("r", priority="batch", client="anna", affinity="s", chat=True))
    assert (request.priority, request.client, request.affinity, request.chat) == ("batch", "anna", "s", True)
    assert (of().priority, of().client, of().affinity, of().chat) == ("", "", "", False)


def test_a_client_cannot_have_an_engine_tell_of_its_cache_twice() -> None:
    params = SamplingParams(max_tokens=7, extra_args={"kv_cache_report_mode": "full", "other": 1})
    request = EngineCoreRequest("r", PROMPT, None, params, None, 0.0, None, None, None)
    told = part(request, Role.DECODE, Handoff.PUSHED, None)
    assert told.sampling_params is not None
    assert told.sampling_params.extra_args == {"other": 1}


@pytest.mark.parametrize(("sent", "min_left"), [((), 4), ((7,), 3), ((7, 8, 9, 10, 11, 12), 0)])
def test_what_is_left_of_a_request_asks_for_the_tokens_that_are_missing(sent: tuple[int, ...], min_left: int) -> None:
    params = SamplingParams(max_tokens=7, min_tokens=4, prompt_logprobs=1, repetition_penalty=1.5, logprobs=2)
    request = EngineCoreRequest("r", PROMPT, None, params, None, 0.0, None, None, None)
    left = rest(request, sent, 3)
    assert left.request_id == "r~3"
    assert left.prompt_token_ids == [*PROMPT, *sent]
    assert left.sampling_params is not None
    assert left.sampling_params.max_tokens == 7 - len(sent)
    assert left.sampling_params.min_tokens == min_left
    assert left.sampling_params.prompt_logprobs == (None if sent else 1)
    assert (left.sampling_params.repetition_penalty, left.sampling_params.logprobs) == (1.5, 2)
    assert (request.request_id, request.prompt_token_ids, params.max_tokens) == ("r", PROMPT, 7), "it stays whole"
