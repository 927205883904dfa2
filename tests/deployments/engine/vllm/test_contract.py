"""What `deployments/engine/vllm`, `deployments/cluster` and `transfer/vllm` rely on in vLLM.

No engine is started: when a new vLLM moves something, one of these names it.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import weakref
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.config import KVEventsConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.network_utils import get_open_zmq_ipc_path
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase
from vllm.version import __version__

from configs.schema import ChannelConfig, VllmEngineConfig
from configs.schema import ModelConfig as BatonModel
from deployments.cluster.core import ClusterCore
from deployments.cluster.engine_request import FINISH, traits
from deployments.engine.kv_events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from deployments.engine.names import FOLDER, names_until_started
from deployments.engine.protocol import EngineError
from deployments.engine.vllm.arguments import IN_PROCESS
from deployments.engine.vllm.connector import PacedConnector
from deployments.engine.vllm.engine import VllmEngine
from deployments.engine.vllm.pull import PullEngine
from deployments.engine.vllm.pull_connector import NixlConnector, PullWorker
from deployments.messages import Role
from transfer.vllm.cached_blocks import take_ascending
from transfer.vllm.connector import BatonConnector, WorkerExtension
from transfer.vllm.continued_answer import AnsweredRequests

CONNECTOR_HOOKS = {
    "get_num_new_matched_tokens": ["self", "request", "num_computed_tokens"],
    "update_state_after_alloc": ["self", "request", "blocks", "num_external_tokens"],
    "build_connector_meta": ["self", "scheduler_output"],
    "request_finished": ["self", "request", "block_ids"],
    "update_connector_output": ["self", "connector_output"],
    "register_kv_caches": ["self", "kv_caches"],
    "handle_preemptions": ["self", "kv_connector_metadata"],
    "bind_connector_metadata": ["self", "connector_metadata"],
    "start_load_kv": ["self", "forward_context", "kwargs"],
    "wait_for_layer_load": ["self", "layer_name"],
    "save_kv_layer": ["self", "layer_name", "kv_layer", "attn_metadata", "kwargs"],
    "wait_for_save": ["self"],
    "get_transfer_results": ["self", "finished_req_ids"],
    "build_connector_worker_meta": ["self"],
    "get_kv_connector_stats": ["self"],
    "has_pending_push_work": ["self"],
    "shutdown": ["self"],
}


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_sockets_are_made_where_the_environment_says() -> None:
    with names_until_started():
        assert get_open_zmq_ipc_path().startswith(f"ipc://{os.environ[FOLDER]}/")


async def test_compiling_on_cpu_without_a_compiler_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = VllmEngineConfig(enforce_eager=False)
    engine = VllmEngine(
        config, BatonModel(), ChannelConfig(), model_path="", role=Role.DECODE, replica_id="d", secret="", host=""
    )
    with pytest.raises(EngineError, match=r"needs a C\+\+ compiler"):
        await engine.start()


@pytest.mark.parametrize(
    ("kind", "connector", "extension"),
    [(VllmEngine, PacedConnector, WorkerExtension), (PullEngine, NixlConnector, PullWorker)],
)
def test_the_paths_that_vllm_is_given_name_our_classes(
    kind: type[VllmEngine], connector: type, extension: type
) -> None:
    engine = kind(
        VllmEngineConfig(),
        BatonModel(),
        ChannelConfig(),
        model_path="",
        role=Role.DECODE,
        replica_id="",
        secret="",
        host="",
    )
    assert KVConnectorFactory.get_connector_class(engine._transfer()) is connector
    assert resolve_obj_by_qualname(kind._worker_extension) is extension
    assert NixlConnector.__name__ == "NixlConnector", "vLLM prepares the caches of some models by this name"
    engine._events.close()


def test_workers_answer_whether_they_are_well() -> None:
    assert list(inspect.signature(WorkerBase.check_health).parameters) == ["self"]


def test_the_engine_core_has_an_input_queue_before_its_scheduler() -> None:
    source = inspect.getsource(EngineCoreProc.__init__)
    assert 0 < source.index("self.input_queue = queue.Queue") < source.index("super().__init__(")
    assert "self.input_queue.get(" in inspect.getsource(EngineCoreProc._process_input_queue)


def test_new_blocks_come_from_one_method_of_the_pool() -> None:
    assert parameters(BlockPool.get_new_blocks) == ["self", "num_blocks"]
    assert parameters(KVConnectorBase_V1.bind_kv_cache_manager) == ["self", "kv_cache_manager"]
    assert "self.block_pool = " in inspect.getsource(KVCacheManager.__init__)


def test_new_blocks_are_taken_ascending() -> None:
    pool = BlockPool(num_gpu_blocks=16, enable_caching=True, hash_block_size=16)
    take_ascending(pool)
    taken = pool.get_new_blocks(6)
    pool.free_blocks(reversed(pool.get_new_blocks(9)))
    pool.free_blocks(reversed(taken))
    again = [block.block_id for block in pool.get_new_blocks(12)]
    assert again == sorted(again)
    assert len(set(again)) == 12


def test_a_block_that_is_found_in_part_is_copied_before_it_is_written_to() -> None:
    """The part of scheduler and runners; tests/transfer/vllm/test_partial_blocks.py has the manager find them."""
    schedule = inspect.getsource(Scheduler.schedule)
    assert "self.kv_cache_manager.get_computed_blocks(request)" in inspect.getsource(
        Scheduler._get_local_prefix_cache_hit
    )
    assert "if partial_tail and ext_tokens > partial_tail:" in schedule, "decode takes what prefill sends, the tail too"
    assert "self._free_cow_retained_blocks(" in schedule
    assert "kv_cache_block_copies" in names(SchedulerOutput)
    for runner in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"):
        assert "copy_kv_cache_blocks_inplace(" in source(runner)
    assert parameters(generate_block_hash_extra_keys)[1:3] == ["start_token_idx", "end_token_idx"]


def test_a_request_counts_the_tokens_that_are_being_computed() -> None:
    assert "num_in_flight_tokens" in vars(Request.from_engine_core_request(a_request(), None))


def a_request() -> EngineCoreRequest:
    return EngineCoreRequest("r", [1, 2], None, SamplingParams(max_tokens=1), None, 0.0, None, None, None)


def names(cls: Any) -> set[str]:
    return {field.name for field in fields(cls)}


def test_the_version_is_the_pinned_one() -> None:
    assert __version__.startswith("0.32.0")


@pytest.mark.parametrize("hook", CONNECTOR_HOOKS)
def test_connector_hooks(hook: str) -> None:
    assert parameters(getattr(KVConnectorBase_V1, hook)) == CONNECTOR_HOOKS[hook], f"vLLM moved {hook}"
    assert parameters(getattr(BatonConnector, hook)) == CONNECTOR_HOOKS[hook]


def test_what_the_connector_reads() -> None:
    assert {"finished_sending", "finished_recving", "failed_recving"} <= names(KVConnectorTransferResults)
    assert {"finished_recving", "kv_connector_worker_meta"} <= names(KVConnectorOutput)
    assert {"num_scheduled_tokens", "total_num_scheduled_tokens", "preempted_req_ids"} <= names(SchedulerOutput)
    assert parameters(KVCacheManager.get_block_ids) == ["self", "request_id"]


def test_a_request_whose_load_failed_gives_its_blocks_back_and_vllm_steps_on_for_a_connector() -> None:
    update = inspect.getsource(Scheduler._update_waiting_for_remote_kv)
    assert update.index("if request.num_computed_tokens:") < update.index("self.kv_cache_manager.free(request)")
    assert "self.connector.has_pending_push_work()" in inspect.getsource(Scheduler.has_requests)


def test_what_is_read_of_a_step_and_of_its_statistics() -> None:
    assert {"num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs"} <= names(SchedulerOutput)
    assert {"req_id", "num_computed_tokens"} <= names(NewRequestData)
    assert {"req_ids", "num_computed_tokens"} <= names(CachedRequestData)
    assert "kv_connector_stats" in names(SchedulerStats)
    assert parameters(NixlConnector.build_connector_meta) == parameters(NixlPullConnector.build_connector_meta)


def test_what_was_answered_elsewhere_is_output_that_has_yet_to_be_computed() -> None:
    """As of a request that comes back after a preemption. test_scheduler_contract.py shows what the scheduler does."""
    params = SamplingParams(max_tokens=9, extra_args={"kv_transfer_params": {"baton": {"role": "decode"}}})
    core = EngineCoreRequest("r", [1, 2], None, params, None, 0.0, None, None, None)
    request = Request.from_engine_core_request(core, None)
    assert request.kv_transfer_params == {"baton": {"role": "decode"}}
    params.extra_args = {**(params.extra_args or {}), "baton_answered": [3, 4]}
    side = AnsweredRequests.__new__(AnsweredRequests)
    side._scheduler = SimpleNamespace(structured_output_manager=SimpleNamespace(accept_tokens=lambda *_: True))
    side._unread = weakref.WeakSet()
    side.begin(request)
    assert side.is_ready(request)
    side.go_on(request, 5)
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (2, 5, 3)
    assert list(request.all_token_ids) == [1, 2, 3, 4, 5]
    assert request.prompt_token_ids == [1, 2]
    assert request.prefill_stats is None
    assert params.extra_args["baton_answered"] == [3, 4, 5], "for runner V1"


def test_a_grammar_reads_what_was_answered() -> None:
    assert parameters(StructuredOutputManager.accept_tokens) == ["self", "request", "new_token_ids"]


def test_model_runner_v1_takes_a_new_request_for_one_without_output() -> None:
    update, sampled = (
        inspect.getsource(each) for each in (GPUModelRunner._update_states, GPUModelRunner._bookkeeping_sync)
    )
    assert "output_token_ids=[]," in update
    assert update.index("generator.manual_seed(sampling_params.seed)") < update.index("self.input_batch.add_request(")
    assert "gen.set_offset(gen.get_offset() - 4)" in sampled
    assert parameters(InputBatch.add_request) == ["self", "request"]


def test_the_config_says_which_model_runner_it_is() -> None:
    assert isinstance(inspect.getattr_static(VllmConfig, "use_v2_model_runner"), property)
    assert "use_fp64_gumbel" in names(ModelConfig)


def test_model_runner_v2_is_told_what_is_prompt_and_draws_by_position() -> None:
    """It needs Triton, and has not been run with any of this: the source says how."""
    assert "req._all_token_ids," in inspect.getsource(Scheduler.schedule)
    runner = source("vllm.v1.worker.gpu.model_runner")
    assert "prompt_len = new_req_data.prompt_len" in runner
    assert "all_token_ids=new_req_data.prefill_token_ids" in runner
    assert "output_len = total_len - prompt_len" in source("vllm.v1.worker.gpu.sample.bad_words")
    assert "self.req_states.prompt_len.gpu,\n                self.req_states.prefill_len.gpu," in source(
        "vllm.v1.worker.gpu.sample.penalties"
    )
    assert "min_len = prompt_len + min_tokens" in source("vllm.v1.worker.gpu.sample.logit_bias")
    assert "murmur3_uniform32(seed, pos, keys)" in source("vllm.v1.worker.gpu.sample.gumbel")


def source(module: str) -> str:
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text()


def test_what_the_pull_connector_is_told_and_tells() -> None:
    finished = inspect.getsource(NixlPullConnectorScheduler.request_finished)
    assert 'params.get("do_remote_decode")' in finished
    assert "do_remote_prefill=is_p_node" in finished
    assert finished.index("_reqs_not_processed.add") < finished.index("_reqs_need_send["), "an abort frees at once"
    begun = inspect.getsource(NixlPullConnectorWorker.start_load_kv)
    assert "_reqs_to_process.add(req_id)" in begun
    assert "_reqs_to_send[req_id] = expiration_time" in begun
    expired = inspect.getsource(NixlPullConnectorWorker._reap_expired_send_leases)
    assert "now >= expires" in expired
    assert "_reqs_to_process.remove(req_id)" in expired
    assert "nixl_agent_config" in vars(base_worker)
    scheduler = inspect.getsource(NixlPullConnectorScheduler.__mro__[1].__init__)
    settings = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", '"kv_lease_duration"')
    assert all(setting in scheduler for setting in settings)
    assert issubclass(NixlConnector, NixlPullConnector)


def test_what_the_engine_uses() -> None:
    taken = parameters(AsyncEngineArgs)
    ours = {"model", "dtype", "max_model_len", "block_size", "max_num_seqs", "tensor_parallel_size", "enforce_eager"}
    ours |= {"enable_prefix_caching", "worker_extension_cls", "kv_transfer_config", "distributed_executor_backend"}
    ours |= {"pipeline_parallel_size", "worker_cls"}
    ours |= {"kv_cache_memory_bytes", "max_num_batched_tokens", "quantization", "gpu_memory_utilization"}
    assert ours <= set(taken)
    assert "long_prefill_token_threshold" in parameters(SchedulerConfig)
    assert parameters(AsyncMPClient)[:3] == ["vllm_config", "executor_class", "log_stats"]
    calls = ("add_request_async", "abort_requests_async", "get_output_async", "collective_rpc_async", "shutdown")
    assert all(hasattr(AsyncMPClient, call) for call in (*calls, "reset_prefix_cache_async"))
    assert "timeout" in parameters(AsyncMPClient.shutdown)
    assert {"model", "revision"} <= names(ModelConfig)
    module, _, name = IN_PROCESS.rpartition(".")
    assert (UniProcExecutor.__module__, UniProcExecutor.__name__) == (module, name)
    assert issubclass(UniProcExecutor, Executor)


def test_the_counters_have_their_sources() -> None:
    assert {"kv_cache_usage", "num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs"} <= names(
        SchedulerStats
    )
    assert {"prefix_cache_stats", "connector_prefix_cache_stats"} <= names(SchedulerStats)
    assert {"hits", "preempted_requests"} <= names(PrefixCacheStats)
    assert {"num_prompt_tokens", "num_computed_tokens"} <= names(PrefillStats)
    assert "prefill_stats" in EngineCoreOutput.__struct_fields__
    assert VllmEngine.start is not None


def test_the_seam() -> None:
    assert EngineCoreClient.__abstractmethods__ == {"shutdown"}
    for call in ("get_supported_tasks_async", "add_request_async", "abort_requests_async", "get_output_async"):
        assert parameters(getattr(ClusterCore, call)) == parameters(getattr(EngineCoreClient, call)), call
    assert set(FINISH) == set(FinishReason)


def test_traits_of_a_request() -> None:
    def of(**sampling: Any) -> Any:
        params = SamplingParams(max_tokens=5, **sampling)
        return traits(EngineCoreRequest("r", [1], None, params, None, 0.0, None, None, None))

    assert of(prompt_logprobs=0).prompt_logprobs is True
    assert of(thinking_token_budget=3).stateful_logits is True
    assert (of().prompt_logprobs, of().stateful_logits, of().max_tokens) == (False, False, 5)


def test_kv_events_are_read_as_they_are_written() -> None:
    """Every field that we read, by vLLM's own encoder."""
    rest: dict[str, Any] = {"medium": "GPU", "lora_id": 1, "lora_name": "a", "extra_keys": [("a",), None]}
    sent = kv_events.KVEventBatch(
        ts=1.0,
        events=[
            kv_events.BlockStored([5, b"6"], 4, [1, 2], 1, group_idx=0, **rest),
            kv_events.BlockRemoved([5], "GPU", group_idx=1),
            kv_events.AllBlocksCleared(),
        ],
    )
    read = msgspec.msgpack.Decoder(EventBatch).decode(msgspec.msgpack.Encoder().encode(sent))
    assert read.events == [
        BlockStored([5, b"6"], 4, [1, 2], 1, "a", [["a"], None], 0, GPU),
        BlockRemoved([5], 1, GPU),
        AllBlocksCleared(),
    ]
    assert GPU == kv_events.MEDIUM_GPU
    for ours in (BlockStored, BlockRemoved, AllBlocksCleared):
        assert set(ours.__struct_fields__) <= set(getattr(kv_events, ours.__name__).__struct_fields__)


@pytest.mark.parametrize("salt", [None, "mine"])
def test_a_cache_salt_is_a_key_of_a_prompts_first_block_alone(salt: str | None) -> None:
    """`kv_events` reads it there, untagged."""
    request = Request.from_engine_core_request(a_request(), None)
    request.cache_salt = salt
    keys = [generate_block_hash_extra_keys(request, start, start + 1, 0)[0] for start in (0, 1)]
    assert to_event_extra_keys(keys) == [(salt,) if salt else None, None]


def test_the_publisher_is_configured_as_we_do() -> None:
    settings = {"enable_kv_cache_events", "publisher", "endpoint", "topic", "buffer_steps"}
    assert settings <= names(KVEventsConfig)
    assert "kv_events_config" in parameters(AsyncEngineArgs)
