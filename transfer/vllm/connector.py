"""Baton's KV connector for vLLM: an adapter from vLLM's hooks to the channel.

vLLM makes it twice: in the engine core's process, where it has a `SchedulerSide`, and in each worker's process, where
it has a `WorkerSide`. The two sides talk by vLLM's connector metadata, once per step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from transfer.channel.handoff_log import Span
from transfer.vllm import logs
from transfer.vllm.faults import note_fault
from transfer.vllm.lifeline import die_with_parent
from transfer.vllm.scheduler_side import SchedulerSide
from transfer.vllm.shared_tiers import SharedTiers
from transfer.vllm.step_messages import StepMetadata, WorkerMetadata
from transfer.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class BatonConnector(KVConnectorBase_V1):
    """Prefill writes each layer of each chunk into decode's blocks; decode allocates them before prefill begins."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        die_with_parent()
        logs.join(vllm_config)
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise ValueError(
                "this model has several KV cache groups, which Baton's channel does not carry; "
                "`channel: {kind: vllm}` may carry it"
            )
        extra: dict[str, Any] = self._kv_transfer_config.kv_connector_extra_config
        if role is KVConnectorRole.SCHEDULER:
            block_size: int = vllm_config.cache_config.block_size
            shared = SharedTiers(vllm_config.parallel_config.world_size) if extra["tiers"] else None
            self._scheduler_side = SchedulerSide(extra["secret"], block_size, _worker_of_this_process, shared)
        else:
            self._worker_side = WorkerSide(vllm_config, extra)

    # ---- scheduler side

    def on_new_request(self, request: Request) -> None:
        self._scheduler_side.begin(request)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler_side.bind(kv_cache_manager)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler_side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler_side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        return self._scheduler_side.metadata(scheduler_output)

    def get_kv_connector_stats(self) -> Any:
        """What the step that just ended was: vLLM asks after every step, and sends it on with its own statistics.

        vLLM asks the workers too; they have nothing to say.
        """
        return self._scheduler_side.step_report() if self._role is KVConnectorRole.SCHEDULER else None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        note_fault(request)
        return self._scheduler_side.finished(request), None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler_side.take(connector_output)

    def take_events(self) -> list[KVCacheEvent]:
        return list(self._scheduler_side.events())

    def has_pending_push_work(self) -> bool:
        """True: vLLM makes steps also without requests, so that what has happened to blocks is heard and told."""
        return self._scheduler_side.needs_steps()

    # ---- worker side

    @property
    def worker_side(self) -> WorkerSide:
        """Exists in a worker's process."""
        return self._worker_side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker_side.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._worker_side.preempted(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._worker_side.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to start: the peer writes."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is not scheduled before its KV is here."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker_side.layer_saved(layer_name, kv_layer)

    def wait_for_save(self) -> None:
        """Only marks the end of the pass: source blocks are held until `finished_sending`."""
        self._worker_side.channel.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker_side.results()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        return self._worker_side.metadata()

    def shutdown(self) -> None:
        if self._role is KVConnectorRole.SCHEDULER:
            self._scheduler_side.close()
        else:
            self._worker_side.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full CUDA graphs would skip `save_kv_layer`."""
        return True


class WorkerExtension:
    """Methods that vLLM mixes into its workers, so that a replica can ask them by `collective_rpc`."""

    def baton_endpoint(self) -> str:
        """The control address of this worker's channel."""
        return _connector().worker_side.channel.address

    def baton_meet(self, receives: bool, peers: list[list[str]]) -> None:
        """The replicas that this one exchanges KV with, each its workers' endpoints by rank.

        `receives`: they write to this one, too. A strict prefill replica only writes, where none fetches.
        """
        side = _connector().worker_side
        side.keep(peers)
        if receives:
            side.channel.meet(peers)

    def baton_counters(self) -> dict[str, float]:
        """The counters of this worker's channel and tiers."""
        return _connector().worker_side.counters()

    def baton_spans(self, sessions: list[str]) -> tuple[float, dict[str, list[Span]]]:
        """This worker's clock, and what its channel did for each of these sessions."""
        return _connector().worker_side.channel.spans(sessions)


def _connector() -> BatonConnector:
    connector = get_kv_transfer_group()
    assert isinstance(connector, BatonConnector)
    return connector


def _worker_of_this_process() -> WorkerSide | None:
    """The worker's side, when worker and scheduler share a process."""
    return _connector().worker_side if has_kv_transfer_group() else None
