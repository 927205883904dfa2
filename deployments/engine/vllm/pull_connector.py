"""What vLLM loads by path into the processes of a `PullEngine`: its connector, and methods for its workers."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_open_port
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from deployments.engine.vllm.connector import pace_of, sample_of
from deployments.engine.vllm.cpu_adapters import skip_plain_tokens
from transfer.vllm.continued_answer import AnsweredRequests, count_answered
from transfer.vllm.faults import note_fault
from transfer.vllm.lifeline import die_with_parent
from transfer.vllm.meeting_file import remove_meeting_file
from transfer.vllm.step_clock import StepClock


class PullWorker:
    """Methods that vLLM mixes into its workers, so that a replica can ask them by `collective_rpc`."""

    def baton_release(self, request_ids: list[str]) -> int:
        """End the leases on prefilled blocks; the number of requests that the connector still knows."""
        worker = get_kv_transfer_group().connector_worker
        for request_id in request_ids:
            if request_id in worker._reqs_to_send:
                worker._reqs_to_send[request_id] = 0.0  # a time in the past: the next step frees the blocks
        return sum(request_id in worker._reqs_to_process for request_id in request_ids)


class NixlConnector(NixlPullConnector):
    """vLLM's connector with our settings, which it would otherwise read from the environment of the engine's process.

    It keeps vLLM's name, because vLLM recognises it by that name when it prepares the caches of some models.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        die_with_parent()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if extra["transports"]:
            os.environ["UCX_TLS"] = extra["transports"]
        # Only the scheduler's half reads and opens the side channel. Its port is free at this moment.
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = extra["host"]
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(get_open_port())
        cores = os.sched_getaffinity(0)
        if current_platform.is_cpu() and role is KVConnectorRole.WORKER:
            # NIXL's progress thread spins on a whole core, and vLLM has no setting against it. On CPU the model needs
            # that core. Without the thread, transfers progress in the engine's steps, which go on while one is open.
            base_worker.nixl_agent_config = functools.partial(base_worker.nixl_agent_config, enable_prog_thread=False)
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._clock, self._answered, self._pace = StepClock(), AnsweredRequests(), pace_of(extra)
        else:
            count_answered(vllm_config)
            skip_plain_tokens(vllm_config)
            remove_meeting_file()
        # On CPU vLLM has just pinned this thread, which computes the model, to the node's last core: undo that.
        os.sched_setaffinity(0, cores)

    def on_new_request(self, request: Request) -> None:
        self._answered.begin(request)
        if self._pace is not None:
            self._pace.begin(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not self._answered.is_ready(request):
            return None, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        note_fault(request)
        finished: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return finished

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._clock.begin(scheduler_output, time.monotonic())
        if self._pace is not None:
            self._pace.plan(scheduler_output.num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    def get_kv_connector_stats(self) -> Any:
        """The step that just ended. The counts of vLLM's connector are left out: vLLM cannot add the two."""
        report = self._clock.end(time.monotonic()) if self._role is KVConnectorRole.SCHEDULER else None
        if report is not None and self._pace is not None:
            self._pace.learn(sample_of(report))
        return report
