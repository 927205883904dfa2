"""One side of a NIXL channel in its own process, driven by test_nixl_channel.py over its standard streams.

Commands are JSON lines; each is answered with one. `NAME` and `TIMEOUT` are the arguments.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transfer.channel.channel import Channel, ChannelError
from transfer.channel.layers import Chunk
from transfer.control.messages import Seal
from transfer.memory.layout import KVLayout
from transfer.memory.nixl_plane import NixlPlane
from transfer.memory.plane import PlaneError

LAYERS, REGIONS, BLOCKS, BLOCK_SIZE, BLOCK_BYTES = 3, 2, 256, 4, 4096
FREE = 0xEE


class Worker:
    """Memory and a channel."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.memory = np.zeros((LAYERS, REGIONS, BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        base, region = int(self.memory.ctypes.data), BLOCKS * BLOCK_BYTES
        bases = tuple(base + index * region for index in range(LAYERS * REGIONS))
        layout = KVLayout(LAYERS, REGIONS, BLOCKS, BLOCK_SIZE, BLOCK_BYTES, bases, facts={"model": "m"})
        self.plane: Any = NixlPlane(name)
        self.channel = Channel(self.plane, layout, Seal("secret"), "127.0.0.1", timeout_s)

    def fill(self, blocks: list[int], seed: int) -> None:
        shape = (LAYERS, REGIONS, len(blocks), BLOCK_BYTES)
        self.memory[:, :, blocks] = np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8)

    def digest(self, blocks: list[int]) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.memory[:, :, blocks]).tobytes()).hexdigest()

    def touched(self) -> list[int]:
        return [block for block in range(BLOCKS) if self.memory[:, :, block].any()]

    def mark(self, blocks: list[int]) -> None:
        self.memory[:, :, blocks] = FREE

    def is_marked(self, blocks: list[int]) -> bool:
        return bool((self.memory[:, :, blocks] == FREE).all())

    def fail_writes(self, share: float, seed: int) -> None:
        """From now on this share of all writes cannot be posted."""
        plane, generator = self.plane, random.Random(seed)
        write = plane.write

        def sometimes(*arguments: Any) -> Any:
            if generator.random() < share:
                raise PlaneError("the test lets this write fail")
            return write(*arguments)

        plane.write = sometimes

    def preempt(self, session: str) -> bool:
        return self.channel.wait_quiet([(session, 1)], 30)

    def meet(self, peers: list[list[str]]) -> None:
        self.channel.meet(peers)

    def keep(self, peers: list[list[str]]) -> None:
        self.channel.keep(peers)

    def resources(self) -> dict[str, int]:
        """What peers could leave behind."""
        return {
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": threading.active_count(),
            "agents": len(self.channel._prefill.peers.agents),
            "prepared": len(self.plane._remote),
            "connections": len(self.channel._endpoint.peers),
        }

    def offer(self, session: str, peer: str, blocks: list[int], first_block: int = 0) -> None:
        self.channel.offer((session, 1), session, [peer], first_block, blocks, needs_token=False)

    def cancel(self, session: str) -> None:
        self.channel.cancel((session, 1), "aborted")

    def save(self, session: str, computed: int, prompt: int, blocks: list[int]) -> None:
        self.channel.begin_step([Chunk((session, 1), session, computed, prompt, tuple(blocks))])
        for layer in range(LAYERS):
            self.channel.layer_saved(layer)
        self.channel.end_step()

    def ended(self, session: str, ok: bool) -> None:
        self.channel.ended((session, 1), session, ok)

    def results(self) -> dict[str, Any]:
        try:
            results = self.channel.take_results()
        except ChannelError as error:
            return {"dead": repr(error.__cause__)}
        return {"received": results.received, "broken": results.broken, "released": list(results.released)}

    def counters(self) -> dict[str, float]:
        return self.channel.counters()

    def address(self) -> str:
        return self.channel.address


def main() -> None:
    worker = Worker(sys.argv[1], float(sys.argv[2]))
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(worker, name)(*arguments)), flush=True)
    worker.channel.close()
    print(json.dumps("closed"), flush=True)


if __name__ == "__main__":
    main()
