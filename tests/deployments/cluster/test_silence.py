"""Replicas that do not die and do not answer either."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from deployments.cluster.timings import Timings
from deployments.engine.protocol import EngineError
from deployments.manager.calls import Report
from deployments.messages import Mode, ReportAnswer
from load_tests.harness.control_plane import PREFILL, config
from tests.deployments.asked import intercept
from tests.deployments.cluster.asking import Launch, prompt


async def test_an_engine_that_hangs_is_given_up_and_its_sessions_move(launch: Launch) -> None:
    cluster = await launch(config(hang_timeout_s=1.0))
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=100)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    engine = cluster.engines[owner]
    engine.is_deaf = True
    engine.go.clear()
    await answer.over()
    assert answer.context.error is None
    with pytest.raises(EngineError, match="has not moved for 1 s"):
        cluster.replicas[owner].check_health()
    engine.is_deaf = False
    engine.go.set()
    assert answer.tokens == await cluster.local(asked, max_tokens=100)
    await cluster.settle(dead=[owner])


async def test_an_engine_that_only_waits_is_not_given_up(launch: Launch) -> None:
    """Its KV is late: it makes no step, but it answers."""
    cluster = await launch(config(hang_timeout_s=0.7))
    cluster.planes[PREFILL].shut = True
    asked = prompt(100)
    answer = await (await cluster.ask(asked, max_tokens=5)).has(1)
    await asyncio.sleep(2.1)
    cluster.planes[PREFILL].shut = False
    await answer.over()
    assert answer.tokens == await cluster.local(asked, max_tokens=5)
    assert answer.context.modes == {Mode.DISAGGREGATED}
    await cluster.settle()


@pytest.mark.slow
async def test_a_replica_that_is_heard_of_no_more_loses_its_sessions(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is stopped, say: it does not die, it does not report, and its calls never end."""
    timings = Timings(quiet_s=0.05, watch_s=0.05, silent_times=30)
    cluster = await launch(config(snapshot_stale_s=1.5), timings=timings)
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=100)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    unheard = functools.partial(_unheard, owner, cluster.manager.ask)
    intercept(monkeypatch, cluster.manager, Report, unheard)
    cluster.engines[owner].go.clear()
    await answer.over()
    assert answer.context.error is None
    cluster.engines[owner].go.set()
    assert answer.tokens == await cluster.local(asked, max_tokens=100)
    await cluster.settle(dead=[owner])


async def _unheard(replica_id: str, report: Any, call: Report) -> ReportAnswer:
    if call.snapshot.replica_id == replica_id:
        return ReportAnswer()
    answer: ReportAnswer = await report(call)
    return answer
