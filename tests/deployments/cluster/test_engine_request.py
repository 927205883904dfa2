"""What the cluster core makes of a request: for the session manager, for an engine, and when a part is answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from deployments.cluster.engine_request import (
    Remainder,
    digest,
    keep_apart,
    name_adapter,
    part,
    remainder,
    repeats,
    session_request,
)
from deployments.cluster.request_context import RequestContext
from deployments.engine.cache_log import CacheLog
from deployments.engine.kv_events import BlockStored, Translator
from deployments.messages import Handoff, Quota, Role, SessionRequest
from deployments.policy.placement.split import ANY
from transfer.memory.blocks import chained_hashes

PROMPT = list(range(50))


def plain(prompt: list[int] = PROMPT) -> EngineCoreRequest:
    return EngineCoreRequest("r", prompt, None, SamplingParams(max_tokens=7), None, 0.0, None, None, None)


def of(prompt: list[int] = PROMPT, context: RequestContext | None = None, **fields: Any) -> SessionRequest:
    request = plain(prompt)
    for name, value in fields.items():
        setattr(request, name, value)
    return session_request(Remainder(1, request), context, Handoff.PUSHED, 16, "r")


def test_full_blocks_are_hashed_as_replicas_hash_theirs() -> None:
    assert of().hashes == chained_hashes(PROMPT[:48], 16)
    assert of(PROMPT[:16]).hashes == of().hashes[:1]
    assert of(PROMPT[:15]).hashes == ()
    assert of().prompt_tokens == 50


def test_an_adapters_prompts_are_its_own() -> None:
    request = of(lora_request=SimpleNamespace(lora_name="tuned"))
    assert request.adapter == "tuned"
    assert request.hashes == chained_hashes(PROMPT, 16, salt="tuned")


def tuned(number: int) -> EngineCoreRequest:
    adapter, params = LoRARequest("tuned", number, "/tuned"), SamplingParams(max_tokens=7)
    request = EngineCoreRequest("r", PROMPT, None, params, None, 0.0, adapter, None, None)
    name_adapter(request)
    return request


def test_adapters_of_one_name_and_other_files_share_no_blocks_and_no_digest() -> None:
    first, second = tuned(1), tuned(2)
    assert first.lora_request is not None
    assert (first.lora_request.lora_name, first.lora_request.lora_int_id) == ("tuned@00000001", 1)
    assert digest(first) == digest(tuned(1)) != digest(second)
    asked = [session_request(Remainder(1, each), None, Handoff.PUSHED, 16, "r") for each in (first, second)]
    assert [each.adapter for each in asked] == ["tuned@00000001", "tuned@00000002"]
    assert not set(asked[0].hashes) & set(asked[1].hashes)
    assert asked[0].allowed == ANY


def test_an_adapters_blocks_have_the_hashes_by_which_the_engine_reports_them() -> None:
    """vLLM's event has the adapter's name, and names it as the block's one extra key."""
    request, log = tuned(1), CacheLog()
    assert request.lora_request is not None
    (asked, *_) = session_request(Remainder(1, request), None, Handoff.PUSHED, 16, "r").hashes
    name = request.lora_request.lora_name
    event = BlockStored([b"x"], None, PROMPT[:16], 16, lora_name=name, extra_keys=[[name]])
    Translator(16, log).take(event)
    change = log.change(whole=True)
    assert change is not None
    assert change.stored == (asked,)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_cache_salts_blocks_have_the_hashes_by_which_the_engine_reports_them(adapter: bool) -> None:
    """vLLM's event names the adapter, and then the salt, as the first block's extra keys."""
    request, log = tuned(1) if adapter else plain(), CacheLog()
    request.cache_salt = "mine"
    asked = session_request(Remainder(1, request), None, Handoff.PUSHED, 16, "r").hashes
    name = request.lora_request.lora_name if request.lora_request else None
    lora = [name] if name else []
    event = BlockStored([b"x"], None, PROMPT[:16], 16, lora_name=name, extra_keys=[[*lora, "mine"]])
    Translator(16, log).take(event)
    change = log.change(whole=True)
    assert change is not None
    assert change.stored == asked[:1]
    request.cache_salt = "another"
    assert session_request(Remainder(1, request), None, Handoff.PUSHED, 16, "r").hashes[0] != asked[0]


def salted(namespace: str | None, cache_salt: str | None = None) -> str | None:
    request = plain()
    request.cache_salt = cache_salt
    keep_apart(request, RequestContext("r", namespace=namespace))
    found: str | None = request.cache_salt
    return found


def test_requests_of_two_keys_have_salts_that_neither_can_choose() -> None:
    assert salted(None) is None
    assert salted(None, "mine") == "mine"
    anna, bert, keyless = salted("key anna"), salted("key bert"), salted("")
    assert len({anna, bert, keyless, None}) == 4
    assert salted("key anna") == anna
    assert salted("key anna", "mine") not in (anna, "mine", salted("key bert", "mine"))
    assert salted("key bert", anna) != anna, "another key's salt is of no use"
    assert salted("", anna) != anna
    assert salted("key anna", "\ud83d"), "half of a surrogate pair is no error here"


