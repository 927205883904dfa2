"""A prompt that is pinned: every replica that computes prompts holds its blocks, until it is unpinned."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.errors import PrefixRefused, RequestFault
from deployments.manager.calls import Open, Prefixes, Status
from load_tests.harness.control_plane import LARGE, PREFILL, SMALL, InProcess, config, until
from tests.deployments.asked import intercept
from tests.deployments.cluster.asking import STOP, Launch, assert_failed, prompt

ALL = [LARGE, SMALL, PREFILL]
BLOCK = 4


async def pinned(cluster: InProcess, tokens: list[int], **more: Any) -> dict[str, Any]:
    answer = await cluster.answer(tokens, max_tokens=7, pins=True, **more)
    assert (answer.reason, answer.tokens, answer.context.error) == (STOP, [], None)
    assert answer.context.explanation is not None
    return answer.context.explanation


async def stands(cluster: InProcess, prefix: str, replicas: list[str] = ALL) -> None:
    """Wait until a prefix stands on these replicas, and on no other."""

    async def look() -> bool:
        listed = (await cluster.manager.ask(Prefixes()))["prefixes"]
        return [each["replicas"] for each in listed if each["id"] == prefix] == [sorted(replicas)]

    await until(look)


async def held(cluster: InProcess) -> dict[str, int]:
    status = await cluster.manager.ask(Status())
    return {name: each["pinned_blocks"] for name, each in status["replicas"].items()}


async def test_it_stands_on_every_replica_and_is_freed_when_it_is_unpinned(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Open] = []

    async def note(call: Open) -> None:
        opened.append(call)

    intercept(monkeypatch, cluster.manager, Open, note)
    shown = await pinned(cluster, prompt(22))
    assert (shown["tokens"], shown["blocks"]) == (22, 5)
    await stands(cluster, shown["id"])
    assert set((await held(cluster)).values()) == {5}
    assert [cluster.engines[each].used_blocks for each in ALL] == [5, 5, 5]
    status = await cluster.manager.ask(Status())
    assert (opened, status["promises"], status["modes"]) == ([], [], {})
    left = await cluster.manager.ask(Prefixes(unpin=shown["id"]))
    assert left == {"prefixes": []}
    await cluster.settle()  # every block counts as free again, in engines and at the manager


async def test_requests_beside_it_are_answered_alike_and_leave_it_alone(cluster: InProcess) -> None:
    tokens = prompt(22)
    before = await cluster.answer([*tokens, 5], max_tokens=9)
    shown = await pinned(cluster, tokens)
    await stands(cluster, shown["id"])
    after = await cluster.answer([*tokens, 5], max_tokens=9)
    assert after.tokens == before.tokens
    await until(lambda: _only(cluster, 5))
    assert shown["id"] == (await pinned(cluster, tokens))["id"], "twice is once"
    await cluster.manager.ask(Prefixes(unpin=shown["id"]))
    await cluster.settle()


async def _only(cluster: InProcess, blocks: int) -> bool:
    return [cluster.engines[each].used_blocks for each in ALL] == [blocks] * 3


async def test_a_replica_that_starts_again_has_it_again(launch: Launch) -> None:
    cluster: InProcess = await launch(config())
    shown = await pinned(cluster, prompt(12))
    await stands(cluster, shown["id"])
    await cluster.kill(SMALL)
    await cluster.bury(SMALL)
    await cluster.start(SMALL)
    await stands(cluster, shown["id"])
    assert cluster.engines[SMALL].used_blocks == 3
    await cluster.manager.ask(Prefixes(unpin=shown["id"]))
    await cluster.settle()


async def test_it_outlives_the_session_manager(launch: Launch) -> None:
    cluster: InProcess = await launch(config())
    first, second = await pinned(cluster, prompt(12)), await pinned(cluster, prompt(16))
    await stands(cluster, second["id"])
    cluster.lose_manager()
    cluster.restart_manager()
    await stands(cluster, first["id"])
    await stands(cluster, second["id"])
    left = await cluster.manager.ask(Prefixes(unpin=first["id"]))
    assert [each["id"] for each in left["prefixes"]] == [second["id"]]
    await until(lambda: _only(cluster, 4))
    await cluster.manager.ask(Prefixes(unpin=second["id"]))
    await cluster.settle()


async def test_what_is_too_large_too_short_or_no_text_is_refused(cluster: InProcess) -> None:
    large = await cluster.answer(prompt(16 * BLOCK), max_tokens=7, pins=True)
    assert_failed(large, PrefixRefused)
    assert "would take 16 blocks, and a replica of decode-small has 15" in str(large.context.error)
    assert_failed(await cluster.answer(prompt(BLOCK - 1), max_tokens=7, pins=True), RequestFault)
    assert (await cluster.manager.ask(Prefixes()))["prefixes"] == []
    await cluster.settle()


async def test_a_full_replica_pins_when_a_session_has_ended_and_promises_nothing_meanwhile(launch: Launch) -> None:
    """The session takes the whole of its replica but for a few blocks."""
    cluster: InProcess = await launch(config(), (PREFILL, SMALL))
    cluster.engines[SMALL].go.clear()
    running = await cluster.ask(prompt(8), max_tokens=500)
    await cluster.placed(running)
    shown = await pinned(cluster, prompt(15 * BLOCK))
    await stands(cluster, shown["id"], [PREFILL])
    waiting = await cluster.ask(prompt(8), max_tokens=20)
    cluster.engines[SMALL].go.set()
    await running.over()
    await waiting.over()
    await stands(cluster, shown["id"], [PREFILL, SMALL])
    await cluster.manager.ask(Prefixes(unpin=shown["id"]))
    await cluster.settle()
