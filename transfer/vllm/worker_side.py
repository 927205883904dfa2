"""The connector's half in a worker's process: it owns the worker's channel."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.utils import get_pp_indices

from transfer.channel.channel import Channel
from transfer.channel.outbox import Results
from transfer.channel.pacing import Limits
from transfer.channel.trace import tracer
from transfer.control.messages import Seal
from transfer.memory.heads import head_range
from transfer.memory.layout import KVLayout
from transfer.memory.nixl_plane import NixlPlane
from transfer.vllm.continued_answer import count_answered
from transfer.vllm.meeting_file import remove_meeting_file
from transfer.vllm.remote_library import RemoteLibrary
from transfer.vllm.scheduler_side import ABORTED, RECALL_WAIT_S
from transfer.vllm.step_messages import StepMetadata, WorkerMetadata
from transfer.vllm.tier_news import TierNews
from transfer.vllm.tiers import Tiers, open_tiers
from transfer.vllm.weights import weights_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The longest that a step waits for writes that still read the blocks of a preempted prefill.
PREEMPTION_WAIT_S = 30.0


class WorkerSide:
    """Answers a worker's hooks. `extra`: the connector's own configuration. `tiers`: None where none are configured."""

    def __init__(self, vllm_config: VllmConfig, extra: dict[str, Any]) -> None:
        self._vllm_config, self._extra = vllm_config, extra
        self._channel: Channel | None = None
        self.tiers: Tiers | None = None
        self._layers: dict[str, int] = {}
        self._arrived: dict[str, int] = {}
        self._fetched: dict[str, int] = {}
        self._late: set[str] = set()  # their fetches have not stopped yet
        self._came_late, self._stopped = Counter[str](), Counter[str]()
        self._decodes: tuple[str, ...] | None = None
        self._libraries: list[RemoteLibrary] = []
        self._tier_news: TierNews | None = None
        count_answered(vllm_config)
        remove_meeting_file()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the channel over these caches, one for each layer."""
        extra, rank = self._extra, _rank()
        layout = kv_layout(
            list(kv_caches.values()),
            self._vllm_config.cache_config.block_size,
            extra["facts"],
            rank,
            self._vllm_config.parallel_config.world_size,
            self._vllm_config.model_config.get_total_num_kv_heads(),
            stages_of(self._vllm_config),
        )
        self._layers = dict(zip(kv_caches, layout.layers, strict=True))
        name = f"{extra['replica_id']}-{rank}-{uuid.uuid4().hex[:8]}"
        self._channel = Channel(
            NixlPlane(name, extra["backend"], extra["transports"]),
            layout,
            Seal(extra["secret"]),
            extra["host"],
            extra["handoff_timeout_s"],
            tracer(extra["trace_dir"], name),
            Limits(**extra["limits"]),
        )
        model = self._vllm_config.model_config
        self.tiers = open_tiers(
            extra["tiers"], layout, list(kv_caches.values()), lambda: weights_of(model.model, model.revision)
        )

    @property
    def channel(self) -> Channel:
        """This worker's channel. Exists once vLLM has registered its KV caches."""
        if self._channel is None:
            raise RuntimeError("the KV caches are not registered yet")
        return self._channel

    def keep(self, decodes: list[list[str]]) -> None:
        """Only these decode replicas exist. The scheduler side learns of it with the next step."""
        self.channel.keep(decodes)
        self._decodes = tuple(workers[0] for workers in decodes)

    def preempted(self, metadata: StepMetadata) -> None:
        """Wait until no write reads the blocks of preempted prefills."""
        if metadata.preempted and not self.channel.wait_quiet(metadata.preempted, PREEMPTION_WAIT_S):
            raise RuntimeError("writes of a preempted prefill did not end; its blocks cannot be reused safely")

    def begin_step(self, metadata: StepMetadata) -> None:
        """Hand the channel what the scheduler side says."""
        channel, carries_token = self.channel, _rank() == 0
        if metadata.library is not None:
            self._join(*metadata.library)
        for offer in metadata.offers:
            channel.offer(offer.key, offer.request_id, offer.peers, offer.first_block, offer.blocks, carries_token)
        for fetch in metadata.fetches:
            channel.fetch(fetch.key, fetch.request_id, fetch.peers, fetch.blocks, fetch.hashes, fetch.timeout_s)
        for load in metadata.loads:
            assert self.tiers is not None
            self.tiers.load(load.request_id, load.hashes, load.blocks)
        for names in metadata.kept:
            assert self.tiers is not None
            self.tiers.keep(names, self._libraries[-1])
        for key, reason in metadata.cancels:
            channel.cancel(key, reason)
        for key, peers in metadata.unoffered:
            channel.cancel_unoffered(key, peers, ABORTED)
        for key, request_id, ok, readers in metadata.ended:
            channel.ended(key, request_id, ok, readers)
        channel.begin_step(metadata.chunks)

    def _join(self, address: str, secret: bytes) -> None:
        """The scheduler is in another process. Its channel's thread and its tiers' thread each ask by themselves."""
        channel = self.channel
        self._libraries = [RemoteLibrary(address, secret, lambda: channel.recall(RECALL_WAIT_S))]
        channel.lend(self._libraries[0])
        if self.tiers is not None:
            self._libraries.append(RemoteLibrary(address, secret, lambda: None))
            self._tier_news = TierNews(address, secret, _rank(), self.tiers)

    def layer_saved(self, layer_name: str, kv_layer: torch.Tensor) -> None:
        """The layer's KV is computed, or on CUDA its computation is launched."""
        ready = None
        if kv_layer.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self.channel.layer_saved(self._layers[layer_name], ready)

    def results(self) -> KVConnectorTransferResults:
        """What has ended since the last step."""
        results: Results = self.channel.take_results()
        self._arrived = {rid: token for rid, token in results.received.items() if token is not None}
        fetched = self._in_time(results)
        self._fetched = fetched | (self.tiers.take_loaded() if self.tiers else {})
        recving = results.received.keys() | results.broken.keys() | self._fetched.keys() | self._came_late.keys()
        return KVConnectorTransferResults(
            finished_sending=results.released, finished_recving=recving, failed_recving=set(results.broken)
        )

    def _in_time(self, results: Results) -> dict[str, int]:
        """The fetches whose requests still wait for them. Notes those that are late, and those that have stopped."""
        late = results.late - results.fetched.keys()
        stopped = self._late & results.fetched.keys()
        self._late = (self._late | late) - stopped
        self._came_late, self._stopped = Counter(late), Counter(stopped)
        return {request_id: blocks for request_id, blocks in results.fetched.items() if request_id not in stopped}

    def metadata(self) -> WorkerMetadata | None:
        """News for the scheduler side."""
        tokens, self._arrived = self._arrived, {}
        decodes, self._decodes = self._decodes, None
        fetched, self._fetched = self._fetched, {}
        late, self._came_late = self._came_late, Counter()
        stopped, self._stopped = self._stopped, Counter()
        return WorkerMetadata(tokens, decodes, fetched, late, stopped) or None

    def counters(self) -> dict[str, float]:
        """The counters of this worker's channel and tiers."""
        return self.channel.counters() | (self.tiers.counters() if self.tiers else {})

    def close(self) -> None:
        """Close channel and tiers."""
        if self._tier_news is not None:
            self._tier_news.close()
        if self.tiers is not None:
            self.tiers.close()
        if self._channel is not None:
            self._channel.close()
        for library in self._libraries:
            library.close()


