"""The vLLM KV connector: an adapter from vLLM's hooks to the channel. With `answered.py` and
`partial_blocks.py`, what imports vllm here.

vLLM builds it twice: in the engine core's process (scheduler side: who hands what over, by block id) and in each
worker's process (worker side: the channel). The two talk by vLLM's connector metadata, once per step.

A request takes part when `kv_transfer_params["baton"]` holds `role` ("prefill" or "decode"), `session`, `epoch`
and `peers`: the control addresses of the other side's workers, by rank.
"""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.request import RequestStatus

from transfer.channel.channel import Channel
from transfer.channel.layers import Chunk
from transfer.channel.outbox import Key, Results
from transfer.channel.pacing import Limits
from transfer.channel.trace import tracer
from transfer.control.messages import FirstToken, Seal
from transfer.control.token_sender import TokenSender
from transfer.memory.blocks import blocks_for
from transfer.memory.heads import head_range
from transfer.memory.layout import KVLayout
from transfer.memory.nixl_plane import NixlPlane
from transfer.vllm.continued_answer import AnsweredRequests, answered, count_answered
from transfer.vllm.idle_sleep import Rest
from transfer.vllm.lifeline import die_with_parent
from transfer.vllm.partial_blocks import PartialBlocks
from transfer.vllm.step_clock import StepClock

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

ABORTED = "the request was aborted"
PREEMPTION_WAIT_S = 30.0
OFFER_WAIT_S = 0.25  # a decode engine in a long step offers late; prefill then begins, and catches up
REST_S = 0.05  # the longest rest: a grammar that is being compiled is not announced
BLIND_REST_S = 0.005  # with several workers the channels are in other processes, and their news unknown


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
    """From the scheduler side to the workers, once per step."""

    chunks: list[Chunk] = field(default_factory=list)
    ended: list[tuple[Key, str, bool, int]] = field(default_factory=list)
    offers: list[Offering] = field(default_factory=list)
    cancels: list[tuple[Key, str]] = field(default_factory=list)
    withdrawals: list[tuple[Key, list[str]]] = field(default_factory=list)
    preempted: list[Key] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.chunks, self.ended, self.offers, self.cancels, self.withdrawals, self.preempted))


@dataclass(slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """From a worker back to the scheduler side: first tokens by request id, and news of the decode replicas.

    `decodes`: the endpoints of their first workers; None: no news.
    """

    tokens: dict[str, int]
    decodes: tuple[str, ...] | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.tokens | other.tokens, self.decodes if other.decodes is None else other.decodes)


@dataclass(frozen=True, slots=True)
class _Part:
    """A request's part in a handoff."""

    role: str
    key: Key
    peers: list[str]


def _part(request: Request) -> _Part | None:
    baton = (request.kv_transfer_params or {}).get("baton")
    return _Part(baton["role"], (baton["session"], baton["epoch"]), baton["peers"]) if baton else None


