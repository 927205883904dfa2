"""A leaving replica's prompts go to others, and the books are as before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from deployments.engine.protocol import RequestRefused
from deployments.manager.calls import HandOn, Status
from deployments.messages import Bring
from load_tests.harness.control_plane import LARGE, PREFILL, SMALL, WAIT_S, InProcess, config, until

Launch = Callable[..., Any]
PROMPT = list(range(100, 140))


@pytest.fixture
async def fetching(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """A cluster whose replicas fetch, and which has answered three prompts. Two of them begin alike.

    The session manager expects a prompt's blocks on decode, too. Here it does not know of them.
    """
    made: InProcess = await launch(config(fetch=True))
    monkeypatch.setattr(made.manager._allocator.predictors.index, "hits", lambda hashes: {})
    for prompt in (PROMPT, [*PROMPT[:20], *range(30)], [7] * 3):
        await made.answer(prompt, max_tokens=3)
    await made.settle()
    return made


def brought(cluster: InProcess, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Bring]]:
    """What each engine is asked to bring, from now on."""
    asked: dict[str, list[Bring]] = {replica_id: [] for replica_id in cluster.engines}
    for replica_id, engine in cluster.engines.items():
        bring = engine.bring

        async def noted(each: Bring, replica_id: str = replica_id, bring: Any = bring) -> None:
            asked[replica_id].append(each)
            await bring(each)

        monkeypatch.setattr(engine, "bring", noted)
    return asked


async def promises(cluster: InProcess) -> list[Any]:
    return list((await cluster.manager.ask(Status()))["promises"])


async def test_the_hottest_beginnings_of_its_prompts_go_to_other_replicas(
    fetching: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, leaving = brought(fetching, monkeypatch), fetching.replicas[PREFILL]
    leaving.begin_drain()
    await asyncio.wait_for(leaving.hand_on(WAIT_S), WAIT_S)
    assert not asked[PREFILL]
    brings = asked[LARGE]
    assert [each.tokens for each in brings] == [20, 48, 40], "what they share goes first, then the newest"
    assert {each.source.replica_id for each in brings} == {PREFILL}
    assert not asked[SMALL], "all goes to where the beginning is"
    assert fetching.manager._draining.counts == {"came": 3, "failed": 0, "blocks": 0}, "mocks fetch nothing"
    assert not await promises(fetching)
    assert (await fetching.answer(PROMPT, max_tokens=3)).tokens
    await fetching.settle(dead=[PREFILL])


async def test_what_does_not_come_in_time_is_given_up(fetching: InProcess) -> None:
    for replica_id in (SMALL, LARGE):
        fetching.engines[replica_id].go.clear()
    handing = asyncio.create_task(fetching.replicas[PREFILL].hand_on(0.5))
    await until(lambda: promises(fetching))
    await asyncio.wait_for(handing, WAIT_S)
    assert fetching.manager._draining.counts == {"came": 0, "failed": 3, "blocks": 0}
    assert not await promises(fetching)
    for replica_id in (SMALL, LARGE):
        fetching.engines[replica_id].go.set()
    await fetching.settle()


async def test_a_replica_that_refuses_or_dies_holds_nothing_up(
    fetching: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(bring: Bring) -> None:
        raise RequestRefused("too long")

    monkeypatch.setattr(fetching.engines[LARGE], "bring", refuse)
    await asyncio.wait_for(fetching.replicas[PREFILL].hand_on(WAIT_S), WAIT_S)
    assert fetching.manager._draining.counts["failed"] == 3
    await fetching.kill(LARGE)
    await fetching.replicas[PREFILL].hand_on(1.0)
    assert not await promises(fetching)


async def test_one_that_the_manager_does_not_know_hands_on_nothing(fetching: InProcess) -> None:
    assert await fetching.manager.ask(HandOn("unknown", (), WAIT_S)) == 0


async def test_a_cancelled_call_leaves_nothing(fetching: InProcess) -> None:
    for replica_id in (SMALL, LARGE):
        fetching.engines[replica_id].go.clear()
    handing = asyncio.create_task(fetching.replicas[PREFILL].hand_on(WAIT_S))
    await until(lambda: promises(fetching))
    handing.cancel()
    await asyncio.wait([handing])

    async def none() -> bool:
        return not await promises(fetching)

    await until(none)
    for replica_id in (SMALL, LARGE):
        fetching.engines[replica_id].go.set()
    await fetching.settle()