def _rank() -> int:
    """This worker's number in its replica: vLLM numbers workers stage after stage."""
    return int(get_pp_group().rank_in_group * get_tp_group().world_size + get_tp_group().rank_in_group)


def stages_of(config: VllmConfig) -> tuple[int, ...]:
    """The number of layers in each pipeline stage, as vLLM divides them; empty where there is one stage."""
    stages, layers = config.parallel_config.pipeline_parallel_size, config.model_config.get_total_num_hidden_layers()
    if stages == 1:
        return ()
    return tuple(end - begin for begin, end in (get_pp_indices(layers, stage, stages) for stage in range(stages)))


def kv_layout(
    caches: list[torch.Tensor],
    block_size: int,
    facts: dict[str, str],
    rank: int,
    workers: int,
    total_heads: int,
    stages: tuple[int, ...] = (),
) -> KVLayout:
    """The layout of one cache tensor a layer, `[blocks, heads, tokens, content]` in vLLM's logical order.

    `stages`: as in `KVLayout`. Raises ValueError when the bytes of a block do not lie together, or when there is not
    one cache for each layer of the worker's stage.
    """
    first = caches[0]
    if any(cache.shape != first.shape or cache.stride() != first.stride() for cache in caches):
        raise ValueError("layers with unlike KV caches are not carried; `channel: {kind: vllm}` may carry them")
    values = math.prod(first.shape[1:])
    if first.stride(0) != values or 1 + sum((n - 1) * s for n, s in zip(first.shape, first.stride(), strict=True)) != (
        values * first.shape[0]
    ):
        raise ValueError(
            f"a KV cache of shape {tuple(first.shape)} and strides {first.stride()}, in which a block's bytes do not "
            "lie together, is not carried; `channel: {kind: vllm}` may carry it"
        )
    tensor = workers // max(1, len(stages))
    heads = head_range(rank % tensor, tensor, total_heads)
    heads_first = first.ndim == 4 and first.shape[1] == len(heads) and first.stride(1) * first.shape[1] == values
    shape = f"{first.dtype}, {list(first.shape[2:])} a head" if first.ndim == 4 else f"{first.dtype}, {first.shape[1:]}"
    return KVLayout(
        num_layers=len(caches),
        regions_per_layer=1,
        num_blocks=first.shape[0],
        block_size=block_size,
        block_bytes=values * first.element_size(),
        bases=tuple(cache.data_ptr() for cache in caches),
        device=first.device.type,
        device_id=first.device.index or 0,
        facts={**facts, "kv_cache": shape, "kv_strides": "heads first" if heads_first else str(first.stride()[1:])},
        rank=rank,
        workers=workers,
        total_heads=total_heads,
        heads_first=heads_first,
        stages=stages,
    )
