"""Requests take turns: clients one after the other, and each client's requests in their order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from app import turns
from app.turns import BUSY, Turn, Turns
from deployments.errors import Overloaded


class Line:
    """Requests that want a turn. `order`: those that got one, by name."""

    def __init__(self, most_waiting: int = 8, at_once: int = 1) -> None:
        self.turns, self.order = Turns(most_waiting, at_once), list[str]()
        self.tasks: dict[str, asyncio.Task[Turn]] = {}

    async def come(self, *names: str) -> None:
        """Requests come in this order. The first letter of a name is its client."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._take(name))
            await asyncio.sleep(0)

    async def _take(self, name: str) -> Turn:
        turn = await self.turns.take(name[0])
        self.order.append(name)
        return turn

    async def end(self, name: str) -> None:
        (await self.tasks[name]).end()
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def line() -> AsyncIterator[Line]:
    line = Line()
    yield line
    for name in list(line.order):
        await line.end(name)
    assert line.turns.is_idle


async def test_clients_come_in_turn_and_their_requests_in_order(line: Line) -> None:
    await line.come("a1", "a2", "a3", "b1", "c1", "b2")
    for _ in range(6):
        await line.end(line.order[-1])
    assert line.order == ["a1", "a2", "b1", "c1", "a3", "b2"]


async def test_several_at_once() -> None:
    line = Line(at_once=2)
    await line.come("a1", "a2", "a3", "b1")
    assert line.order == ["a1", "a2"]
    await line.end("a2")
    assert line.order == ["a1", "a2", "a3"]
    for name in ("a1", "a3", "b1"):
        await line.end(name)
    assert line.turns.is_idle


async def test_a_turn_ends_once(line: Line) -> None:
    await line.come("a1", "a2", "a3")
    await line.end("a1")
    await line.end("a1")
    assert line.order == ["a1", "a2"]
    await line.end("a2")


async def test_a_client_with_too_many_waiting_is_refused_and_others_are_not() -> None:
    line = Line(most_waiting=1)
    await line.come("a1", "a2", "a3", "b1")
    with pytest.raises(Overloaded, match="1 requests of this client wait") as refused:
        await line.tasks["a3"]
    assert refused.value.code == BUSY
    for name in ("a1", "a2", "b1"):
        await line.end(name)
    assert line.order == ["a1", "a2", "b1"]
    assert line.turns.is_idle


async def test_a_request_that_leaves_makes_room(line: Line) -> None:
    await line.come("a1", "a2", "b1")
    line.tasks["a2"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await line.tasks["a2"]
    await line.end("a1")
    assert line.order == ["a1", "b1"]


async def test_a_turn_that_comes_to_a_request_that_leaves_goes_on(line: Line) -> None:
    await line.come("a1", "a2", "b1")
    (await line.tasks["a1"]).end()
    line.tasks["a2"].cancel()  # its turn has come, and it has not run yet
    with pytest.raises(asyncio.CancelledError):
        await line.tasks["a2"]
    await asyncio.sleep(0)
    assert line.order == ["a1", "b1"]


async def test_a_wait_ends(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LONGEST_WAIT_S", 0.01)
    await line.come("a1", "b1")
    with pytest.raises(Overloaded, match="not checked within"):
        await line.tasks["b1"]
    monkeypatch.undo()
    await line.come("c1")
    await line.end("a1")
    assert line.order == ["a1", "c1"]
