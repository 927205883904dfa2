"""How the workers of a replica split its KV: by layers into stages, and inside a stage by heads.

Workers are numbered stage after stage, as vLLM numbers the ranks of pipeline and tensor parallelism. An endpoint says
which layers its worker has, unless it has all of them: `tcp://10.0.0.1:4000#layers=0:15`. So the endpoints of a
replica's workers, by rank, tell how the replica splits its KV.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from transfer.memory import heads

_LAYERS = re.compile(r"#layers=(\d{1,9}):(\d{1,9})$")


@dataclass(frozen=True, slots=True)
class Partition:
    """`tensor`: the workers of one stage. `stages`: the number of layers of each stage; empty: one stage has all."""

    tensor: int = 1
    stages: tuple[int, ...] = ()

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.tensor * max(1, len(self.stages))

    def layers(self, rank: int) -> range | None:
        """The layers of worker `rank`. None: all layers."""
        if not self.stages:
            return None
        begin = sum(self.stages[: rank // self.tensor])
        return range(begin, begin + self.stages[rank // self.tensor])


ONE_WORKER = Partition()


def overlap(one: range | None, other: range | None) -> range | None:
    """The layers that both have. None stands for all layers, as an argument and as the result."""
    if one is None or other is None:
        return other if one is None else one
    return range(max(one.start, other.start), min(one.stop, other.stop))


@lru_cache
def sources(rank: int, ours: Partition, peers: Partition, total_heads: int) -> tuple[int, ...]:
    """The ranks of the prefill workers from which decode worker `rank` takes its KV, each head of each layer once."""
    tensor = heads.sources(rank % ours.tensor, ours.tensor, peers.tensor, total_heads)
    return _in_stages(tensor, ours.layers(rank), peers)


@lru_cache
def readers(rank: int, ours: Partition, peers: Partition, total_heads: int) -> tuple[int, ...]:
    """The ranks of the decode workers that take KV from prefill worker `rank`."""
    tensor = heads.readers(rank % ours.tensor, ours.tensor, peers.tensor, total_heads)
    return _in_stages(tensor, ours.layers(rank), peers)


def _in_stages(tensor: list[int], layers: range | None, peers: Partition) -> tuple[int, ...]:
    """The ranks of these workers of a stage, in every stage that has some of the layers."""
    begins = range(0, peers.workers, max(1, peers.tensor))
    shared = ((begin, overlap(layers, peers.layers(begin))) for begin in begins)
    return tuple(begin + rank for begin, both in shared if both is None or both for rank in tensor)


def endpoint_of(address: str, layers: range, total_layers: int) -> str:
    """The endpoint of a worker that has these of its model's layers, at the address of its control connection."""
    return address if len(layers) == total_layers else f"{address}#layers={layers.start}:{layers.stop}"


def address_of(endpoint: str) -> str:
    """The address to connect to."""
    return endpoint.partition("#")[0]


def partition_of(endpoints: Sequence[str]) -> Partition:
    """How a replica splits its KV, from its workers' endpoints by rank.

    Endpoints that fit no partition are taken for one stage: the workers behind them refuse what is then asked of them.
    """
    found = [_LAYERS.search(endpoint) for endpoint in endpoints]
    layers = [(int(match[1]), int(match[2])) for match in found if match]
    stages = list(dict.fromkeys(layers))
    tensor = len(endpoints) // max(1, len(stages))
    is_whole = bool(stages) and len(layers) == len(endpoints) and stages[0][0] == 0
    is_in_order = layers == [stage for stage in stages for _ in range(tensor)]
    is_joined = all(begin < end for begin, end in stages) and all(one[1] == next_[0] for one, next_ in pairwise(stages))
    if not (is_whole and is_in_order and is_joined):
        return Partition(len(endpoints))
    return Partition(tensor, tuple(end - begin for begin, end in stages))
