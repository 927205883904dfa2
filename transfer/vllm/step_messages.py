"""What the connector's two sides tell each other, once per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from transfer.channel.layers import Chunk
from transfer.channel.outbox import Key


@dataclass(slots=True)
class Offering:
    """Decode blocks to offer to the prefill workers at `peers`."""

    key: Key
    request_id: str
    peers: list[str]
    first_block: int
    blocks: list[int]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """From the scheduler side to the workers.

    `ended`: key, request id, whether the whole prompt was computed, and the number of decode's workers. `cancels`: key
    and reason. `unoffered`: requests that ended before their blocks were offered: key and prefill's workers.
    """

    chunks: list[Chunk] = field(default_factory=list)
    ended: list[tuple[Key, str, bool, int]] = field(default_factory=list)
    offers: list[Offering] = field(default_factory=list)
    cancels: list[tuple[Key, str]] = field(default_factory=list)
    unoffered: list[tuple[Key, list[str]]] = field(default_factory=list)
    preempted: list[Key] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.chunks, self.ended, self.offers, self.cancels, self.unoffered, self.preempted))


@dataclass(slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """From a worker back to the scheduler side: first tokens by request id, and which decode replicas there are.

    `decodes`: the endpoints of their first workers; None: no news.
    """

    tokens: dict[str, int]
    decodes: tuple[str, ...] | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.tokens | other.tokens, self.decodes if other.decodes is None else other.decodes)
