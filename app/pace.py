"""How fast a client is refused: the first refusals at once, more of them only so many in a second.

A refusal costs the ingress little, but a client that sends nothing else could have it refuse thousands in a second.
The delay is before the answer, so a client that waits for its answers is slowed down, and other requests of the same
client are not.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from app.held_response import Message, Send
from app.turns import Turn

BURST_S = 5.0
"""A client that was not refused for so long has as many seconds of refusals at once."""
LONGEST_S = 10.0
MOST_DELAYED = 256
"""Refusals of one client that wait at a time; further ones come at once. Each holds a place in the ingress."""
BYTES_PER_REFUSAL = 64 * 1024
"""A larger body counts as one more refusal for each of these."""
_MOST_CLIENTS = 1024


class Pace:
    """`per_s`: refusals of one client in a second; 0: any number."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._clock = per_s, clock
        self._used_until_s: dict[str, float] = {}
        self._delayed: Counter[str] = Counter()

    async def delay(self, client: str, body_bytes: int) -> None:
        """Wait as long as a refusal of a request of this client has to."""
        delay_s = self.delay_s(client, body_bytes)
        if delay_s <= 0 or self._delayed[client] >= MOST_DELAYED:
            return
        self._delayed[client] += 1
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._delayed[client] -= 1
            if not self._delayed[client]:
                del self._delayed[client]

    def delay_s(self, client: str, body_bytes: int) -> float:
        """How long an answer that refuses a request of this client waits, in seconds."""
        if not self._per_s:
            return 0.0
        now_s = self._clock()
        used_until_s = max(self._used_until_s.pop(client, 0.0), now_s - BURST_S)
        used_until_s += (1 + body_bytes // BYTES_PER_REFUSAL) / self._per_s
        self._used_until_s[client] = used_until_s = min(used_until_s, now_s + LONGEST_S)
        while len(self._used_until_s) > _MOST_CLIENTS:  # the first of them is the one that was not refused the longest
            del self._used_until_s[next(iter(self._used_until_s))]
        return max(0.0, used_until_s - now_s)


class PacedSend:
    """Sends a response, and delays one that refuses the request. `body_bytes`: of the request, once it is known.

    `turn` is that of a large body. It ends when the response begins. 429 is not delayed: a client that is told of an
    overload may go elsewhere at once.
    """

    def __init__(self, pace: Pace, client: str, send: Send) -> None:
        self._pace, self._client, self._send = pace, client, send
        self.body_bytes = 0
        self.turn: Turn | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if 400 <= message["status"] < 500 and message["status"] != 429:
                await self.delay()
            self.end_turn()
        await self._send(message)

    async def delay(self) -> None:
        """Wait as long as a refusal of this request has to."""
        await self._pace.delay(self._client, self.body_bytes)

    def end_turn(self) -> None:
        """Let the client's next large body come; idempotent."""
        if self.turn is not None:
            self.turn.end()
