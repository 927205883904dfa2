"""vLLM's scheduler, of our engines' own configuration, with a connector that notes every call. No engine is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from configs.schema import ChannelConfig, VllmEngineConfig
from configs.schema import ModelConfig as BatonModel
from deployments.engine.kv_events import KVEvents
from deployments.engine.vllm.arguments import EngineArguments
from deployments.engine.vllm.step_pace import StepPace
from deployments.messages import Role
from transfer.vllm.continued_answer import AnsweredRequests

SIZE, BLOCKS, CHUNK, SEATS = 16, 64, 64, 4
WORKER_EXTENSION = "transfer.vllm.connector.WorkerExtension"


class Stats(KVConnectorStats):
    def is_empty(self) -> bool:
        return not self.data

    def to_dict(self) -> dict[str, Any]:
        return dict(self.data)


class Recorder(KVConnectorBase_V1):
    """A connector that notes every call of the scheduler, with the number of free blocks at that moment.

    What was answered elsewhere it hands to Baton's own code. `pace`: sets the size of each step, where there is one.

    `matched`: its answer to `get_num_new_matched_tokens`; `matched_of`: the same, by request. `keeps`: whether it keeps
    the blocks of ended requests.
    """

    def __init__(self, config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(config, role, kv_cache_config)
        self.calls: list[tuple[str, int]] = []
        self.matched: tuple[int | None, bool] = (0, False)
        self.matched_of: dict[str, tuple[int | None, bool]] = {}
        self.keeps = False
        self.stats: dict[str, Any] = {}
        self.answered = AnsweredRequests()
        self.pace: StepPace | None = None
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
        if self.pace is not None:
            self.pace.begin(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._note("get_num_new_matched_tokens")
        matched = self.matched_of.get(request.request_id, self.matched)
        return matched if self.answered.is_ready(request) else (None, False)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        self._note("update_state_after_alloc")

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._note("build_connector_meta")
        if self.pace is not None:
            self.pace.plan(scheduler_output.num_scheduled_tokens)
        return KVConnectorMetadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._note("update_connector_output")
        if self.pace is not None:
            self.pace.arrived(connector_output.finished_recving or ())

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


def make(model: Path, role: Role, *, settings: dict[str, Any] | None = None, **engine_args: Any) -> Core:
    config = VllmEngineConfig(
        block_size=SIZE,
        max_num_seqs=SEATS,
        max_num_batched_tokens=CHUNK,
        engine_args={"skip_tokenizer_init": True, **engine_args},
        **(settings or {}),
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
