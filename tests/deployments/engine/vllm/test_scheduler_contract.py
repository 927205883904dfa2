"""How vLLM's scheduler behaves, as far as we rely on it: when it calls the connector, and what it makes of the answer.

No engine is started. The scheduler is the one of our engines' own configuration; its connector notes every call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from configs.schema import ChannelConfig, VllmEngineConfig
from configs.schema import ModelConfig as BatonModel
from deployments.engine.kv_events import KVEvents
from deployments.engine.vllm.arguments import EngineArguments
from deployments.messages import Role
from deployments.policy.prompt_share import prompt_share
from transfer.vllm.continued_answer import ANSWERED, AnsweredRequests

SIZE, BLOCKS, CHUNK, SEATS = 16, 64, 64, 4
WORKER_EXTENSION = "transfer.vllm.connector.WorkerExtension"


class Stats(KVConnectorStats):
    def is_empty(self) -> bool:
        return not self.data

    def to_dict(self) -> dict[str, Any]:
        return dict(self.data)


class Recorder(KVConnectorBase_V1):
    """A connector that notes every call of the scheduler, with the number of free blocks at that moment.

    What was answered elsewhere it hands to Baton's own code.

    `matched`: its answer to `get_num_new_matched_tokens`. `keeps`: whether it keeps the blocks of ended requests.
    """

    def __init__(self, config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(config, role, kv_cache_config)
        self.calls: list[tuple[str, int]] = []
        self.matched: tuple[int | None, bool] = (0, False)
        self.keeps = False
        self.stats: dict[str, Any] = {}
        self.answered = AnsweredRequests()
        self._manager: Any = None

    def _note(self, call: str) -> None:
        self.calls.append((call, self._manager.block_pool.get_num_free_blocks()))

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    def on_new_request(self, request: Request) -> None:
        self._note("on_new_request")
        self.answered.begin(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._note("get_num_new_matched_tokens")
        return self.matched if self.answered.is_ready(request) else (None, False)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        self._note("update_state_after_alloc")

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._note("build_connector_meta")
        return KVConnectorMetadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._note("update_connector_output")

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        self._note("get_kv_connector_stats")
        return Stats(self.stats) if self.stats else None

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._note("request_finished")
        return self.keeps, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


@dataclass
class Core:
    """A scheduler, and what an engine core does with it. `published`: the KV events of every step."""

    scheduler: Scheduler
    published: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler.kv_event_publisher.shutdown()
        self.scheduler.kv_event_publisher = SimpleNamespace(publish=lambda batch: self.published.extend(batch.events))
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(SIZE, sha256)

    @property
    def connector(self) -> Recorder:
        assert isinstance(self.scheduler.connector, Recorder)
        return self.scheduler.connector

    @property
    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, name: str, prompt: list[int], **sampling: Any) -> Request:
        params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **sampling})
        core = EngineCoreRequest(name, prompt, None, params, None, 0.0, None, None, None)
        request = Request.from_engine_core_request(core, self._hasher)
        self.scheduler.add_request(request)
        return request

    def step(self, received: set[str] | None = None) -> dict[str, int]:
        """One step of the engine: every request whose prompt is computed samples the token 7.

        `received`: the requests whose KV cache the workers report as loaded. Returns the tokens scheduled of each.
        """
        self.last = self.scheduler.schedule()
        self.update(self.last, received)
        return dict(self.last.num_scheduled_tokens)

    def update(self, scheduled: SchedulerOutput, received: set[str] | None = None) -> None:
        names = list(scheduled.num_scheduled_tokens)
        requests = [self.scheduler.requests.get(name) for name in names]
        sampled = [[7] if each and each.num_computed_tokens >= each.num_tokens else [] for each in requests]
        connector = KVConnectorOutput(finished_recving=received) if received else None
        positions = {name: at for at, name in enumerate(names)}
        ran = ModelRunnerOutput(names, positions, sampled, kv_connector_output=connector)
        answered = self.scheduler.update_from_output(scheduled, ran)
        self.outputs: list[EngineCoreOutput] = [output for each in answered.values() for output in each.outputs]
        found: list[SchedulerStats] = [each.scheduler_stats for each in answered.values() if each.scheduler_stats]
        self.stats = found[0] if found else None


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


def make(model: Path, role: Role) -> Core:
    config = VllmEngineConfig(
        block_size=SIZE, max_num_seqs=SEATS, max_num_batched_tokens=CHUNK, engine_args={"skip_tokenizer_init": True}
    )
    baton = BatonModel(source=str(model), dtype="float32", max_model_len=512)
    arguments = EngineArguments(config, baton, ChannelConfig(), str(model), role, "r", "", "127.0.0.1")
    transfer = arguments.baton_transfer()
    transfer.kv_connector, transfer.kv_connector_module_path = "Recorder", __name__
    events = KVEvents(SIZE)
    try:
        made = arguments.vllm_config(transfer, WORKER_EXTENSION, events)
        made.cache_config.num_gpu_blocks = BLOCKS
        group = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], group)])
        kind = made.scheduler_config.get_scheduler_cls()
        return Core(kind(made, cache, StructuredOutputManager(made), SIZE, log_stats=True))
    finally:
        events.close()


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


@pytest.mark.parametrize("role", Role)
def test_a_long_prompt_takes_no_more_than_its_share_of_a_step_beside_others(model: Path, role: Role) -> None:
    core = make(model, role)
    core.add("long", tokens(400))
    core.add("short", tokens(5))
    share = prompt_share(role, CHUNK, SEATS)
    assert core.step()["long"] == share
