"""vLLM's own NIXL connectors with a timeline. What they move, and when, stays as in vLLM.

The events are those of `transfer/channel/trace.py`, one file per engine:
- `forward_end` (prefill; `computed` tokens): in `wait_for_save`, where Baton's connector writes it too.
- `posted`: just before vLLM posts a READ (pull, decode side) or a WRITE (push, prefill side).
- `received` (decode). Pull: the engine's step that finds the READ done. vLLM looks once a step, which is about once a
  millisecond while it only waits. Push: prefill's notification has come out of NIXL on the worker's writer thread. The
  engine's step learns of it later.
- `moved` (`bytes`): NIXL's own telemetry of the transfer, on the side that posted it.

`kv_connector_module_path` loads this module. `kv_connector_extra_config` holds `trace_dir`, `trace_name`,
`side_channel_port`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector, NixlPushConnector

from transfer.channel.trace import tracer
from transfer.vllm.lifeline import die_with_parent

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Measured:
    """What both connectors share. It comes before vLLM's class in the list of base classes."""

    kv_transfer_config: Any
    connector_worker: Any
    connector_scheduler: Any
    _connector_metadata: Any

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]  # vLLM's class comes next
        extra = self.kv_transfer_config.kv_connector_extra_config
        self._computed: Counter[str] = Counter()
        self._done: set[str] = set()
        if role is KVConnectorRole.SCHEDULER:
            # vLLM reads the port from the environment, which the engines of this benchmark share.
            self.connector_scheduler.side_channel_port = extra["side_channel_port"]
            return
        die_with_parent()
        trace = tracer(extra["trace_dir"], extra["trace_name"])
        assert trace is not None
        self._trace = trace
        self.watch(self.connector_worker)

    def watch(self, worker: Any) -> None:
        """Wrap the functions that post transfers, so that they write the trace."""
        raise NotImplementedError

    @property
    def _is_prefill(self) -> bool:
        return bool(self.kv_transfer_config.kv_role == "kv_producer")

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)  # type: ignore[misc]  # as above
        chunks = []
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            self._computed[request_id] += scheduled
            chunks.append((request_id, self._computed[request_id]))
        for request_id in scheduler_output.finished_req_ids:
            self._computed.pop(request_id, None)
        metadata.measured_chunks = chunks
        return metadata

    def wait_for_save(self) -> None:
        super().wait_for_save()  # type: ignore[misc]  # as above
        if self._is_prefill:
            for request_id, computed in self._connector_metadata.measured_chunks:
                self._trace("forward_end", session=request_id, computed=computed)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]  # as above
        self._done = set(results.finished_sending if self._is_prefill else results.finished_recving)
        return results

    def get_kv_connector_stats(self) -> Any:
        """vLLM asks for the statistics right after the results. Only then do they belong to these requests."""
        stats = super().get_kv_connector_stats()  # type: ignore[misc]  # as above
        if stats is not None and (sizes := stats.data["bytes_transferred"]):
            for request_id in self._done:
                self._trace("moved", session=request_id, bytes=sum(sizes))
        return stats


class MeasuredPullConnector(Measured, NixlPullConnector):
    """Decode READs the KV when the prefill is over."""

    def watch(self, worker: Any) -> None:
        worker._read_blocks = _announced(worker._read_blocks, self._trace)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            self._trace("received", session=request_id, ok=request_id not in results.failed_recving)
        return results


class MeasuredPushConnector(Measured, NixlPushConnector):
    """Prefill WRITEs the KV when the prefill is over."""

    def watch(self, worker: Any) -> None:
        worker._xfer_blocks = _announced(worker._xfer_blocks, self._trace)
        if not self._is_prefill:
            worker._pending_completion_notifs.put = self._noticed(worker._pending_completion_notifs.put)

    def _noticed(self, put: Callable[[bytes], None]) -> Callable[[bytes], None]:
        def noticed(notification: bytes) -> None:
            request_id, _, _ = notification.decode().rpartition(":")
            self._trace("received", session=request_id)
            put(notification)

        return noticed


def _announced(post: Callable[..., Any], trace: Callable[..., None]) -> Callable[..., Any]:
    def announced(*args: Any, **kwargs: Any) -> Any:
        trace("posted", session=kwargs["request_id"])
        return post(*args, **kwargs)

    return announced
