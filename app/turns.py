"""Which request is next where little is done at a time: clients in turn, and the requests of each in their order."""

from __future__ import annotations

import asyncio
from collections import deque

from deployments.errors import Overloaded

LONGEST_WAIT_S = 60.0
BUSY = "ingress_busy"


class Turn:
    """The right to go on. Others wait until `end`."""

    def __init__(self, turns: Turns) -> None:
        self._turns: Turns | None = turns

    def end(self) -> None:
        """Let the next one go on; idempotent."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.pass_on()


class Turns:
    """`most_waiting`: the most requests of one client that may wait. `at_once`: turns that are out at a time."""

    def __init__(self, most_waiting: int, at_once: int = 1) -> None:
        self._most_waiting, self._at_once = most_waiting, at_once
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._taken = 0

    @property
    def is_idle(self) -> bool:
        return not self._taken

    async def take(self, client: str) -> Turn:
        """Wait for a turn. Raises Overloaded when too many of this client wait already, or when it takes too long."""
        if self._taken < self._at_once:
            self._taken += 1
        else:
            await self._wait(client)
        return Turn(self)

    async def _wait(self, client: str) -> None:
        mine = self._waiting.setdefault(client, deque())
        if len(mine) >= self._most_waiting:
            raise Overloaded(f"{len(mine)} requests of this client wait already to be checked", 1.0, BUSY)
        place = asyncio.get_running_loop().create_future()
        mine.append(place)
        came = False
        try:
            async with asyncio.timeout(LONGEST_WAIT_S):
                await place
            came = True
        except TimeoutError:
            raise Overloaded(f"the request was not checked within {LONGEST_WAIT_S:g} s", 1.0, BUSY) from None
        finally:
            if not came:
                self._give_up(client, place)

    def _give_up(self, client: str, place: asyncio.Future[None]) -> None:
        if place.done() and not place.cancelled():  # the turn came, but too late
            self.pass_on()
        elif place in (mine := self._waiting.get(client, deque())):
            mine.remove(place)
            if not mine:
                del self._waiting[client]

    def pass_on(self) -> None:
        """Give the turn to the next client's first request. The client's others come after those of other clients."""
        self._taken -= 1
        while self._waiting:
            client = next(iter(self._waiting))
            mine = self._waiting.pop(client)
            place = mine.popleft()
            if mine:
                self._waiting[client] = mine
            if not place.done():
                self._taken += 1
                place.set_result(None)
                return
