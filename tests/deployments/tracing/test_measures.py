"""OpenTelemetry's metrics of a model server, as a collector gets them over HTTP and over gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import httpx
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as conventions
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from app.api import Gateway
from app.held_response import ASGIApp, Receive
from configs.schema import BatonConfig, IngressConfig, MockEngineConfig, PoolConfig, TracingConfig
from deployments import errors
from deployments.cluster.request_context import RequestContext
from deployments.tracing import attributes, measures
from deployments.tracing.start import tracer_of
from tests.app.toys import OK, Control, Toy
from tests.traces import Collector, Measured, collector, grpc_collector

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MODEL = "the-model"


def config(**tracing: Any) -> BatonConfig:
    pool = PoolConfig(engine=MockEngineConfig())
    model = BatonConfig(mixed={"a": pool}).model.model_copy(update={"name": MODEL})
    return BatonConfig(mixed={"a": pool}, model=model, tracing=TracingConfig(**tracing))


def answered(answers: int, tokens: int) -> ASGIApp:
    """A server whose requests have so many answers of so many tokens, the first of which comes at once."""

    async def act(context: RequestContext, receive: Receive) -> None:
        context.first_token_s = context.arrived_s
        for _ in range(answers):
            context.note_session([1, 2, 3], [7] * tokens)

    return Toy(*OK, act=act)


async def _fail(context: RequestContext, receive: Receive) -> None:
    context.first_token_s = context.arrived_s
    context.error = errors.Overloaded("no", 1.0, "queue_full")


async def ask(received: Collector, inner: ASGIApp, path: str = CHAT, method: str = "POST", **more: Any) -> None:
    """One request of an ingress that then stops, so that all is sent."""
    tracer = tracer_of(config(otlp=received.url, **more), "ingress", "r1")
    assert tracer is not None
    gateway = Gateway(inner, IngressConfig(), Control(), tracer=tracer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton") as http:
        await http.request(method, path, content=json.dumps({"prompt": "a secret"}))
    await tracer.close()


def told(received: Collector) -> dict[str, Measured]:
    assert len({each.name for each in received.measured}) == len(received.measured)
    return {each.name: each for each in received.measured}


@pytest.mark.parametrize(("protocol", "listening"), [("http/protobuf", collector), ("grpc", grpc_collector)])
async def test_a_request_is_measured(
    protocol: Literal["http/protobuf", "grpc"], listening: Callable[[], AbstractContextManager[Collector]]
) -> None:
    with listening() as received:
        await ask(received, answered(1, 5), protocol=protocol)
    found = told(received)
    assert found.keys() == {measures.DURATION, measures.FIRST_TOKEN, measures.PER_TOKEN}
    for each in found.values():
        assert (each.service, each.unit, each.count) == ("baton-ingress", "s", 1)
        assert each.attributes == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "baton",
            "gen_ai.response.model": MODEL,
        }
    whole, first, later = (found[name].total for name in (measures.DURATION, measures.FIRST_TOKEN, measures.PER_TOKEN))
    assert whole == pytest.approx(first + 4 * later)


async def test_buckets_are_those_of_the_conventions() -> None:
    with collector() as received:
        await ask(received, answered(1, 2))
    bounds = {name: each.bounds for name, each in told(received).items()}
    assert bounds[measures.DURATION] == pytest.approx(
        [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
    )
    assert (bounds[measures.FIRST_TOKEN][0], bounds[measures.FIRST_TOKEN][-1]) == (0.001, 10.0)
    assert (bounds[measures.PER_TOKEN][0], bounds[measures.PER_TOKEN][-1]) == (0.01, 2.5)


async def test_several_answers_have_no_time_per_token_and_one_token_has_none() -> None:
    for inner in (answered(2, 5), answered(1, 1)):
        with collector() as received:
            await ask(received, inner, COMPLETION)
        found = told(received)
        assert found.keys() == {measures.DURATION, measures.FIRST_TOKEN}
        assert {each.attributes["gen_ai.operation.name"] for each in found.values()} == {"text_completion"}


async def test_a_request_that_fails_counts_by_its_duration_and_error_alone() -> None:
    with collector() as received:
        await ask(received, Toy(*OK, act=_fail))
    (found,) = told(received).values()
    assert (found.name, found.attributes["error.type"]) == (measures.DURATION, "queue_full")


async def test_what_is_not_traced_is_measured() -> None:
    with collector() as received:
        await ask(received, answered(1, 5), sample=0.0)
    assert received.spans == []
    assert told(received).keys() == {measures.DURATION, measures.FIRST_TOKEN, measures.PER_TOKEN}


@pytest.mark.parametrize(
    ("path", "method", "more"),
    [("/v1/models", "GET", {}), ("/tokenize", "POST", {}), (CHAT, "GET", {}), (CHAT, "POST", {"metrics": False})],
)
async def test_what_is_not_measured(path: str, method: str, more: dict[str, bool]) -> None:
    with collector() as received:
        await ask(received, answered(1, 5), path, method, **more)
    assert (received.measured, len(received.spans)) == ([], 1)


async def test_only_ingresses_measure() -> None:
    for deployment in ("prefill", "session-manager", "decode-a"):
        made = tracer_of(config(otlp="http://127.0.0.1:9"), deployment, "r")
        assert made is not None
        assert made.measures is None
        await made.close()


def test_names_are_those_of_the_conventions() -> None:
    assert [measures.DURATION, measures.FIRST_TOKEN, measures.PER_TOKEN] == [
        gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION,
        gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
        gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
    ]
    assert [attributes.OPERATION, attributes.PROVIDER, attributes.MODEL] == [
        conventions.GEN_AI_OPERATION_NAME,
        conventions.GEN_AI_PROVIDER_NAME,
        conventions.GEN_AI_RESPONSE_MODEL,
    ]
    names = {each.value for each in conventions.GenAiOperationNameValues}
    assert names >= {"chat", "text_completion"}
