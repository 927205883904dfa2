"""A mock engine's connections to other engines: the KV channel, and the sender of first tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from transfer.channel.channel import Channel
from transfer.control.messages import Seal
from transfer.control.token_sender import TokenSender
from transfer.memory.layout import KVLayout
from transfer.memory.plane import Plane


@dataclass(frozen=True, slots=True)
class Connections:
    """The connections are open from construction until `close`. `receives`: other engines write KV to this one."""

    receives: bool
    channel: Channel
    tokens: TokenSender

    @classmethod
    def open(
        cls, receives: bool, plane: Plane, layout: KVLayout, secret: str, host: str, timeout_s: float
    ) -> Connections:
        """Open both. `timeout_s`: the time from an offer of blocks until their KV must be there."""
        seal = Seal(secret)
        return cls(receives, Channel(plane, layout, seal, host, timeout_s), TokenSender(seal))

    def meet(self, peers: Sequence[tuple[str, ...]]) -> None:
        """Only these replicas exchange KV with this one. Each is the endpoints of its workers by rank."""
        listed = [list(workers) for workers in peers]
        self.channel.keep(listed)
        self.tokens.keep([workers[0] for workers in peers])
        if self.receives:
            self.channel.meet(listed)

    async def close(self) -> None:
        """Close both. The channel's thread has ended when this returns."""
        await asyncio.to_thread(self.channel.close)
        self.tokens.close()
