"""A client that goes away at any moment frees everything, on both sides, within seconds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.e2e.client import body, client_of, events, until
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FREED_WITHIN_S = 60.0


@contextlib.asynccontextmanager
async def streaming(cluster: Cluster, asked: list[int], max_tokens: int) -> AsyncIterator[asyncio.Task[None]]:
    """A stream in the background, told by `task.chunks` how far it is; the client goes away at the end."""
    task = asyncio.create_task(_read(cluster, asked, max_tokens))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _read(cluster: Cluster, asked: list[int], max_tokens: int) -> None:
    async with (
        client_of(cluster) as client,
        client.stream("POST", "/v1/completions", json=body(asked, max_tokens, stream=True)) as response,
    ):
        async for _ in events(response):
            CHUNKS[id(asyncio.current_task())] = CHUNKS.get(id(asyncio.current_task()), 0) + 1


CHUNKS: dict[int, int] = {}


def chunks(task: asyncio.Task[None]) -> int:
    return CHUNKS.get(id(task), 0)


async def freed(cluster: Cluster, before: dict[str, Any]) -> None:
    """Wait until nothing is in use any more. `before`: the status then. No answer has come to its end since."""

    def free() -> bool:
        status = cluster.status()
        replicas = status["replicas"].values()
        idle = all(not replica["used_blocks"] and not replica["sessions"] for replica in replicas)
        return idle and not status["sessions"]["open"] and not status["sessions"]["queued"]

    await until(free, FREED_WITHIN_S, "blocks and sessions are free again")
    assert ended(cluster.status()) == ended(before)


def ended(status: dict[str, Any]) -> int:
    """Sessions whose answer came to its end."""
    return sum(status["sessions"]["closed"].get(outcome, 0) for outcome in ("length", "stop"))


async def open_handoffs(cluster: Cluster) -> float:
    status = await asyncio.to_thread(cluster.settled)
    counters = [replica["counters"] for replica in status["replicas"].values()]
    return float(sum(c["open_receiving"] + c["open_writing"] for c in counters))


async def test_while_prefill_computes(baton: Cluster) -> None:
    before = await asyncio.to_thread(baton.settled)
    async with streaming(baton, prompt(61, 1800), 50) as task:
        await until(lambda: baton.used_blocks() > 0, 30, "the prefill has begun")
        assert not chunks(task)
    await freed(baton, before)
    assert await open_handoffs(baton) == 0


async def test_at_the_handoff(baton: Cluster) -> None:
    before = await asyncio.to_thread(baton.settled)
    async with streaming(baton, prompt(62, 700), 200) as task:
        await until(lambda: chunks(task) >= 1, 60, "the first token")
    await freed(baton, before)
    assert await open_handoffs(baton) == 0


async def test_while_decode_answers(baton: Cluster) -> None:
    before = await asyncio.to_thread(baton.settled)
    async with streaming(baton, prompt(63, 300), 1000) as task:
        await until(lambda: chunks(task) >= 6, 60, "six tokens")
    await freed(baton, before)
    assert await open_handoffs(baton) == 0


async def test_while_queueing(baton: Cluster) -> None:
    """Long answers reserve all of `large`; the next long one queues, leaves, and has cost nothing."""
    before = await asyncio.to_thread(baton.settled)
    async with contextlib.AsyncExitStack() as stack:
        holders = [await stack.enter_async_context(streaming(baton, prompt(70 + i, 8), 2000)) for i in range(8)]
        await until(lambda: baton.status()["sessions"]["open"] == 8, 30, "eight sessions are open")
        async with streaming(baton, prompt(80, 8), 2000) as late:
            await until(lambda: baton.status()["sessions"]["queued"] == 1, 30, "the ninth is queued")
            assert not chunks(late)
        await until(lambda: baton.status()["sessions"]["queued"] == 0, FREED_WITHIN_S, "it has left the queue")
        assert not any(holder.done() for holder in holders)
    await freed(baton, before)
