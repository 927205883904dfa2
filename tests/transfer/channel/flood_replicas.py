"""The replicas of the flood: their data planes fail, their messages are lost, and they know which blocks are free."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from transfer.control.endpoint import Endpoint
from transfer.control.messages import AnyMessage
from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.plane import PlaneError, WriteState

FREE, BLOCK_BYTES, TOTAL_HEADS = 0xEE, 32, 4
LOST = 0.004


class FaultyPlane(InProcessPlane):
    """Copies some time after the write was posted, when it is asked for the state. Some writes fail, some half done."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name)
        self.random = random.Random(seed)

    def write(self, agent: str, layer: int, local: Any, remote: Any) -> Any:
        if self.random.random() < 0.005:
            raise PlaneError("the test lets this write fail")
        return [self.random.choice((0, 0, 0, 1, 5)), agent, layer, local, remote]

    def check(self, handle: Any) -> WriteState:
        handle[0] -= 1
        if handle[0] >= 0:
            return WriteState.BUSY
        _, agent, layer, local, remote = handle
        if self.random.random() < 0.005:
            half = len(local) // 2
            super().write(agent, layer, local[:half], remote[:half])
            return WriteState.FAILED
        return super().write(agent, layer, local, remote)


def make_lossy(endpoint: Endpoint, seed: int) -> None:
    """Lose some messages, repeat some, and send some after later ones of the same connection.

    What is late when a connection is closed is lost with it, as a socket's queue is.
    """
    send, disconnect, generator = endpoint.send, endpoint.disconnect, random.Random(seed)
    late: list[tuple[Any, AnyMessage]] = []

    def lossy(to: Any, message: AnyMessage) -> None:
        luck = generator.random()
        if luck < LOST:
            return
        if luck < 5 * LOST:
            late.append((to, message))
            return
        send(to, message)
        if luck < 9 * LOST:
            send(to, message)
        if late and generator.random() < 0.3:
            send(*late.pop(0))

    def lose_late(address: str) -> None:
        late[:] = [(to, message) for to, message in late if to != address]
        disconnect(address)

    endpoint.send, endpoint.disconnect = lossy, lose_late  # type: ignore[method-assign]


class Replica:
    """The workers of one replica, and which blocks are free in all of them."""

    def __init__(self, sides: list[Any], generator: random.Random) -> None:
        self.sides, self.random = sides, generator
        self.free = list(range(sides[0].blocks))
        self.is_gone = False
        for side in sides:
            side.memory[:] = FREE
            make_lossy(side.channel._endpoint, generator.getrandbits(32))

    @property
    def addresses(self) -> list[str]:
        return [side.channel.address for side in self.sides]

    def take(self, count: int) -> list[int]:
        self.random.shuffle(self.free)
        taken = [self.free.pop() for _ in range(count)]
        self.assert_marked(taken)
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for side in self.sides:
            side.memory[:, :, blocks] = FREE
        self.free += blocks

    def assert_marked(self, blocks: list[int]) -> None:
        for side in self.sides:
            assert (side.memory[:, :, blocks] == FREE).all(), "a block was written after it had been given back"

    def parts(self, whole: np.ndarray) -> list[np.ndarray]:
        """Of whole blocks, what each worker holds: its heads of its layers."""
        tensor = self.sides[0].layout.partition.tensor
        heads = np.split(whole, tensor, axis=-1)
        return [heads[rank % tensor][list(side.layout.layers)] for rank, side in enumerate(self.sides)]

    def fill(self, blocks: list[int], whole: np.ndarray) -> None:
        for side, part in zip(self.sides, self.parts(whole), strict=True):
            side.memory[:, :, blocks] = part

    def holds(self, blocks: list[int], whole: np.ndarray) -> bool:
        parts = zip(self.sides, self.parts(whole), strict=True)
        return all(np.array_equal(side.memory[:, :, blocks], part) for side, part in parts)

    def close(self) -> None:
        for side in self.sides:
            side.channel.close()
        self.is_gone = True
