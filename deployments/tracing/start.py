"""The tracer of a process, where the configuration has `tracing`. OpenTelemetry's SDK is imported there only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.schema import BatonConfig
from deployments.tracing.attributes import MODEL

if TYPE_CHECKING:
    from deployments.tracing.tracer import Tracer


def tracer_of(config: BatonConfig, deployment: str, replica_id: str) -> Tracer | None:
    """None where nothing is traced. `deployment`, `replica_id`: of this process; traces show them as service.

    Ingresses have the requests, and measure them.
    """
    if config.tracing is None:
        return None
    from deployments.tracing.tracer import to_collector

    model = config.model.name
    measured = model if deployment == "ingress" and config.tracing.metrics else ""
    return to_collector(config.tracing, f"baton-{deployment}", replica_id, {MODEL: model}, measured)
