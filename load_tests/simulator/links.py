"""KV on its way from prefill to decode: sent layer by layer while the chunk is computed, through two shared NICs."""

from __future__ import annotations

from dataclasses import dataclass

from load_tests.simulator.steps import Chunk


@dataclass(slots=True)
class Nic:
    """One direction of a replica's network port. `free_s`: the time when all data given to it so far has passed.

    It is a fluid queue: data that comes while it is busy waits, and no bandwidth is lost.
    """

    bytes_per_s: float
    free_s: float = 0.0

    def passes(self, size: float, ready_s: float) -> float:
        """The time when `size` bytes have passed that are ready to be sent at `ready_s`."""
        self.free_s = max(self.free_s, ready_s) + size / self.bytes_per_s
        return self.free_s


def landed_s(chunk: Chunk, end_s: float, size: float, layers: int, sender: Nic, receiver: Nic) -> float:
    """The time when a chunk's KV of `size` bytes is at decode. `end_s`: the end of the step that computed it.

    The first layer may leave when it is computed. The last layer leaves when all are computed.
    """
    if size <= 0.0:
        return end_s
    first_s = chunk.start_s + (end_s - chunk.start_s) / layers
    tail_s = size / layers / min(sender.bytes_per_s, receiver.bytes_per_s)
    return max(sender.passes(size, first_s), receiver.passes(size, first_s), end_s + tail_s)
