"""The peers that the manager names, and the engine that is introduced to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from deployments.engine.protocol import EngineError
from deployments.messages import Peers
from deployments.replica.peers import Introductions
from deployments.replica.timings import Timings
from tests.deployments.replica.doubles import WAIT_S, Fixture, ScriptedEngine, until


@pytest.mark.parametrize("idle", [{"timings": Timings(heartbeat_s=0.01)}], indirect=True)
async def test_its_engine_meets_the_peers_that_the_manager_names_once(idle: Fixture) -> None:
    idle.engine.is_busy = True  # at first
    idle.manager.peers = Peers(7, (("tcp://one",), ("tcp://two",)))
    await idle.replica.start()
    await idle.manager.until(lambda snapshot: snapshot.peers_version == 7)
    await until(lambda: bool(idle.engine.met))
    count = len(idle.manager.snapshots)
    await idle.manager.until(lambda snapshot: len(idle.manager.snapshots) > count + 2)
    assert idle.engine.met == [idle.manager.peers.endpoints]
    idle.manager.peers = Peers(8, ())
    await until(lambda: idle.engine.met[-1] == ())


# ---- the introductions alone

FIRST, SECOND = Peers(3, (("tcp://one",),)), Peers(4, (("tcp://two",),))


@pytest.fixture
async def alone() -> AsyncIterator[tuple[ScriptedEngine, Introductions]]:
    """An engine and its introductions, whose loop runs."""
    engine = ScriptedEngine()
    introductions = Introductions(engine, Timings(heartbeat_s=0.001))
    loop = asyncio.create_task(introductions.meet_loop())
    yield engine, introductions
    loop.cancel()
    await asyncio.wait([loop])


async def test_of_several_lists_the_engine_meets_the_newest(alone: tuple[ScriptedEngine, Introductions]) -> None:
    engine, introductions = alone
    assert introductions.version == 0
    for peers in (FIRST, SECOND):
        introductions.learn(peers)
        assert introductions.version == peers.version
    await until(lambda: engine.met)
    introductions.learn(FIRST)
    await until(lambda: len(engine.met) > 1)
    assert engine.met == [SECOND.endpoints, FIRST.endpoints]


async def test_an_engine_that_was_busy_meets_the_peers_of_that_moment(
    alone: tuple[ScriptedEngine, Introductions], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, introductions = alone
    asked = list[Sequence[tuple[str, ...]]]()

    async def meet(peers: Sequence[tuple[str, ...]]) -> None:
        asked.append(peers)
        if len(asked) == 1:
            introductions.learn(SECOND)
        if len(asked) < 4:
            raise TimeoutError

    monkeypatch.setattr(engine, "meet", meet)
    introductions.learn(FIRST)
    await until(lambda: len(asked) > 3)
    assert asked == [FIRST.endpoints, *[SECOND.endpoints] * 3]


async def test_an_engine_that_fails_to_meet_its_peers_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    introductions = Introductions(engine, Timings())

    async def meet(peers: Sequence[tuple[str, ...]]) -> None:
        raise EngineError("out of memory")

    monkeypatch.setattr(engine, "meet", meet)
    introductions.learn(FIRST)
    with pytest.raises(EngineError, match="out of memory"):
        await asyncio.wait_for(introductions.meet_loop(), WAIT_S)