def test_the_salt_reaches_the_engines() -> None:
    request = plain()
    keep_apart(request, RequestContext("r", namespace="key anna"))
    for role in (Role.PREFILL, Role.DECODE):
        assert part(request, role, Handoff.PUSHED, None).cache_salt == request.cache_salt


@pytest.mark.parametrize("field", [{"mm_features": [object()]}, {"prompt_embeds": object()}])
def test_what_depends_on_more_than_tokens_is_not_hashed(field: dict[str, Any]) -> None:
    assert of(**field).hashes == ()


def test_the_http_side_says_who_asks() -> None:
    request = of(context=RequestContext("r", priority="batch", client="anna", affinity="s", chat=True))
    assert (request.priority, request.client, request.affinity, request.chat) == ("batch", "anna", "s", True)
    assert (of().priority, of().client, of().affinity, of().chat) == ("", "", "", False)


def test_the_first_placement_of_a_request_counts_as_all_of_it() -> None:
    context = RequestContext("r", quota=Quota("team", 5, 100, answers=3))
    assert [of(context=context).quota for _ in range(3)] == [Quota("team", 5, 100, each) for each in (3, 0, 0)]
    assert of(context=RequestContext("r")).quota is None


def test_a_client_cannot_have_an_engine_tell_of_its_cache_twice_nor_say_what_was_answered() -> None:
    theirs = {"kv_cache_report_mode": "full", "baton_answered": [1], "other": 1}
    params = SamplingParams(max_tokens=7, extra_args=theirs)
    request = EngineCoreRequest("r", PROMPT, None, params, None, 0.0, None, None, None)
    told = part(request, Role.DECODE, Handoff.PUSHED, None)
    assert told.sampling_params is not None
    assert told.sampling_params.extra_args == {"other": 1}


@pytest.mark.parametrize("sent", [(), (7,), (7, 8, 9, 10, 11, 12)])
def test_what_is_placed_again_is_the_request_with_what_was_answered(sent: tuple[int, ...]) -> None:
    params = SamplingParams(max_tokens=7, min_tokens=4, prompt_logprobs=1, repetition_penalty=1.5, logprobs=2)
    request = EngineCoreRequest("r", PROMPT, None, params, None, 0.0, None, None, None)
    left = remainder(request, sent, 3)
    assert (left.request_id, left.prompt_token_ids) == ("r~3", PROMPT)
    assert left.sampling_params is not None
    assert left.sampling_params.prompt_logprobs == (None if sent else 1), "they were told with the first token"
    told = part(left, Role.DECODE, Handoff.PUSHED, {}, sent).sampling_params
    assert told is not None
    assert (told.max_tokens, told.min_tokens, told.repetition_penalty, told.logprobs) == (7, 4, 1.5, 2)
    assert (told.extra_args or {}).get("baton_answered") == (list(sent) or None)
    prefill = part(left, Role.PREFILL, Handoff.PUSHED, {}, sent).sampling_params
    assert prefill is not None
    assert (prefill.max_tokens, prefill.min_tokens) == (len(sent) + 1, min(len(sent) + 1, 4))
    asked = session_request(Remainder(3, left, tuple(sent)), None, Handoff.PUSHED, 16, "r")
    assert (asked.prompt_tokens, asked.max_tokens) == (50 + len(sent), 7 - len(sent))
    assert asked.hashes == chained_hashes([*PROMPT, *sent], 16)
    assert (request.request_id, params.prompt_logprobs, params.extra_args) == ("r", 1, None), "it stays whole"


def test_a_last_token_is_prefill_work_alone() -> None:
    request = EngineCoreRequest("r", PROMPT, None, SamplingParams(max_tokens=3), None, 0.0, None, None, None)
    assert session_request(Remainder(2, request, (1, 2)), None, Handoff.PUSHED, 16, "r").rule == "one_token"


@pytest.mark.parametrize(
    ("tokens", "limits", "over"),
    [
        ([1, 7, 7, 7], {}, True),
        ([7, 7, 1, 7], {}, False),
        ([7, 7], {}, False),
        ([7, 7, 7], {"min_tokens": 4}, False),
        ([7, 7, 7], {"max_tokens": 3}, False),
        ([7, 7, 7], {"repetition_detection": None}, False),
    ],
)
def test_an_answer_that_repeats_itself_is_over_with_prefills_token(
    tokens: list[int], limits: dict[str, Any], over: bool
) -> None:
    """As vLLM has it: not before the least number of tokens, and the limit is named before the repetition."""
    wanted = {"max_tokens": 7, "repetition_detection": RepetitionDetectionParams(1, 1, min_count=3)}
    request = plain()
    request.sampling_params = SamplingParams(**{**wanted, **limits})
    assert repeats(request, tokens) is over
