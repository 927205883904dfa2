"""OpenTelemetry's metrics of a model server, `gen_ai.server.*`, for the collector that gets the spans.

Names, units, bounds of buckets and attributes are those of the semantic conventions for generative AI. Only a process
that traces imports this file.
"""

from __future__ import annotations

from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from configs.schema import TracingConfig
from deployments.tracing.attributes import ERROR_TYPE, MODEL, OPERATION, PROVIDER

DURATION, FIRST_TOKEN, PER_TOKEN = (
    f"gen_ai.server.{name}" for name in ("request.duration", "time_to_first_token", "time_per_output_token")
)
DURATION_S = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class Measures:
    """Measures the requests of one process. `provider`: OpenTelemetry's. `model`: the served model's name."""

    def __init__(self, provider: MeterProvider, model: str) -> None:
        self._provider, self._model = provider, model
        meter = provider.get_meter("baton")

        def histogram(name: str, what: str, bounds: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(name, "s", what, explicit_bucket_boundaries_advisory=bounds)

        self._duration = histogram(DURATION, "From a request's arrival to its last byte.", DURATION_S)
        self._first = histogram(FIRST_TOKEN, "From a request's arrival to its first token.", FIRST_TOKEN_S)
        self._each = histogram(PER_TOKEN, "The mean time of an answer's tokens after the first.", PER_TOKEN_S)

    def ended(
        self, operation: str, duration_s: float, first_s: float | None, per_token_s: float | None, error: str
    ) -> None:
        """A request is over. `first_s`, `per_token_s`: None where there is none. `error`: its kind; "" for none.

        A request with an error counts by its duration alone.
        """
        told = {OPERATION: operation, PROVIDER: "baton", MODEL: self._model}
        if error:
            self._duration.record(duration_s, {**told, ERROR_TYPE: error})
            return
        self._duration.record(duration_s, told)
        if first_s is not None:
            self._first.record(first_s, told)
        if per_token_s is not None:
            self._each.record(per_token_s, told)

    def shutdown(self) -> None:
        """Send what is left. Blocks until the collector has it, or the exporter gives up."""
        self._provider.shutdown()


def measures_for(config: TracingConfig, resource: Resource, model: str) -> Measures:
    """What a thread sends to the collector, each minute or as `OTEL_METRIC_EXPORT_INTERVAL` says."""
    reader = PeriodicExportingMetricReader(_exporter(config))
    return Measures(MeterProvider([reader], resource, shutdown_on_exit=False), model)


def _exporter(config: TracingConfig) -> MetricExporter:
    """The exporter of the protocol, whose package is imported here. Without `otlp` it reads OTEL_EXPORTER_OTLP_*."""
    if config.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc

        return Grpc(endpoint=config.otlp)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as Http

    return Http(endpoint=None if config.otlp is None else f"{config.otlp.rstrip('/')}/v1/metrics")
