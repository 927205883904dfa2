"""How vLLM's scheduler behaves, as far as we rely on it: when it calls the connector, and what it makes of the answer.

No engine is started: see `scheduler_core.py`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig
from vllm.distributed.kv_events import BlockStored
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from deployments.engine.vllm.step_pace import TPOT_S, StepPace
from deployments.messages import Role
from deployments.policy.step_size import STEADY
from deployments.step_cost import Coefficients
from tests.deployments.engine.vllm.scheduler_core import CHUNK, Core, make
from transfer.vllm.continued_answer import ANSWERED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights: a scheduler reads none."""
    path = tmp_path_factory.mktemp("model")
    shape = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=1, intermediate_size=64)
    shape.architectures = ["LlamaForCausalLM"]
    shape.save_pretrained(path)
    return path


@pytest.fixture
def core(model: Path) -> Core:
    return make(model, Role.DECODE)


def tokens(count: int) -> list[int]:
    return list(range(100, 100 + count))


def test_the_connector_knows_a_request_before_it_is_scheduled(core: Core) -> None:
    core.add("a", tokens(20))
    assert core.connector.names() == ["on_new_request"]
    assert core.step() == {"a": 20}
    asked = ["get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"]
    assert core.connector.names()[1:4] == asked


def test_a_step_is_timed_between_its_scheduling_and_its_statistics(core: Core) -> None:
    """The connector hears what is in a step at the one moment, and is asked for its statistics at the other."""
    core.add("a", tokens(20))
    scheduled = core.scheduler.schedule()
    assert core.connector.names()[-1] == "build_connector_meta"
    core.connector.stats = {"step": 1}
    core.update(scheduled)
    assert core.connector.names()[-1] == "get_kv_connector_stats"
    assert core.stats is not None
    assert core.stats.kv_connector_stats == {"step": 1}


def test_the_connector_is_told_of_the_end_before_the_blocks_are_free(core: Core) -> None:
    before = core.free
    core.add("a", tokens(40), max_tokens=1)
    core.step()
    told = dict(core.connector.calls)
    assert told["request_finished"] == before - 3
    assert core.free == before


def test_the_connector_may_keep_the_blocks_of_an_ended_request(core: Core) -> None:
    before, core.connector.keeps = core.free, True
    core.add("a", tokens(40), max_tokens=1)
    core.step()
    assert core.free == before - 3


def test_a_request_waits_while_the_connector_cannot_say_what_it_has(core: Core) -> None:
    core.connector.matched = (None, False)
    core.add("a", tokens(20))
    core.add("b", tokens(30)[::-1])
    assert core.step() == {}
    assert core.connector.names().count("get_num_new_matched_tokens") == 2, "it keeps no other request waiting"
    core.connector.matched = (0, False)
    assert core.step() == {"a": 20, "b": 30}


def test_a_load_takes_its_blocks_at_once_and_computes_the_rest_when_it_is_reported(core: Core) -> None:
    before = core.free
    core.connector.matched = (32, True)
    core.add("a", tokens(40))
    assert core.step() == {}
    assert core.free <= before - 2
    assert core.step(received={"a"}) == {}
    assert core.step() == {"a": 8}


def test_blocks_that_a_peer_wrote_are_told_of_as_cached(core: Core) -> None:
    core.connector.matched = (32, True)
    core.add("a", tokens(40))
    core.step()
    assert core.published == []
    core.step(received={"a"})
    core.step()
    (stored,) = (event for event in core.published if isinstance(event, BlockStored))
    assert stored.token_ids == tokens(32)


def test_an_aborted_loads_blocks_are_held_until_it_is_reported(core: Core) -> None:
    before = core.free
    core.connector.matched = (32, True)
    core.add("a", tokens(40))
    core.step()
    core.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    core.step()
    held = core.free
    assert held < before
    core.connector.calls.clear()
    core.step(received={"a"})
    assert core.free == before
    assert dict(core.connector.calls)["update_connector_output"] == held, "the connector hears of it first"


