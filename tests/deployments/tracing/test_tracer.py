"""Spans as OpenTelemetry has them: parents by W3C's rules, times, errors, and their way to a collector."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from pydantic import ValidationError
from vllm.tracing import SpanAttributes

from configs.schema import BatonConfig, MockEngineConfig, PoolConfig, TracingConfig
from deployments.tracing import attributes, tracer
from deployments.tracing.start import tracer_of
from deployments.tracing.tracer import to_collector
from tests.traces import PARENT, TRACE, TRACEPARENT, Kept, collector, grpc_collector


def config(tracing: TracingConfig | None) -> BatonConfig:
    pool = PoolConfig(engine=MockEngineConfig())
    return BatonConfig(prefill=pool, decode={"a": pool}, tracing=tracing)


def test_an_incoming_traceparent_is_the_parent() -> None:
    kept = Kept()
    span = kept.tracer.begin("request", {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}, {"a": 1})
    child = span.child("session", time.monotonic(), {})
    child.end(time.monotonic())
    span.end(time.monotonic())
    assert (kept.parent("request"), kept.parent("session")) == (PARENT, "request")
    assert {each.context.trace_id for each in kept.all if each.context} == {int(TRACE, 16)}
    context = kept["session"].context
    assert context is not None
    assert context.trace_state.to_header() == "vendor=1"
    assert child.traceparent == f"00-{TRACE}-{context.span_id:016x}-01"
    assert span.trace_id == TRACE


@pytest.mark.parametrize(
    "said",
    ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{PARENT}-01", "0" * 600],
)
def test_what_is_no_traceparent_begins_a_trace(said: str) -> None:
    kept = Kept()
    kept.tracer.begin("request", {"traceparent": said}, {}).end(time.monotonic())
    assert kept.parent("request") == ""


def test_times_are_those_that_are_given_in_unix_time() -> None:
    kept, begun_s, before_ns = Kept(), time.monotonic(), time.time_ns()
    span = kept.tracer.begin("request", {}, {}, begun_s)
    span.child("part", begun_s + 1.0, {}).end(begun_s + 3.5)
    span.end(begun_s + 4.0)
    assert (kept.seconds("request"), kept.seconds("part")) == (4.0, 2.5)
    starts = [kept[name].start_time or 0 for name in ("request", "part")]
    assert starts[1] - starts[0] == 1_000_000_000
    assert abs(starts[0] - before_ns) < 10**9


def test_an_error_is_a_kind_and_no_text() -> None:
    kept = Kept()
    kept.tracer.begin("request", {}, {}).end(time.monotonic(), {"b": 2}, error="ReplicaLost")
    assert kept.failed() == {"request"}
    assert kept["request"].status.description is None
    assert kept.told("request") == {"b": 2, "error.type": "ReplicaLost"}


def test_a_trace_that_is_left_out_is_passed_on_as_such() -> None:
    kept = Kept(ParentBased(ALWAYS_OFF))
    left_out = kept.tracer.begin("request", {}, {})
    wanted = kept.tracer.begin("request", {"traceparent": TRACEPARENT}, {})
    assert (left_out.is_recording, wanted.is_recording) == (False, True)
    assert int(left_out.traceparent[-2:], 16) & 1 == 0, "W3C's flag for a sampled trace"
    unwanted = Kept().tracer.begin("request", {"traceparent": left_out.traceparent}, {})
    assert not unwanted.is_recording


async def test_spans_reach_a_collector_with_the_name_of_their_process() -> None:
    with collector() as received:
        made = to_collector(TracingConfig(otlp=f"{received.url}/"), "baton-ingress", "r1", {"model": "m"})
        span = made.begin("request", {"traceparent": TRACEPARENT}, {"a": 1, "b": 0.5, "c": True, "d": "x"})
        span.end(time.monotonic())
        await made.close()
    (sent,) = received.spans
    assert (sent.service, sent.instance, sent.name) == ("baton-ingress", "r1", "request")
    assert (sent.trace_id, sent.parent) == (TRACE, PARENT)
    assert sent.attributes == {"model": "m", "a": 1, "b": 0.5, "c": True, "d": "x"}


async def test_none_is_sent_of_what_is_not_sampled() -> None:
    with collector() as received:
        made = to_collector(TracingConfig(otlp=received.url, sample=0.0), "baton-ingress", "r1", {})
        made.begin("left out", {}, {}).end(time.monotonic())
        made.begin("wanted", {"traceparent": TRACEPARENT}, {}).end(time.monotonic())
        await made.close()
    assert [sent.name for sent in received.spans] == ["wanted"]


async def test_where_the_environment_names_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        made = tracer_of(config(TracingConfig()), "decode-a", "r2")
        assert made is not None
        made.begin("part", {}, {}).end(time.monotonic())
        await made.close()
    (sent,) = received.spans
    assert (sent.service, sent.attributes) == ("baton-decode-a", {attributes.MODEL: config(None).model.name})


async def test_spans_reach_a_collector_over_grpc() -> None:
    with grpc_collector() as received:
        made = to_collector(TracingConfig(otlp=received.url, protocol="grpc"), "baton-ingress", "r1", {"model": "m"})
        span = made.begin("request", {"traceparent": TRACEPARENT}, {"a": 1})
        span.child("session", time.monotonic(), {}).end(time.monotonic())
        span.end(time.monotonic())
        await made.close()
    sent = {each.name: each for each in received.spans}
    assert sent.keys() == {"request", "session"}
    request = sent["request"]
    assert (request.service, request.instance, request.parent) == ("baton-ingress", "r1", PARENT)
    assert request.attributes == {"model": "m", "a": 1}
    assert (sent["session"].trace_id, sent["session"].parent) == (TRACE, request.span_id)


async def test_a_collector_that_is_away_holds_up_no_process_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "CLOSE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and says nothing
        made = to_collector(
            TracingConfig(otlp=f"http://127.0.0.1:{silent.getsockname()[1]}"), "baton-ingress", "r1", {}
        )
        made.begin("request", {}, {}).end(time.monotonic())
        async with asyncio.timeout(60):
            await made.close()


@pytest.mark.parametrize("otlp", ["collector:4318", "grpc://collector", "http://", ""])
def test_what_is_no_url_is_refused(otlp: str) -> None:
    with pytest.raises(ValidationError, match="otlp"):
        TracingConfig(otlp=otlp)


OFF = """
import sys
import app.api, app.access_log, deployments.manager.spans, deployments.replica.spans
from configs.schema import BatonConfig, MockEngineConfig, PoolConfig
from deployments.tracing.start import tracer_of
pool = PoolConfig(engine=MockEngineConfig())
assert tracer_of(BatonConfig(mixed={"a": pool}), "ingress", "r") is None
print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""


def test_without_configuration_there_is_no_tracer_and_nothing_of_opentelemetry_is_loaded() -> None:
    ran = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == "[]"


def test_names_that_begin_as_vllms_are_vllms() -> None:
    ours = {value for name, value in vars(attributes).items() if name.isupper() and value.startswith("gen_ai.")}
    ours -= {attributes.OPERATION, attributes.PROVIDER}  # of metrics
    theirs = {value for name, value in vars(SpanAttributes).items() if name.startswith("GEN_AI_")}
    assert ours
    assert ours - theirs == set()
