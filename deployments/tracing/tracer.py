"""Makes spans with OpenTelemetry's SDK. Only this file and `measures` import it, and only a process that traces
imports them.

Times are seconds of this process's monotonic clock, as everywhere in Baton. A span learns at its trace's beginning how
far the wall clock is from it, and so do its children: a clock that is set in between moves no child out of its parent.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from configs.schema import TracingConfig
from deployments.tracing.attributes import ERROR_TYPE

if TYPE_CHECKING:
    from deployments.tracing.measures import Measures

Kind = Literal["internal", "server", "client"]
Value = str | bool | int | float

CLOSE_S = 5.0
"""The longest time that a process which stops waits for its last spans to be sent."""
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_KINDS = {"internal": trace.SpanKind.INTERNAL, "server": trace.SpanKind.SERVER, "client": trace.SpanKind.CLIENT}
_PROPAGATOR = TraceContextTextMapPropagator()


class Span:
    """A span that has begun. `start_s`: when. `offset_ns`: what to add to the monotonic clock for Unix time."""

    __slots__ = ("_context", "_offset_ns", "_span", "_tracer")

    def __init__(
        self,
        tracer: trace.Tracer,
        name: str,
        kind: Kind,
        parent: Context,
        start_s: float,
        offset_ns: int,
        attributes: Mapping[str, Value],
    ) -> None:
        self._tracer, self._offset_ns = tracer, offset_ns
        start_ns = int(start_s * 1e9) + offset_ns
        self._span = tracer.start_span(name, parent, _KINDS[kind], attributes, start_time=start_ns)
        self._context = trace.set_span_in_context(self._span, Context())

    @property
    def is_recording(self) -> bool:
        """False where the sampler has left this trace out: then children cost time for nothing."""
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    @property
    def traceparent(self) -> str:
        """This span as the parent of others, in other processes: W3C's header of that name."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)
        return carrier[TRACEPARENT]

    def child(self, name: str, start_s: float, attributes: Mapping[str, Value], kind: Kind = "internal") -> Span:
        """Begin a span below this one."""
        return Span(self._tracer, name, kind, self._context, start_s, self._offset_ns, attributes)

    def end(self, end_s: float, attributes: Mapping[str, Value] | None = None, error: str = "") -> None:
        """End it. `error`: the kind of error that ended it, such as a class or a code; never text of a client."""
        if attributes:
            self._span.set_attributes(attributes)
        if error:
            self._span.set_attribute(ERROR_TYPE, error)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end(int(end_s * 1e9) + self._offset_ns)


class Tracer:
    """Begins the spans of one process that have no parent in it.

    `provider`: OpenTelemetry's, which sends them on. `fixed`: attributes that they all have. `measures`: what requests
    are measured by; None: they are not.
    """

    def __init__(
        self,
        provider: TracerProvider,
        fixed: Mapping[str, Value] = MappingProxyType({}),
        measures: Measures | None = None,
    ) -> None:
        self._provider, self._tracer, self._fixed = provider, provider.get_tracer("baton"), fixed
        self.measures = measures

    def begin(
        self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Value], start_s: float | None = None
    ) -> Span:
        """Begin a span of kind `server`. Its parent is what `headers` name, by W3C's rules; without one it is a root.

        `headers`: `traceparent` and `tracestate`; what is not valid is left out. `start_s`: None: now.
        """
        now_s = time.monotonic()
        offset_ns = time.time_ns() - int(now_s * 1e9)
        parent = _PROPAGATOR.extract(headers, Context())
        start_s = now_s if start_s is None else start_s
        return Span(self._tracer, name, "server", parent, start_s, offset_ns, {**self._fixed, **attributes})

    async def close(self) -> None:
        """Send what is left, in `CLOSE_S` at most. What begins after that is not sent."""
        # A daemon, so that a collector that does not answer holds up neither this nor the process's end.
        ends = [self._provider.shutdown, *([] if self.measures is None else [self.measures.shutdown])]
        closing = [threading.Thread(target=end, name="baton-tracing", daemon=True) for end in ends]
        for thread in closing:
            thread.start()
        deadline_s = time.monotonic() + CLOSE_S
        for thread in closing:
            await asyncio.to_thread(thread.join, max(0.0, deadline_s - time.monotonic()))


def to_collector(
    config: TracingConfig, service: str, instance: str, fixed: Mapping[str, Value], measured_model: str = ""
) -> Tracer:
    """A tracer whose spans a thread sends to the collector. `service`, `instance`: what traces call this process.

    `measured_model`: the model whose requests this process measures; "": it measures none.
    """
    resource = _resource(service, instance)
    provider = TracerProvider(_sampler(config), resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(config)))
    if not measured_model:
        return Tracer(provider, fixed)
    from deployments.tracing.measures import measures_for

    return Tracer(provider, fixed, measures_for(config, resource, measured_model))


def _sampler(config: TracingConfig) -> ParentBased:
    return ParentBased(TraceIdRatioBased(config.sample))


def _resource(service: str, instance: str) -> Resource:
    """What says of which process a span is. `OTEL_RESOURCE_ATTRIBUTES` adds to it."""
    return Resource.create({"service.namespace": "baton", "service.name": service, "service.instance.id": instance})


def _exporter(config: TracingConfig) -> SpanExporter:
    """The exporter of the protocol, whose package is imported here. Without `otlp` it reads OTEL_EXPORTER_OTLP_*."""
    if config.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=config.otlp)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http(endpoint=None if config.otlp is None else f"{config.otlp.rstrip('/')}/v1/traces")
