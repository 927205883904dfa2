"""The connector's half in the engine core's process: which request hands over which blocks.

A request takes part when `kv_transfer_params["baton"]` holds `role` ("prefill" or "decode"), `session`, `epoch` and
`peers`: the control addresses of the other side's workers, by rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from transfer.channel.layers import Chunk
from transfer.control.messages import FirstToken, Seal
from transfer.control.token_sender import TokenSender
from transfer.memory.blocks import blocks_for
from transfer.memory.partition import partition_of
from transfer.vllm.cached_blocks import CachedBlocks, take_ascending
from transfer.vllm.continued_answer import AnsweredRequests, answered
from transfer.vllm.fenced_blocks import FencedBlocks
from transfer.vllm.fetching import Fetches
from transfer.vllm.handoff_part import Part, handed_over, part_of, the_part
from transfer.vllm.idle_sleep import IdleSleep
from transfer.vllm.partial_blocks import PartialBlocks
from transfer.vllm.pins import Pins
from transfer.vllm.remote_library import LibraryServer
from transfer.vllm.shared_tiers import SharedTiers
from transfer.vllm.signals import wake_on_signals
from transfer.vllm.step_clock import StepClock
from transfer.vllm.step_messages import Loading, Offering, StepMetadata, WorkerMetadata
from transfer.vllm.tier_events import tier_events
from transfer.vllm.tiers import Tiers

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from transfer.channel.channel import Channel
    from transfer.vllm.worker_side import WorkerSide

ABORTED = "the request was aborted"
# The longest that a prefill waits for decode's offer. A decode engine in a long step offers late; the prefill then
# begins without the offer, and the layers computed until then are written once it has come.
OFFER_WAIT_S = 0.25
# The longest that a step waits until fetches have let go of blocks that a request needs.
RECALL_WAIT_S = 0.05
# The longest idle sleep. It has an end because nothing tells that a grammar has been compiled.
IDLE_SLEEP_S = 0.05
# The same with several workers: their channels are in other processes, so nothing tells of news.
IDLE_SLEEP_WITHOUT_NEWS_S = 0.005


class SchedulerSide:
    """Answers the scheduler's hooks. `worker`: the worker's side when worker and scheduler share a process.

    `shared`: what the tiers of workers in other processes have; None where there are none.
    """

    def __init__(
        self,
        secret: str,
        block_size: int,
        worker: Callable[[], WorkerSide | None],
        shared: SharedTiers | None = None,
    ) -> None:
        self._block_size, self._worker, self._secret = block_size, worker, secret.encode()
        self._server: LibraryServer | None = None
        self._shared = shared
        self._tokens = TokenSender(Seal(secret))
        self._idle_sleep, self._clock = IdleSleep(), StepClock()
        wake_on_signals(self._idle_sleep.wake)
        self._answered = AnsweredRequests()
        self._fetches, self._pins = Fetches(block_size), Pins(block_size)
        self._lent: CachedBlocks | None = None
        self._tiers: Tiers | SharedTiers | None = None
        self._over: list[list[bytes]] = []
        self._pending = StepMetadata()
        self._prefills: dict[str, Request] = {}
        self._offer_due: dict[str, float] = {}
        self._awaiting: dict[str, Request] = {}
        self._first_tokens: dict[str, int] = {}
        self._offered: set[str] = set()

    def bind(self, manager: KVCacheManager) -> None:
        """Called once, before any request is scheduled."""
        self._manager = manager
        take_ascending(manager.block_pool)
        self._partial_blocks = PartialBlocks(manager)
        self._fenced = FencedBlocks(manager.block_pool)
        if (worker := self._worker()) is not None:
            channel, self._tiers, self._shared = worker.channel, worker.tiers, None
            self._lent = CachedBlocks(manager, lambda: channel.recall(RECALL_WAIT_S), RECALL_WAIT_S)
            channel.lend(self._lent)
        else:
            self._tiers = self._shared
            self._server = LibraryServer(self._secret, self._shared)
            self._lent = self._server.library = CachedBlocks(manager, self._server.recall, RECALL_WAIT_S)
            self._pending.library = self._server.address, self._secret
        self._fetches.bind(self._tiers, self._fenced)

    def _channel(self) -> Channel | None:
        worker = self._worker()
        return worker.channel if worker is not None else None

    def begin(self, request: Request) -> None:
        """A request has come to the engine."""
        self._answered.begin(request)
        if self._lent is not None:
            self._pins.begin(request, self._lent)

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens' KV comes from outside, and whether it comes later; None: ask again in the next step."""
        part = part_of(request)
        if not self._answered.is_ready(request):
            return None, False
        missing = 0 if part and part.role == "decode" else self._fetches.missing_tokens(request, num_computed_tokens)
        if part is None or missing:
            return missing, missing > 0
        if part.role == "prefill":
            return (None if self._awaits_offer(request, part) else 0), False
        if request.request_id in self._offered:
            return 0, False  # a request that was preempted after its handoff is recomputed here
        missing = handed_over(request) - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def _awaits_offer(self, request: Request, part: Part) -> bool:
        """Decode allocates before prefill computes. Other requests go ahead meanwhile, and no step waits."""
        channel = self._channel()
        if channel is None or channel.is_answered(part.key, partition_of(part.peers)):
            return False
        return time.monotonic() < self._offer_due.setdefault(request.request_id, time.monotonic() + OFFER_WAIT_S)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has its blocks."""
        part = part_of(request)
        if num_external_tokens and (part is None or part.role == "prefill"):
            begun = self._fetches.begin(request, list(blocks.get_block_ids()[0]), num_external_tokens)
            if isinstance(begun, Loading):
                self._pending.loads.append(begun)
            else:
                self._pending.fetches.append(begun)
        if part is None:
            return
        if part.role == "prefill":
            self._offer_due.pop(request.request_id, None)
            self._prefills[request.request_id] = request
        elif num_external_tokens:
            first = (handed_over(request) - num_external_tokens) // self._block_size
            end = blocks_for(handed_over(request), self._block_size)
            offered = list(blocks.get_block_ids()[0][first:end])
            self._pending.offers.append(Offering(part.key, request.request_id, part.peers, first, offered))
            self._awaiting[request.request_id] = request
            self._offered.add(request.request_id)

    def metadata(self, scheduled: SchedulerOutput) -> StepMetadata:
        """What the workers must know of the step that was just scheduled. Sleeps when there is nothing to compute."""
        self._clock.begin(scheduled, time.monotonic())
        if self._lent is not None:
            self._lent.begin_step()
        metadata, self._pending = self._pending, StepMetadata()
        if self._shared is not None:
            metadata.kept = self._shared.take_kept()
        for request_id in scheduled.preempted_req_ids or ():
            if request := self._prefills.get(request_id):
                metadata.preempted.append(the_part(request).key)
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            request = self._prefills.get(request_id)
            if request is not None and request.num_computed_tokens < handed_over(request):
                metadata.chunks.append(self._chunk(request, tokens))
        if not (self._clock.is_computing or scheduled.finished_req_ids or metadata):
            self._sleep()
        return metadata

    def _chunk(self, request: Request, scheduled_tokens: int) -> Chunk:
        part, total = the_part(request), handed_over(request)
        return Chunk(
            part.key,
            request.request_id,
            min(request.num_computed_tokens + scheduled_tokens, total),
            total,
            tuple(self._manager.get_block_ids(request.request_id)[0]),
            partition_of(part.peers),
        )

    def _sleep(self) -> None:
        """Nothing can be computed: without a pause the engine would step in a circle."""
        channel = self._channel()
        if channel is None:
            self._idle_sleep.wait(lambda: False, IDLE_SLEEP_WITHOUT_NEWS_S)
        else:
            tiers = self._tiers if isinstance(self._tiers, Tiers) else None
            channel.on_news(self._idle_sleep.wake)
            if tiers is not None:
                tiers.on_news(self._idle_sleep.wake)
            self._idle_sleep.wait(lambda: channel.has_news or (tiers is not None and tiers.has_news), IDLE_SLEEP_S)

    def step_report(self) -> Any:
        """What the step that just ended was."""
        if self._lent is not None:
            self._lent.end_step()
            self._pins.end_step(self._lent)
        if self._tiers is not None and self._lent is not None:
            for names in self._over:  # their blocks may be lent now that the step is over
                self._tiers.keep(names, self._lent)
            self._over.clear()
        report = self._clock.end(time.monotonic())
        return None if report is None else report.with_pins(self._pins.news())

    def finished(self, request: Request) -> bool:
        """A request is over. True when its blocks must stay until the workers report them sent."""
        if request.status is RequestStatus.FINISHED_ABORTED and _has_sampled(request):
            self._partial_blocks.keep(request)  # a session that moves comes back here, to be handed over
        self._pins.finished(request)
        part = part_of(request)
        if (arriving := self._fetches.end(request)) is not None and arriving.key is not None:
            self._pending.cancels.append((arriving.key, ABORTED))
        if self._tiers is not None:
            self._over.append([bytes(name) for name in request.block_hashes])
        if part is None:
            return False
        if part.role == "prefill":
            self._prefill_finished(request, part, None if arriving else request.request_id)
            return arriving is None  # vLLM waits for what arrives, and for no more then
        if request.request_id not in self._offered:
            self._pending.unoffered.append((part.key, part.peers))
        elif self._awaiting.pop(request.request_id, None) is not None:
            self._pending.cancels.append((part.key, ABORTED))
        self._offered.discard(request.request_id)
        self._first_tokens.pop(request.request_id, None)
        return False

    def _prefill_finished(self, request: Request, part: Part, held: str | None) -> None:
        self._prefills.pop(request.request_id, None)
        self._offer_due.pop(request.request_id, None)
        is_whole = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if is_whole:
            self._tokens.send(part.peers[0], FirstToken(*part.key, request.output_token_ids[-1]))
        self._pending.ended.append((part.key, held, is_whole, partition_of(part.peers)))

    def take(self, output: KVConnectorOutput) -> None:
        """What the workers report after a step."""
        metadata = output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):
            # Rank 0 may tell the first token steps before the last rank has its KV.
            self._first_tokens |= {rid: token for rid, token in metadata.tokens.items() if rid in self._awaiting}
            if metadata.decodes is not None:
                self._tokens.keep(metadata.decodes)
            self._fetches.brought(metadata.fetched)
            self._fenced.late(metadata.late)
            self._fenced.stopped(metadata.stopped)
        self._fetches.ended(output.finished_recving or ())
        for request_id in output.finished_recving or ():
            token = self._first_tokens.pop(request_id, None)
            request = self._awaiting.pop(request_id, None)
            if request is not None and token is not None:
                self._answered.go_on(request, token)

    def events(self) -> list[BlockStored | BlockRemoved]:
        """Which blocks have come into this replica's tiers or gone, since the last call."""
        return tier_events(self._tiers.take_changes(), self._block_size) if self._tiers is not None else []

    def needs_steps(self) -> bool:
        """Whether blocks are kept from requests until a source has stopped, or workers must be told what to store."""
        return len(self._fenced) > 0 or (self._shared is not None and self._shared.has_kept)

    def close(self) -> None:
        """Close the sockets."""
        self._tokens.close()
        if self._server is not None:
            self._server.close()


def _has_sampled(request: Request) -> bool:
    """Whether this engine has given a token of the answer. Then it had the KV of all tokens before."""
    return int(request.num_output_tokens) > len(answered(request.sampling_params))
