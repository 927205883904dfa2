"""What vLLM loads by path into the processes of a `VllmEngine`: Baton's connector, with the pace of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from deployments.engine.vllm.cpu_adapters import skip_plain_tokens
from deployments.engine.vllm.phased_scheduler import PhasedScheduler
from deployments.engine.vllm.step_pace import StepPace
from deployments.messages import StepSample
from deployments.step_cost import Coefficients
from transfer.vllm.connector import BatonConnector
from transfer.vllm.continued_answer import scheduler_on_the_stack

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from transfer.vllm.step_clock import StepReport
    from transfer.vllm.step_messages import StepMetadata


def pace_of(extra: dict[str, Any]) -> StepPace | None:
    """The pace of the scheduler that makes its connector now; None where vLLM sizes the steps by itself.

    `extra`: the connector's own configuration.
    """
    if (pace := extra.get("pace")) is None:
        return None
    return StepPace(scheduler_on_the_stack(), Coefficients(*pace["prior"]), pace["prompt_share"])


def sample_of(report: StepReport) -> StepSample:
    """A step as the step model learns from it."""
    return StepSample(
        report.seconds, report.prefill_tokens, report.prefill_context, report.decode_sequences, report.decode_context
    )


class PacedConnector(BatonConnector):
    """Baton's connector. Before each step it sets how many prompt tokens the step takes, unless the engine works in
    phases. It tells the pace, or the control plane of the phases, how long steps take."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._pace = pace_of(self._kv_transfer_config.kv_connector_extra_config)
            scheduler = scheduler_on_the_stack()
            self._phased = scheduler if isinstance(scheduler, PhasedScheduler) else None
        else:
            skip_plain_tokens(vllm_config)

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        if self._pace is not None:
            self._pace.begin(request)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        if self._pace is not None:
            self._pace.arrived(connector_output.finished_recving or ())

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        if self._pace is not None:
            self._pace.plan(scheduler_output.num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    def get_kv_connector_stats(self) -> Any:
        report = super().get_kv_connector_stats()
        if report is not None:
            self._learn(sample_of(report))
        return report

    def _learn(self, step: StepSample) -> None:
        if self._pace is not None:
            self._pace.learn(step)
        if self._phased is not None:
            self._phased.controller.learn(step)
