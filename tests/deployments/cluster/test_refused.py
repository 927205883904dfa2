"""Requests that the session manager refuses, or that nothing can serve."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.cluster import engine_request
from deployments.errors import NeverFits, Overloaded, RequestFault, SessionError, Unavailable
from deployments.manager.calls import Open, PrefillDone
from deployments.messages import Mode
from load_tests.harness.control_plane import LARGE, MAX_MODEL_LEN, PREFILL, SMALL, InProcess, config
from tests.deployments.asked import intercept
from tests.deployments.cluster.asking import LENGTH, ONE_SEAT, Launch, assert_failed, prompt
from transfer.control.messages import NAME_CHARS


async def test_what_can_never_fit(cluster: InProcess) -> None:
    answer = await cluster.answer(prompt(MAX_MODEL_LEN // 2), max_tokens=MAX_MODEL_LEN)
    assert_failed(answer, NeverFits)
    assert f"the request needs {MAX_MODEL_LEN * 3 // 2} tokens" in str(answer.context.error)
    assert not answer.tokens
    await cluster.settle()


@pytest.mark.parametrize(("sampling", "reason"), [({"stop": ["\ud83d"]}, "surrogate"), ({"seed": 10**30}, "64 bits")])
async def test_what_cannot_be_sent_to_an_engine(cluster: InProcess, sampling: dict[str, Any], reason: str) -> None:
    answer = await cluster.answer(prompt(8), max_tokens=5, **sampling)
    assert_failed(answer, RequestFault)
    assert reason in str(answer.context.error)
    await cluster.settle()


async def test_a_session_s_name_that_workers_would_drop(cluster: InProcess) -> None:
    """Decode would wait for prefill until its deadline, and then for ever for prefill's answer to a cancellation."""
    longest = await cluster.answer(prompt(8), request_id="i" * NAME_CHARS, max_tokens=5)
    assert longest.reason is LENGTH
    assert longest.context.modes == {Mode.DISAGGREGATED}
    answer = await cluster.answer(prompt(8), request_id="i" * (NAME_CHARS + 1), max_tokens=5)
    assert_failed(answer, RequestFault)
    assert f"{NAME_CHARS + 1} characters" in str(answer.context.error)
    await cluster.settle()


@pytest.mark.parametrize("placement", [{"queue_timeout_s": 0.05}, {"max_queued_requests": 0}])
async def test_no_capacity_in_time(launch: Launch, placement: dict[str, Any]) -> None:
    cluster = await launch(config(ONE_SEAT, **placement))
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.clear()
    answers = []
    for _ in range(2):
        answers.append(await cluster.ask(prompt(8), max_tokens=5))
        await cluster.placed(answers[-1])
    late = await cluster.answer(prompt(8), max_tokens=5)
    assert_failed(late, Overloaded)
    assert isinstance(late.context.error, Overloaded)
    assert late.context.error.retry_after_s > 0
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.set()
    for answer in answers:
        assert (await answer.over()).reason is LENGTH
    await cluster.settle()


@pytest.mark.parametrize("up", [[], [PREFILL]])
async def test_no_replica_is_up(launch: Launch, monkeypatch: pytest.MonkeyPatch, up: list[str]) -> None:
    """Every rule of today allows the prefill replica as the last resort; one that does not has to be made up."""
    if up:
        modes = (Mode.DISAGGREGATED, Mode.DECODE_LOCAL)
        monkeypatch.setattr(engine_request, "split_rule", lambda *_: (modes, "made_up"))
    cluster = await launch(config(queue_timeout_s=0.05), up)
    answer = await cluster.answer(prompt(8), max_tokens=5)
    assert_failed(answer, Unavailable)
    assert answer.context.modes == set()
    await cluster.settle()


@pytest.mark.slow
async def test_a_session_manager_that_cannot_be_reached(cluster: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreachable(*args: Any) -> None:
        raise Unavailable("it is being restarted")

    intercept(monkeypatch, cluster.manager, Open, unreachable)
    assert_failed(await cluster.answer(prompt(8), max_tokens=5), Unavailable)
    monkeypatch.undo()
    intercept(monkeypatch, cluster.manager, PrefillDone, unreachable)
    assert (await cluster.answer(prompt(8), max_tokens=5)).reason is LENGTH
    await cluster.settle()


async def test_an_unforeseen_failure_is_an_error_and_no_silence(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*args: Any) -> None:
        raise ValueError("a mistake of ours")

    intercept(monkeypatch, cluster.manager, Open, broken)
    assert_failed(await cluster.answer(prompt(8), max_tokens=5), SessionError)
    monkeypatch.undo()
    cluster.pools["prefill"].error = ValueError("another")
    assert_failed(await cluster.answer(prompt(8), max_tokens=5), SessionError)
    cluster.pools["prefill"].error = None
    assert (await cluster.answer(prompt(8), max_tokens=5)).reason is LENGTH
    await cluster.settle()