class BatonConnector(KVConnectorBase_V1):
    """Prefill writes each layer of each chunk into decode's blocks; decode allocates them before prefill begins."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        die_with_parent()
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise ValueError(
                "this model has several KV cache groups, which Baton's channel does not carry; "
                "`channel: {kind: vllm}` may carry it"
            )
        self._extra: dict[str, Any] = self._kv_transfer_config.kv_connector_extra_config
        self._block_size: int = vllm_config.cache_config.block_size
        if role is KVConnectorRole.SCHEDULER:
            self._tokens = TokenSender(Seal(self._extra["secret"]))
            self._rest = Rest()
            self._clock = StepClock()
            self._answered = AnsweredRequests()
            self._pending = StepMetadata()
            self._prefills: dict[str, Request] = {}
            self._offer_due: dict[str, float] = {}
            self._awaiting: dict[str, Request] = {}
            self._first_tokens: dict[str, int] = {}
            self._offered: set[str] = set()
        else:
            self._channel: Channel | None = None
            self._layers: dict[str, int] = {}
            self._arrived: dict[str, int] = {}
            count_answered(vllm_config)
            self._decodes: tuple[str, ...] | None = None

    # ---- scheduler side

    def on_new_request(self, request: Request) -> None:
        self._answered.begin(request)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        _take_ascending(kv_cache_manager.block_pool)
        self._partial_blocks = PartialBlocks(kv_cache_manager)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        part = _part(request)
        if not self._answered.is_ready(request):
            return None, False
        if part is None:
            return 0, False
        if part.role == "prefill":
            return (None if self._awaits_offer(request, part) else 0), False
        if request.request_id in self._offered:
            return 0, False  # a request that was preempted after its handoff is recomputed here
        missing = _handed_over(request) - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def _awaits_offer(self, request: Request, part: _Part) -> bool:
        """Decode allocates before prefill computes. Other requests go ahead meanwhile, and no step waits."""
        channel = _channel_of_this_process()
        if channel is None or channel.is_answered(part.key, len(part.peers)):
            return False
        return time.monotonic() < self._offer_due.setdefault(request.request_id, time.monotonic() + OFFER_WAIT_S)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        part = _part(request)
        if part is None:
            return
        if part.role == "prefill":
            self._offer_due.pop(request.request_id, None)
            self._prefills[request.request_id] = request
        elif num_external_tokens:
            first = (_handed_over(request) - num_external_tokens) // self._block_size
            end = blocks_for(_handed_over(request), self._block_size)
            offered = list(blocks.get_block_ids()[0][first:end])
            offering = Offering(part.key, request.request_id, part.peers, first, offered)
            self._pending.offers.append(offering)
            self._awaiting[request.request_id] = request
            self._offered.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        self._clock.begin(scheduler_output, time.monotonic())
        metadata, self._pending = self._pending, StepMetadata()
        for request_id in scheduler_output.preempted_req_ids or ():
            if request := self._prefills.get(request_id):
                metadata.preempted.append(_the_part(request).key)
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self._prefills.get(request_id)
            if request is None or request.num_computed_tokens >= (total := _handed_over(request)):
                continue
            assert self._kv_cache_manager is not None
            part = _the_part(request)
            metadata.chunks.append(
                Chunk(
                    part.key,
                    request_id,
                    min(request.num_computed_tokens + scheduled, total),
                    total,
                    tuple(self._kv_cache_manager.get_block_ids(request_id)[0]),
                    len(part.peers),
                )
            )
        if not (scheduler_output.total_num_scheduled_tokens or scheduler_output.finished_req_ids or metadata):
            self._wait_for_handoffs()
        return metadata

    def get_kv_connector_stats(self) -> Any:
        """What the step that just ended was: vLLM asks after every step, and sends it on with its own statistics.

        It asks the workers' side as well, which has nothing to say.
        """
        return self._clock.end(time.monotonic()) if self._role is KVConnectorRole.SCHEDULER else None

    def _wait_for_handoffs(self) -> None:
        """Nothing can be computed: do not step in a circle."""
        channel = _channel_of_this_process()
        if channel is None:
            self._rest.wait(lambda: False, BLIND_REST_S)
        else:
            channel.on_news(self._rest.wake)
            self._rest.wait(lambda: channel.has_news, REST_S)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.status is RequestStatus.FINISHED_ABORTED and _has_sampled(request):
            self._partial_blocks.keep(request)  # a session that was let go comes back, to be handed over
        part = _part(request)
        if part is None:
            return False, None
        if part.role == "prefill":
            self._prefills.pop(request.request_id, None)
            self._offer_due.pop(request.request_id, None)
            done = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
            if done:
                token = FirstToken(*part.key, request.output_token_ids[-1])
                self._tokens.send(part.peers[0], token)
            self._pending.ended.append((part.key, request.request_id, done, len(part.peers)))
            return True, None
        if request.request_id not in self._offered:
            self._pending.withdrawals.append((part.key, part.peers))
        elif self._awaiting.pop(request.request_id, None) is not None:
            self._pending.cancels.append((part.key, ABORTED))
        self._offered.discard(request.request_id)
        self._first_tokens.pop(request.request_id, None)
        return False, None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):  # rank 0 may be steps ahead of the last rank to have its KV
            self._first_tokens |= {rid: token for rid, token in metadata.tokens.items() if rid in self._awaiting}
            if metadata.decodes is not None:
                self._tokens.keep(metadata.decodes)
        for request_id in connector_output.finished_recving or ():
            token = self._first_tokens.pop(request_id, None)
            request = self._awaiting.pop(request_id, None)
            if request is not None and token is not None:
                self._answered.go_on(request, token)

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = {name: index for index, name in enumerate(kv_caches)}
        layout = kv_layout(
            list(kv_caches.values()),
            self._block_size,
            self._extra["facts"],
            self._rank,
            self._vllm_config.parallel_config.tensor_parallel_size,
            self._vllm_config.model_config.get_total_num_kv_heads(),
        )
        name = f"{self._extra['replica_id']}-{self._rank}-{uuid.uuid4().hex[:8]}"
        self._channel = Channel(
            NixlPlane(name, self._extra["backend"], self._extra["transports"]),
            layout,
            Seal(self._extra["secret"]),
            self._extra["host"],
            self._extra["handoff_timeout_s"],
            tracer(self._extra["trace_dir"], name),
            Limits(**self._extra["limits"]),
        )

    @property
    def channel(self) -> Channel:
        """This worker's channel. Exists once vLLM has registered its KV caches."""
        if self._channel is None:
            raise RuntimeError("the KV caches are not registered yet")
        return self._channel

    def keep(self, decodes: list[list[str]]) -> None:
        """The decode replicas that there are. Others are forgotten, on the scheduler side with the next step."""
        self.channel.keep(decodes)
        self._decodes = tuple(workers[0] for workers in decodes)

    @property
    def _rank(self) -> int:
        return int(get_tensor_model_parallel_rank())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        preempted = kv_connector_metadata.preempted
        if preempted and not self.channel.wait_quiet(preempted, PREEMPTION_WAIT_S):
            raise RuntimeError("writes of a preempted prefill did not end; its blocks cannot be reused safely")

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        rank = self._rank
        for offer in connector_metadata.offers:
            self.channel.offer(offer.key, offer.request_id, offer.peers, offer.first_block, offer.blocks, rank == 0)
        for key, reason in connector_metadata.cancels:
            self.channel.cancel(key, reason)
        for key, peers in connector_metadata.withdrawals:
            self.channel.withdraw(key, peers, ABORTED)
        for key, request_id, ok, readers in connector_metadata.ended:
            self.channel.ended(key, request_id, ok, readers)
        self.channel.begin_step(connector_metadata.chunks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to start: the peer writes."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is not scheduled before its KV is here."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        ready = None
        if kv_layer.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self.channel.layer_saved(self._layers[layer_name], ready)

    def wait_for_save(self) -> None:
        """Only marks the end of the pass: source blocks are held until `finished_sending`."""
        self.channel.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results: Results = self.channel.take_results()
        self._arrived = {rid: token for rid, token in results.received.items() if token is not None}
        return KVConnectorTransferResults(
            finished_sending=results.released,
            finished_recving=results.received.keys() | results.broken.keys(),
            failed_recving=set(results.broken),
        )

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        tokens, self._arrived = self._arrived, {}
        decodes, self._decodes = self._decodes, None
        return WorkerMetadata(tokens, decodes) if tokens or decodes is not None else None

    def shutdown(self) -> None:
        if self._role is KVConnectorRole.SCHEDULER:
            self._tokens.close()
        elif self._channel is not None:
            self._channel.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full CUDA graphs would skip `save_kv_layer`."""
        return True


class WorkerExtension:
    """Methods that vLLM mixes into its workers, so that a replica can ask them by `collective_rpc`."""

    def baton_endpoint(self) -> str:
        """The control address of this worker's channel."""
        return _connector().channel.address

    def baton_meet(self, role: str, peers: list[list[str]]) -> None:
        """The replicas that this one exchanges KV with, each its workers' endpoints by rank.

        Prefill writes only; decode is written to, and writes what it moves to another decode replica.
        """
        connector = _connector()
        connector.keep(peers)
        if role == "decode":
            connector.channel.meet(peers)

    def baton_counters(self) -> dict[str, float]:
        """The counters of this worker's channel."""
        return _connector().channel.counters()


def _connector() -> BatonConnector:
    connector = get_kv_transfer_group()
    assert isinstance(connector, BatonConnector)
    return connector


def _channel_of_this_process() -> Channel | None:
    """The worker's channel, when worker and scheduler share a process."""
    return _connector().channel if has_kv_transfer_group() else None


def _the_part(request: Request) -> _Part:
    part = _part(request)
    assert part is not None
    return part


def _take_ascending(pool: BlockPool) -> None:
    """Give a request its new blocks in ascending order, so that runs of them coalesce into one descriptor.

    The pool hands out blocks that were freed last to first, descending. Which blocks it takes stays its choice.
    """
    take = pool.get_new_blocks
    pool.get_new_blocks = lambda count: sorted(take(count), key=lambda block: block.block_id)


def _has_sampled(request: Request) -> bool:
    """Whether this engine has given a token of the answer, and so had the KV of all those before."""
    return int(request.num_output_tokens) > len(answered(request.sampling_params))


def _handed_over(request: Request) -> int:
    """The tokens whose KV moves, while it does: the prompt and what was answered before."""
    return int(request.num_prompt_tokens) + len(answered(request.sampling_params))


def kv_layout(
    caches: list[torch.Tensor], block_size: int, facts: dict[str, str], rank: int, workers: int, total_heads: int
) -> KVLayout:
    """The layout of one cache tensor a layer, `[blocks, heads, tokens, content]` in vLLM's logical order.

    Raises ValueError when the bytes of a block do not lie together.
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
    heads = head_range(rank, workers, total_heads)
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
    )
