"""A replica that an operator drains: its answers go on elsewhere, and nothing new goes there until it is put back."""

from __future__ import annotations

from typing import Any

from deployments.manager.calls import Drain, Status
from deployments.messages import Mode, Phase
from load_tests.harness.control_plane import LARGE, PREFILL, SMALL, InProcess, config, until
from tests.deployments.cluster.asking import LENGTH, Launch, prompt

LONG = 400


async def phase_of(cluster: InProcess, replica_id: str) -> str:
    pools = (await cluster.manager.ask(Status()))["pools"]
    found = (pool["replicas"].get(replica_id, {}).get("phase", "") for pool in pools.values())
    return next(filter(None, found), "not known yet")


async def is_in(cluster: InProcess, replica_id: str, phase: Phase) -> bool:
    return await phase_of(cluster, replica_id) == phase.value


async def drained(cluster: InProcess, replica_id: str, resume: bool = False) -> dict[str, Any]:
    found = await cluster.manager.ask(Drain(replica_id, resume))
    wanted = Phase.READY if resume else Phase.DRAINING
    await until(lambda: is_in(cluster, replica_id, wanted))
    return found


async def test_an_answer_moves_off_a_drained_replica_and_is_the_same(cluster: InProcess) -> None:
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=LONG)).has(5)
    source = str((await cluster.placed(answer))["decode"])
    cluster.engines[source].go.clear()  # it must not end there
    assert await drained(cluster, source) == {"replica": source, "draining": True, "sessions": 1}

    async def has_moved() -> bool:
        placed = (await cluster.placements()).get(answer.request_id)
        return placed is not None and placed["decode"] != source

    await until(has_moved)
    cluster.engines[source].go.set()  # it hands its KV over
    await answer.over()
    assert answer.context.error is None
    assert answer.tokens == await cluster.local(asked, max_tokens=LONG)
    await drained(cluster, source, resume=True)
    await cluster.settle()
    closed = (await cluster.manager.ask(Status()))["sessions"]["closed"]
    assert closed == {"moved": 1, "length": 2}
    assert not cluster.manager._allocator.breakers, "none of it is a failure"


async def test_nothing_goes_to_a_drained_replica_until_it_is_put_back(cluster: InProcess) -> None:
    await drained(cluster, LARGE)

    async def owners() -> set[str]:
        found = set()
        for _ in range(6):
            answer = await cluster.ask(prompt(9), max_tokens=50)
            found.add((await cluster.placed(answer))["decode"])
        await cluster.closed()
        return found

    assert await owners() == {SMALL}
    assert await drained(cluster, LARGE, resume=True) == {"replica": LARGE, "draining": False, "sessions": 0}
    assert LARGE in await owners()
    await cluster.settle()


async def test_a_drain_outlives_the_session_manager(cluster: InProcess) -> None:
    await drained(cluster, LARGE)
    cluster.lose_manager()
    cluster.restart_manager()
    await until(lambda: is_in(cluster, LARGE, Phase.DRAINING))
    answer = await cluster.answer(prompt(9), max_tokens=5)
    assert answer.reason is LENGTH
    assert (await drained(cluster, LARGE))["draining"], "asked again, the new manager moves what is there"
    await drained(cluster, LARGE, resume=True)
    await cluster.settle()


async def test_the_last_of_its_kind_and_a_replica_that_is_not_there_are_refused(launch: Launch) -> None:
    strict = config()
    assert strict.prefill is not None
    strict = strict.model_copy(update={"prefill": strict.prefill.model_copy(update={"strict": True})})
    cluster = await launch(strict, [PREFILL, SMALL])
    last = await cluster.manager.ask(Drain(SMALL))
    assert (last["known"], last["refused"]) == (True, "no other replica is ready that writes answers")
    none = await cluster.manager.ask(Drain("nothing"))
    assert (none["known"], none["refused"]) == (False, "no such replica is up")
    answer = await cluster.answer(prompt(9), max_tokens=5)
    assert answer.context.modes == {Mode.DISAGGREGATED}
    await cluster.settle()
