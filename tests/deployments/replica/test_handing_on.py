"""What a leaving replica tells of its prompts, and what another one does when it is to bring them."""

from __future__ import annotations

import asyncio

import pytest

from deployments.engine.protocol import RequestRefused
from deployments.errors import Unavailable
from deployments.messages import Bring, CachedPrompt, ReplicaInfo, Role, SessionTask
from deployments.replica.handing_on import KEPT, KEPT_BYTES, TOLD_BLOCKS, Recent
from tests.deployments.replica.doubles import INFO, WAIT_S, Fixture, ScriptedEngine, until

fetching = pytest.mark.parametrize("idle", [{"fetch": True}], indirect=True)
SOURCE = ReplicaInfo("other", "prefill", Role.PREFILL, "node", "f1", 16, 100, 8, 2048, INFO.endpoints)


def bring(bring_id: str = "b1", timeout_s: float = WAIT_S) -> Bring:
    return Bring(bring_id, (b"abc",), 32, SOURCE, timeout_s)


@fetching
async def test_it_hands_on_the_prompts_that_it_was_asked_the_newest_first(up: Fixture) -> None:
    runs = [await up.begin(name) for name in ("a", "bb", "silent")]
    up.engine.put(("a", 1, False), ("bb", 1, False))
    await up.ingress.frames()
    handing = asyncio.create_task(up.replica.hand_on(WAIT_S))
    await until(lambda: up.manager.handed_on)
    (call,) = up.manager.handed_on
    assert (call.replica_id, call.left_s) == ("r0", WAIT_S)
    assert call.prompts == (CachedPrompt((b"bb",), (98, 98)), CachedPrompt((b"a",), (97,)))
    assert not handing.done()
    up.manager.goes_on.set()
    await asyncio.wait_for(handing, WAIT_S)
    up.engine.put(*((name, 1, True) for name in ("a", "bb", "silent")))
    await asyncio.gather(*runs)


async def test_without_fetches_it_asks_for_nothing(up: Fixture) -> None:
    run = await up.begin("a")
    up.engine.put(("a", 1, True))
    await run
    await up.replica.hand_on(WAIT_S)
    assert not up.manager.handed_on


@fetching
async def test_it_ends_with_its_time_and_without_a_manager(up: Fixture, caplog: pytest.LogCaptureFixture) -> None:
    run = await up.begin("a")
    up.engine.put(("a", 1, True))
    await run
    await asyncio.wait_for(up.replica.hand_on(0.0), WAIT_S)
    assert caplog.text.count("not handed on") == 1
    up.manager.outage = Unavailable("it is away")
    await asyncio.wait_for(up.replica.hand_on(WAIT_S), WAIT_S)
    assert caplog.text.count("not handed on") == 2
    up.manager.outage = None


@fetching
async def test_it_brings_one_prompt_after_the_other(up: Fixture) -> None:
    up.manager.bring = (bring("b1"), bring("b2"))
    up.replica._reporter.tell(urgently=True)
    await until(lambda: up.engine.brought)
    assert [each.id for each in up.engine.brought] == ["b1"]
    up.engine.kv["blocks_fetched"] = 2.0
    up.engine.put(("b1", 1, True))
    await until(lambda: len(up.engine.brought) == 2)
    up.engine.put(("b2", 1, True))
    await until(lambda: len(up.manager.brought) == 2)
    assert [(each.replica_id, each.bring_id, each.blocks) for each in up.manager.brought] == [
        ("r0", "b1", 2),
        ("r0", "b2", 0),
    ]


@fetching
async def test_what_is_late_or_refused_is_given_up(up: Fixture) -> None:
    up.manager.bring = (bring("late", timeout_s=0.01),)
    up.replica._reporter.tell(urgently=True)
    await until(lambda: up.manager.brought)
    assert up.engine.aborted == ["late"]
    assert up.manager.brought[0].blocks is None
    up.engine.refusal = RequestRefused("too long")
    up.manager.bring = (bring("refused"),)
    up.replica._reporter.tell(urgently=True)
    await until(lambda: len(up.manager.brought) == 2)
    assert up.manager.brought[1].blocks is None
    up.engine.refusal = None
    assert (await asyncio.wait_for(up.begin("a"), WAIT_S)).done() is False, "it goes on"


async def test_it_remembers_the_newest_requests() -> None:
    recent, engine = Recent(keeps=True), ScriptedEngine()
    for number in range(KEPT + 5):
        recent.note(_task(bytes([number])))
    told = [prompt.hashes for prompt in await recent.prompts(engine)]
    assert told == [(number,) for number in range(KEPT + 4, 4, -1)]
    recent.note(_task(bytes(KEPT_BYTES + 1)))
    assert len(await recent.prompts(engine)) == KEPT, "one that is too long is not kept"
    recent.note(_task(bytes(TOLD_BLOCKS - 1)))
    assert [len(prompt.hashes) for prompt in await recent.prompts(engine)] == [TOLD_BLOCKS - 1, 1]
    recent.note(_task(bytes(KEPT_BYTES)))
    assert [len(prompt.hashes) for prompt in await recent.prompts(engine)] == [TOLD_BLOCKS]


def _task(request: bytes) -> SessionTask:
    return SessionTask("s", 1, "r0", "r", (request,), WAIT_S, 30)
