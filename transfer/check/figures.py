"""The figures computed from the measurements of a check. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Pass:
    """A prefill, with or without its writes, or writes alone. Times are seconds of the machine's monotonic clock.

    `ended`: when everything is computed, on the GPU as well. `done`: the completion time and bytes of every write.
    """

    begun: float
    ended: float
    done: tuple[tuple[float, int], ...] = ()

    @property
    def size(self) -> int:
        """Bytes written."""
        return sum(size for _, size in self.done)

    @property
    def write_s(self) -> float:
        """Seconds from the start until the last write is complete."""
        return max(at for at, _ in self.done) - self.begun


def block_digests(layers: Iterable[Sequence[Any]]) -> list[bytes]:
    """One digest per block, over its bytes in all layers. Each layer is the list of its blocks' contiguous buffers."""
    digests: list[Any] = []
    for layer in layers:
        digests = digests or [hashlib.blake2b(digest_size=16) for _ in layer]
        for digest, block in zip(digests, layer, strict=True):
            digest.update(block)
    return [digest.digest() for digest in digests]


def wrong_blocks(
    before: Sequence[bytes], after: Sequence[bytes], sent: Sequence[bytes], source: Sequence[int], target: Sequence[int]
) -> list[int]:
    """Decode blocks with wrong content. `target[i]` must equal `source[i]` as sent. All others must be unchanged."""
    expected = list(before)
    for here, there in zip(source, target, strict=True):
        expected[there] = sent[here]
    return [block for block, (want, have) in enumerate(zip(expected, after, strict=True)) if want != have]


def gb_per_s(size: int, seconds: Iterable[float]) -> float:
    """The median rate of moving `size` bytes, in 10^9 bytes per second."""
    return round(size / median(seconds) / 1e9, 3)


def overlap(passes: Sequence[Pass], received: Sequence[float], without: Sequence[Pass]) -> dict[str, Any]:
    """Medians over rounds. `passes`: with writes. `received`: when decode had their KV. `without`: without writes."""
    shares = [sum(size for at, size in one.done if at <= one.ended) / one.size for one in passes]
    tails_ms = [(at - one.ended) * 1e3 for one, at in zip(passes, received, strict=True)]
    on_ms = median((one.ended - one.begun) * 1e3 for one in passes)
    off_ms = median((one.ended - one.begun) * 1e3 for one in without)
    return {
        "rounds": len(passes),
        "kv_bytes": passes[0].size,
        "overlap_share": round(median(shares), 4),
        "overlap_share_range": [round(min(shares), 4), round(max(shares), 4)],
        "tail_ms": round(median(tails_ms), 3),
        "tail_ms_range": [round(min(tails_ms), 3), round(max(tails_ms), 3)],
        "prefill_ms": round(on_ms, 3),
        "prefill_without_writes_ms": round(off_ms, 3),
        "prefill_slowdown": round(on_ms / off_ms - 1, 4),
    }
