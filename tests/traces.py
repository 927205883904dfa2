"""Spans as tests look at them: a tracer that keeps them, and a collector that they are sent to over HTTP or gRPC."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from deployments.tracing.tracer import Tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Kept:
    """A tracer, and the spans that have ended, by name. With one name twice, the newest counts."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = Tracer(provider)

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        """In the order of their beginnings; of those that begin together, the one that ends last is the first."""

        def order(span: ReadableSpan) -> tuple[int, int]:
            return span.start_time or 0, -(span.end_time or 0)

        newest_first = self.all[::-1]
        return [span.name for span in sorted(newest_first, key=order)]

    def __getitem__(self, name: str) -> ReadableSpan:
        return {span.name: span for span in self.all}[name]

    def parent(self, name: str) -> str:
        """The name of a span's parent; its id where that is no span of ours, "" for a root."""
        parent = self[name].parent
        if parent is None:
            return ""
        ours = {span.context.span_id: span.name for span in self.all if span.context is not None}
        return ours.get(parent.span_id, f"{parent.span_id:016x}")

    def told(self, name: str) -> dict[str, Any]:
        return dict(self[name].attributes or {})

    def seconds(self, name: str) -> float:
        span = self[name]
        assert span.start_time is not None
        assert span.end_time is not None
        return round((span.end_time - span.start_time) / 1e9, 6)

    def failed(self) -> set[str]:
        """The names of spans with an error."""
        return {span.name for span in self.all if not span.status.is_unset}


@dataclass
class Sent:
    """One span as a collector gets it. Ids are hexadecimal; `parent` is "" for a root."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    attributes: dict[str, Any]


@dataclass
class Measured:
    """One series of a histogram as a collector gets it. `bounds`: seconds, where its unit is `s`."""

    service: str
    name: str
    unit: str
    attributes: dict[str, Any]
    count: int
    total: float
    bounds: tuple[float, ...]


@dataclass
class Collector:
    """What has come over HTTP or gRPC, in OTLP's protobuf."""

    url: str = ""
    spans: list[Sent] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)

    def take_metrics(self, body: bytes) -> None:
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            service = _values(resource.resource.attributes)["service.name"]
            for metric in [each for scope in resource.scope_metrics for each in scope.metrics]:
                for point in metric.histogram.data_points:
                    of = _values(point.attributes), point.count, point.sum, tuple(point.explicit_bounds)
                    self.measured.append(Measured(service, metric.name, metric.unit, *of))

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            of = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                    where = of["service.name"], of["service.instance.id"]
                    self.spans.append(Sent(*where, span.name, *ids, _values(span.attributes)))


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a port of its own of this host."""
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            take = {"/v1/traces": made.take, "/v1/metrics": made.take_metrics}.get(self.path)
            if take is not None:
                take(body)
            self.send_response(404 if take is None else 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, name="baton-collector")
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def grpc_collector() -> Iterator[Collector]:
    """The same over gRPC. `measured` and `spans` have what has come."""
    made = Collector()

    def handler(take: Callable[[bytes], None]) -> grpc.RpcMethodHandler:
        def export(body: bytes, context: grpc.ServicerContext) -> bytes:
            take(body)
            return b""  # an answer without fields

        return grpc.unary_unary_rpc_method_handler(export)

    services = {"trace.v1.TraceService": made.take, "metrics.v1.MetricsService": made.take_metrics}
    server = grpc.server(ThreadPoolExecutor(1))
    for name, take in services.items():
        handlers = {"Export": handler(take)}
        whole = f"opentelemetry.proto.collector.{name}"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(whole, handlers),))
    made.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield made
    finally:
        server.stop(None).wait()
