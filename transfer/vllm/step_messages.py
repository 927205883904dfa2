"""What the connector's two sides tell each other, once per engine step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from transfer.channel.layers import Chunk
from transfer.channel.outbox import Key
from transfer.memory.partition import Partition


@dataclass(slots=True)
class Offering:
    """Decode blocks to offer to the prefill workers at `peers`."""

    key: Key
    request_id: str
    peers: list[str]
    first_block: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Fetching:
    """Blocks to fetch from the workers at `peers`: the KV of `hashes[i]` into `blocks[i]`."""

    key: Key
    request_id: str
    peers: list[str]
    blocks: list[int]
    hashes: list[bytes]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Loading:
    """Blocks to load from this replica's tiers: the KV of `hashes[i]` into `blocks[i]`."""

    request_id: str
    blocks: list[int]
    hashes: list[bytes]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """From the scheduler side to the workers.

    `ended`: key, request id (None: vLLM does not wait for its blocks), whether the whole prompt was computed, and how
    decode's workers split its KV. `cancels`: key and reason, of handoffs to this replica and of its fetches.
    `unoffered`: requests that ended before their blocks were offered: key and prefill's workers. `library`: where a
    worker in another process asks what it may lend, and the secret; in the first step alone. `kept`: the
    prompts whose blocks such a worker stores in its tiers, by their names.
    """

    chunks: list[Chunk] = field(default_factory=list)
    ended: list[tuple[Key, str | None, bool, Partition]] = field(default_factory=list)
    offers: list[Offering] = field(default_factory=list)
    cancels: list[tuple[Key, str]] = field(default_factory=list)
    unoffered: list[tuple[Key, list[str]]] = field(default_factory=list)
    preempted: list[Key] = field(default_factory=list)
    fetches: list[Fetching] = field(default_factory=list)
    loads: list[Loading] = field(default_factory=list)
    library: tuple[str, bytes] | None = None
    kept: list[list[bytes]] = field(default_factory=list)

    def __bool__(self) -> bool:
        handoffs = self.chunks or self.ended or self.offers or self.cancels or self.unoffered or self.preempted
        return bool(handoffs or self.fetches or self.loads or self.kept)


@dataclass(slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """From a worker back to the scheduler side: first tokens by request id, and which decode replicas there are.

    `decodes`: the endpoints of their first workers; None: no news. `fetched`: blocks that fetches and loads have
    brought, by request id. `late`, `stopped`: how many workers no longer wait for a fetch, and for how many of those it
    has stopped meanwhile, by request id.
    """

    tokens: dict[str, int]
    decodes: tuple[str, ...] | None = None
    fetched: dict[str, int] = field(default_factory=dict)
    late: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.fetched or self.late or self.stopped or self.decodes is not None)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        fetched = self.fetched | other.fetched
        for request_id in self.fetched.keys() & other.fetched.keys():
            fetched[request_id] = min(self.fetched[request_id], other.fetched[request_id])
        decodes = self.decodes if other.decodes is None else other.decodes
        late, stopped = self.late + other.late, self.stopped + other.stopped
        return WorkerMetadata(self.tokens | other.tokens, decodes, fetched, late, stopped)
