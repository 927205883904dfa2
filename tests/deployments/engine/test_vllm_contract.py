"""What `deployments/engine/vllm.py`, `cluster_core.py` and `transfer/connector.py` rely on in vLLM.

No engine is started: when a new vLLM moves something, one of these names it.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import msgspec
import pytest
from vllm.config import KVEventsConfig
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
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
from vllm.version import __version__

from deployments.cluster_core import _FINISH, ClusterCore, traits
from deployments.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEvents
from deployments.engine.vllm import IN_PROCESS, NixlConnector, VllmEngine
from transfer.connector import BatonConnector, _take_ascending

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
    "shutdown": ["self"],
}


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


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
    _take_ascending(pool)
    taken = pool.get_new_blocks(6)
    pool.free_blocks(reversed(pool.get_new_blocks(9)))
    pool.free_blocks(reversed(taken))
    again = [block.block_id for block in pool.get_new_blocks(12)]
    assert again == sorted(again)
    assert len(set(again)) == 12


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


def test_a_step_is_timed_between_its_scheduling_and_its_statistics() -> None:
    """The connector is told what is in it at the one moment, and asked for its statistics at the other."""
    assert {"num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs"} <= names(SchedulerOutput)
    assert {"req_id", "num_computed_tokens"} <= names(NewRequestData)
    assert {"req_ids", "num_computed_tokens"} <= names(CachedRequestData)
    assert "kv_connector_stats" in names(SchedulerStats)
    schedule, update = inspect.getsource(Scheduler.schedule), inspect.getsource(Scheduler.update_from_output)
    assert schedule.index("_build_kv_connector_meta(") < schedule.index("_update_after_schedule(")
    assert "if self.connector:" in update
    assert update.index("self.connector.get_kv_connector_stats()") < update.index("self.make_stats(")
    assert "kv_connector_stats.to_dict()" in inspect.getsource(Scheduler.make_stats)
    assert parameters(NixlConnector.build_connector_meta) == parameters(NixlPullConnector.build_connector_meta)


def test_a_request_takes_the_first_token_as_its_prompts_last() -> None:
    params = SamplingParams(max_tokens=3, extra_args={"kv_transfer_params": {"baton": {"role": "decode"}}})
    core = EngineCoreRequest("r", [1, 2], None, params, None, 0.0, None, None, None)
    request = Request.from_engine_core_request(core, None)
    assert request.kv_transfer_params == {"baton": {"role": "decode"}}
    from transfer.connector import _continue_from

    _continue_from(request, 3)
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 3, 0)
    assert list(request.all_token_ids) == request.prompt_token_ids == [1, 2, 3]


def test_the_scheduler_holds_an_aborted_loads_blocks_until_it_is_reported() -> None:
    source = inspect.getsource(Scheduler.finish_requests)
    assert "delay_free_blocks" in source
    assert "finished_recving_kv_req_ids" in source
    update = inspect.getsource(Scheduler._update_from_kv_xfer_finished)
    assert update.index("update_connector_output") < update.index("finished_recving_kv_req_ids.add")


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
    ours |= {"kv_cache_memory_bytes", "max_num_batched_tokens", "quantization", "gpu_memory_utilization"}
    assert ours <= set(taken)
    assert parameters(AsyncMPClient)[:3] == ["vllm_config", "executor_class", "log_stats"]
    calls = ("add_request_async", "abort_requests_async", "get_output_async", "collective_rpc_async", "shutdown")
    assert all(hasattr(AsyncMPClient, call) for call in calls)
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
    assert set(_FINISH) == set(FinishReason)


def test_traits_of_a_request() -> None:
    def of(**sampling: Any) -> Any:
        params = SamplingParams(max_tokens=5, **sampling)
        return traits(EngineCoreRequest("r", [1], None, params, None, 0.0, None, None, None))

    assert of(temperature=0.0, seed=1).seeded_sampling is False
    assert of(temperature=0.5, seed=1).seeded_sampling is True
    assert of(presence_penalty=0.1).output_penalties is True
    assert of(repetition_penalty=1.2).output_penalties is False
    assert of(prompt_logprobs=0).prompt_logprobs is True
    assert of(bad_words=["a"]).bad_words is True


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
        BlockStored([5, b"6"], 4, [1, 2], 1, "a", [["a"], None], 0),
        BlockRemoved([5], 1),
        AllBlocksCleared(),
    ]
    for ours in (BlockStored, BlockRemoved, AllBlocksCleared):
        assert set(ours.__struct_fields__) <= set(getattr(kv_events, ours.__name__).__struct_fields__)


def test_kv_events_come_for_every_block_that_is_cached_or_evicted() -> None:
    for call in (BlockPool.cache_full_blocks, BlockPool._emit_block_removed_events, BlockPool.reset_prefix_cache):
        assert "kv_event_queue.append" in inspect.getsource(call)
    assert "_emit_block_removed_events" in inspect.getsource(BlockPool._maybe_evict_cached_block)
    loaded = inspect.getsource(Scheduler._update_waiting_for_remote_kv)
    assert "kv_cache_manager.cache_blocks(" in loaded, "blocks that a peer wrote are cached, and so told of"
    assert "self.kv_event_publisher.publish(" in inspect.getsource(Scheduler.update_from_output)


def test_the_publisher_connects_to_a_loopback_port_and_counts_from_zero() -> None:
    settings = {"enable_kv_cache_events", "publisher", "endpoint", "topic", "buffer_steps"}
    assert settings <= names(KVEventsConfig)
    assert not kv_events.ZmqEventPublisher._is_bind_endpoint("tcp://127.0.0.1:5557")
    source = inspect.getsource(kv_events.ZmqEventPublisher)
    assert "self._seq_gen = count()" in source
    assert "send_multipart((self._topic_bytes, seq_bytes, payload))" in source
    assert "kv_events_config" in parameters(AsyncEngineArgs)
    KVEvents(16).close()
