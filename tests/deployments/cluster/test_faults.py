"""Faults and their owners: a request that engines refuse, an engine's own error, and requests that end engines."""

from __future__ import annotations

import asyncio
from typing import Any

from deployments.cluster.request_context import RequestContext
from deployments.engine.protocol import EngineError
from deployments.errors import EndsEngines, EngineFault, RequestFault, TooManyParts
from deployments.manager.calls import Status
from load_tests.harness.control_plane import LARGE, MAX_MODEL_LEN, SMALL, Answer, InProcess, until
from tests.deployments.cluster.asking import ERROR, LENGTH, assert_failed, forged, prompt
from transfer.vllm.faults import FAULT

POISON = 77


async def closed(cluster: InProcess) -> dict[str, int]:
    return dict((await cluster.manager.ask(Status()))["sessions"]["closed"])


async def stopped_on_one(cluster: InProcess, request_id: str = "") -> tuple[Answer, str]:
    """A request that one decode engine has, which computes nothing, and the engine's replica."""
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.clear()
    answer = await cluster.ask(prompt(8), max_tokens=5, prompt_logprobs=0)
    return answer, (await cluster.placed(answer))["decode"]


async def test_a_request_that_an_engine_refuses_is_not_tried_in_another(cluster: InProcess) -> None:
    answer, owner = await stopped_on_one(cluster)
    output = forged(answer.request_id, finish_reason=ERROR, trace_headers={FAULT: "the grammar cannot be used: x"})
    cluster.core._take(owner, [output])
    await answer.over()
    assert_failed(answer, RequestFault)
    assert str(answer.context.error) == "the grammar cannot be used: x"
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.set()
    await cluster.settle()
    assert await closed(cluster) == {"failed": 1}, "one placement"
    assert (await cluster.answer(prompt(8), max_tokens=5)).reason is LENGTH


async def test_a_request_that_an_engine_cannot_even_read_is_not_tried_in_another(cluster: InProcess) -> None:
    """Placement does not know it, as with parameters that only an engine checks."""
    cluster.engines[SMALL]._max_model_len = cluster.engines[LARGE]._max_model_len = 4
    answer = await cluster.answer(prompt(8), max_tokens=5, prompt_logprobs=0)
    assert_failed(answer, RequestFault)
    assert "a prompt of 8 tokens" in str(answer.context.error)
    cluster.engines[SMALL]._max_model_len = cluster.engines[LARGE]._max_model_len = MAX_MODEL_LEN
    await cluster.settle()
    assert await closed(cluster) == {"failed": 1}
    assert (await cluster.answer(prompt(8), max_tokens=5)).reason is LENGTH, "the replicas are as good as before"


async def test_an_engine_s_own_error_is_tried_in_one_other(cluster: InProcess) -> None:
    answer, owner = await stopped_on_one(cluster)
    cluster.core._take(owner, [forged(answer.request_id, finish_reason=ERROR)])

    running = cluster.core._means.running

    async def again() -> Any:
        attempt = running.get(f"{answer.request_id}~2")
        return attempt and attempt.placement and attempt.placement.decode

    other = (await until(again)).replica_id
    cluster.core._take(other, [forged(f"{answer.request_id}~2", finish_reason=ERROR)])
    await answer.over()
    assert_failed(answer, EngineFault)
    assert str(answer.context.error).endswith(", and so in 2 engines")
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.set()
    await cluster.settle()


async def test_a_request_that_ends_engines_ends_two_and_no_third(cluster: InProcess) -> None:
    for engine in cluster.engines.values():
        engine.poison = POISON
    poison = [POISON, *prompt(8)]
    answer = await cluster.answer(poison, max_tokens=5)
    assert_failed(answer, EndsEngines)
    assert "two engines have ended with this request" in str(answer.context.error)
    dead = [replica_id for replica_id, replica in cluster.replicas.items() if not is_healthy(replica)]
    assert len(dead) == 2
    again = await cluster.answer(poison, max_tokens=5)
    assert_failed(again, EndsEngines)
    other = await cluster.answer(prompt(9), max_tokens=5)
    assert other.reason is LENGTH
    await cluster.settle(dead=dead)


def is_healthy(replica: object) -> bool:
    try:
        replica.check_health()  # type: ignore[attr-defined]
    except EngineError:
        return False
    return True


async def test_the_sessions_of_an_engine_that_was_killed_are_not_suspected(cluster: InProcess) -> None:
    answer = await (await cluster.ask(prompt(20), max_tokens=200)).has(3)
    for _ in range(2):
        owner = (await cluster.placed(answer))["decode"]
        await cluster.kill(owner)
        await answer.has(len(answer.tokens) + 3)
    assert (await answer.over()).reason is LENGTH
    await cluster.settle(dead=[SMALL, LARGE])


# ---- the answers of one request


async def ask_parts(cluster: InProcess, context: RequestContext, count: int) -> list[Answer]:
    answers = []
    for _ in range(count):
        cluster._asked += 1
        request_id = f"request-{cluster._asked}"
        answer = cluster.answers[request_id] = Answer(request_id, context)
        await cluster._ingress.add(answer, prompt(8), {"max_tokens": 5})
        answers.append(answer)
    return answers


async def test_the_first_answer_that_fails_ends_the_others_of_its_request(cluster: InProcess) -> None:
    for engine in cluster.engines.values():
        engine.go.clear()
    answers = await ask_parts(cluster, RequestContext("r"), 4)
    other = await cluster.ask(prompt(8), max_tokens=5)
    for answer in (*answers, other):
        await cluster.placed(answer)
    cluster.core._open[answers[2].request_id].fail(RequestFault("refused"))
    for answer in answers:
        assert_failed(await answer.over(), RequestFault)
    for engine in cluster.engines.values():
        engine.go.set()
    assert (await other.over()).reason is LENGTH
    await cluster.settle()
    assert answers[0].context.parts == {}


async def test_a_request_with_more_answers_than_it_may_have_gets_none(cluster: InProcess) -> None:
    """They are counted below vLLM's server as well, whatever its routes make of a body."""
    for engine in cluster.engines.values():
        engine.go.clear()
    answers = await ask_parts(cluster, RequestContext("r", most_parts=3), 4)
    for answer in answers:
        assert_failed(await answer.over(), TooManyParts)
    late = await ask_parts(cluster, answers[0].context, 1)
    assert_failed(await late[0].over(), TooManyParts)
    for engine in cluster.engines.values():
        engine.go.set()
    await cluster.settle()
    assert (await asyncio.gather(*(answer.over() for answer in answers)))[0].tokens == []


def test_equal_requests_have_equal_digests() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from deployments.cluster.engine_request import digest

    def of(request_id: str, tokens: list[int], **sampling: object) -> int:
        params = SamplingParams(**sampling)
        return digest(EngineCoreRequest(request_id, tokens, None, params, None, 0.0, None, None, None))

    assert of("a", [1, 2], max_tokens=3) == of("b", [1, 2], max_tokens=3)
    others = {of("a", [1, 3], max_tokens=3), of("a", [1, 2], max_tokens=4), of("a", [1, 2], logit_bias={5: 1.0})}
    assert len(others | {of("a", [1, 2], max_tokens=3)}) == 4