def test_what_was_answered_elsewhere_is_computed_with_the_prompt(core: Core) -> None:
    """As of a request that comes back after a preemption: output that has no KV cache yet."""
    core.add("a", tokens(20), max_tokens=5, extra_args={ANSWERED: [7, 8, 9]})
    assert core.step() == {"a": 23}
    (new,) = core.last.scheduled_new_reqs
    assert new.prompt_token_ids == tokens(20)
    assert new.prefill_token_ids in (None, [*tokens(20), 7, 8, 9]), "the second is for model runner V2"
    assert [output.new_token_ids for output in core.outputs] == [[7]]
    core.step()
    assert core.outputs[0].finish_reason is FinishReason.LENGTH, "what was answered counts"


def test_a_load_may_bring_what_was_answered_elsewhere_too(core: Core) -> None:
    core.connector.matched = (22, True)
    core.add("a", tokens(20), max_tokens=5, extra_args={ANSWERED: [7, 8, 9]})
    assert core.step() == {}
    core.step(received={"a"})
    assert core.step() == {"a": 1}


def test_a_request_whose_grammar_is_not_ready_is_not_asked_for(core: Core) -> None:
    """So what was answered elsewhere is read by the grammar before the request is first scheduled."""
    request = core.add("a", tokens(20), structured_outputs=StructuredOutputsParams(json_object=True))
    assert request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert request.structured_output_request is not None
    assert core.step() == {}
    assert "get_num_new_matched_tokens" not in core.connector.names()
    request.structured_output_request.grammar = SimpleNamespace(is_terminated=lambda: False)
    core.connector.matched = (None, False)
    assert core.step() == {}
    assert core.connector.names().count("get_num_new_matched_tokens") == 1


def test_an_answer_that_the_grammar_forbids_ends_with_an_error(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its own request fails."""
    read = list[list[int]]()

    def accept(request: Request, new_token_ids: list[int]) -> bool:
        if request.request_id == "a":
            read.append(new_token_ids)
        return bool(request.request_id != "a")

    monkeypatch.setattr(core.scheduler.structured_output_manager, "accept_tokens", accept)
    asked = StructuredOutputsParams(json_object=True)
    request = core.add("a", tokens(20), structured_outputs=asked, extra_args={ANSWERED: [7, 8, 9]})
    core.add("b", tokens(30)[::-1])
    assert core.step() == {"b": 30}
    assert read == [], "the grammar is not ready"
    assert request.structured_output_request is not None
    request.structured_output_request.grammar = SimpleNamespace(is_terminated=lambda: False)
    core.step()
    assert read == [[7, 8, 9]]
    ended = {output.request_id: output.finish_reason for output in core.outputs}
    assert ended == {"a": FinishReason.ERROR, "b": None}


PRIOR = Coefficients(0.01, 0.001, 0.0, 0.001, 0.0)


def paced(core: Core, prompt_share: float, prior: Coefficients = PRIOR) -> None:
    core.connector.pace = StepPace(core.scheduler, prior, prompt_share)


def test_the_scheduler_heeds_the_size_of_the_next_step(core: Core) -> None:
    """Beside an answer whose step takes 11 ms, prompts get 65% of the step: 20 tokens at 1 ms each."""
    paced(core, prompt_share=0.65)
    core.add("answer", tokens(5))
    assert core.step() == {"answer": 5}
    core.add("long", tokens(200)[::-1])
    assert core.step() == {"answer": 1, "long": 20}
    assert core.step() == {"answer": 1, "long": 20}


def test_prompts_take_whole_steps_where_no_answer_runs(core: Core) -> None:
    paced(core, prompt_share=0.65)
    core.add("first", tokens(200))
    core.add("next", tokens(210)[::-1])
    assert core.step() == {"first": CHUNK}
    assert core.step() == {"first": CHUNK}


def test_a_short_prompt_has_its_tokens_beside_a_long_one(core: Core) -> None:
    paced(core, prompt_share=0.65)
    core.add("long", tokens(200))
    core.add("short", tokens(30)[::-1])
    assert core.step() == {"long": CHUNK - 30, "short": 30}


def test_beside_an_answer_a_long_prompt_and_a_shorter_one_behind_it_have_half_each(core: Core) -> None:
    paced(core, prompt_share=0.65)
    core.add("answer", tokens(5))
    core.step()
    core.add("long", tokens(200)[::-1])
    core.step()
    core.add("next", tokens(100)[3:])
    for _ in range(3):
        assert core.step() == {"answer": 1, "long": 10, "next": 10}, "the share is that of both"


def test_the_tightest_objective_of_the_answers_counts(core: Core) -> None:
    paced(core, prompt_share=0.95)
    core.add("answer", tokens(5), extra_args={TPOT_S: 0.031 / STEADY})
    core.step()
    core.add("long", tokens(200)[::-1])
    assert core.step() == {"answer": 1, "long": 20}


def test_an_answer_whose_kv_cache_is_coming_counts_as_one_that_runs(core: Core) -> None:
    paced(core, prompt_share=0.65)
    core.connector.matched = (32, True)
    core.add("coming", tokens(40))
    core.step()
    core.connector.matched = (0, False)
    core.add("long", tokens(200)[::-1])
    assert core.step()["long"] <= 22


def handed(core: Core, name: str, prompt: list[int], epoch: int = 1) -> Request:
    """A request that another replica hands over: the connector says that all of its prompt comes."""
    part = {"role": "decode", "session": name, "epoch": epoch, "peers": ["p"]}
    core.connector.matched_of[name] = (len(prompt), True)
    return core.add(name, prompt, extra_args={"kv_transfer_params": {"baton": part}})


def prompts_run(core: Core) -> None:
    """An answer runs, and so do two long prompts. Each takes a share of what prompts get."""
    core.add("answer", tokens(5))
    core.step()
    core.add("long", tokens(200)[::-1])
    core.step()
    core.add("next", tokens(150)[3:])
    assert core.step() == {"answer": 1, "long": 10, "next": 10}


def test_an_answer_that_is_handed_over_does_not_wait_for_the_prompts_that_run(core: Core) -> None:
    """Neither for memory nor, once its KV cache has come, for its first token."""
    paced(core, prompt_share=0.65)
    prompts_run(core)
    handed(core, "coming", tokens(40)[1:])
    core.step()
    assert core.scheduler.requests["coming"].status is RequestStatus.WAITING_FOR_REMOTE_KVS, "it has its memory"
    core.step(received={"coming"})
    assert core.step() == {"answer": 1, "long": 10, "next": 10, "coming": 1}


def test_nor_where_prompts_may_take_the_whole_step(core: Core) -> None:
    paced(core, prompt_share=0.65, prior=Coefficients(1.0, 0.001, 0.0, 0.001, 0.0))
    core.add("answer", tokens(5))
    core.step()
    core.add("long", tokens(400)[::-1])
    assert core.step() == {"answer": 1, "long": CHUNK - 1}
    handed(core, "coming", tokens(40)[1:])
    assert core.step()["long"] >= CHUNK - 2
    assert core.scheduler.requests["coming"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    core.step(received={"coming"})
    taken = core.step()
    assert taken["coming"] == 1
    assert taken["long"] == CHUNK - 2


def test_an_answer_that_comes_takes_nothing_from_prompts_before_it_is_there(core: Core) -> None:
    paced(core, prompt_share=0.65)
    core.add("answer", tokens(5))
    core.step()
    handed(core, "coming", tokens(40)[1:])
    core.add("long", tokens(200)[::-1])
    core.step()
    for _ in range(3):
        assert core.step() == {"answer": 1, "long": 20}
    core.step(received={"coming"})
    assert core.step() == {"answer": 1, "long": 20, "coming": 1}


@pytest.mark.parametrize("engine_args", [{}, {"long_prefill_token_threshold": 0}])
def test_where_a_bound_of_vllm_is_configured_vllm_sizes_its_steps(model: Path, engine_args: dict[str, Any]) -> None:
    extra = make(model, Role.DECODE, **engine_args).scheduler.vllm_config.kv_transfer_config.kv_connector_extra_config
    assert ("pace" in extra) is not bool(engine_args)
