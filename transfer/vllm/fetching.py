"""The scheduler's side of a request that gets KV for the first part of its prompt instead of computing it.

It comes from one of two places. A request fetches from another replica's cache where `kv_transfer_params` has
`baton_fetch`: `session` and `epoch`, `peers` (the control addresses of the source's workers, by rank), `tokens` (how
many of the prompt's to fetch, from its beginning) and `timeout_s`. It loads from this replica's tiers where they have
at least as much of the prompt. vLLM holds the request until its blocks are written. What has not come by then is
computed here. A fetch that does not stop in its time keeps its blocks (`fenced_blocks`), and the request gets others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transfer.channel.outbox import Key
from transfer.control.fetch_request import FETCH
from transfer.vllm.continued_answer import scheduler_on_the_stack
from transfer.vllm.fenced_blocks import FencedBlocks
from transfer.vllm.shared_tiers import SharedTiers
from transfer.vllm.step_messages import Fetching, Loading
from transfer.vllm.tiers import Tiers

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class _Plan:
    """`end`: how many of the prompt's leading blocks have their KV then. `source`: None: this replica's tiers."""

    end: int
    source: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Open:
    """What a request waits for. `before`: the number of blocks that were here. `into`: the blocks that are to come.

    `key`: of the fetch; None for a load from a tier.
    """

    request: Request
    key: Key | None
    before: int
    into: list[int]


class Fetches:
    """Make it while vLLM's scheduler makes its connector: it finds the scheduler on the stack."""

    def __init__(self, block_size: int) -> None:
        self._scheduler, self._block_size = scheduler_on_the_stack(), block_size
        self._tiers: Tiers | SharedTiers | None = None
        self._fenced: FencedBlocks | None = None
        self._planned: dict[str, _Plan] = {}
        self._open: dict[str, Open] = {}
        self._tried: set[str] = set()
        self._brought: dict[str, int] = {}

    def bind(self, tiers: Tiers | SharedTiers | None, fenced: FencedBlocks) -> None:
        """Call it before any request. `tiers`: those of this replica, if it has any."""
        self._tiers, self._fenced = tiers, fenced

    def missing_tokens(self, request: Request, computed: int) -> int:
        """How many tokens' KV, after the first `computed`, is to come: whole blocks. 0: none.

        The last token is always computed here, for its output. A request does this once.
        """
        if request.request_id in self._tried:
            return 0
        plan = self._planned[request.request_id] = self._plan(request, computed // self._block_size)
        return max(0, plan.end * self._block_size - computed)

    def _plan(self, request: Request, first: int) -> _Plan:
        """`first`: the number of leading blocks that are here."""
        source = (request.kv_transfer_params or {}).get(FETCH)
        most = (int(request.num_tokens) - 1) // self._block_size
        there = min(int(source["tokens"]) // self._block_size, most) if source else 0
        if self._tiers is not None and first < most:
            here = first + self._tiers.leading([bytes(name) for name in request.block_hashes[first:most]])
            if here >= max(there, first + 1):
                return _Plan(here, None)
        return _Plan(there, source)

    def begin(self, request: Request, blocks: list[int], tokens: int) -> Fetching | Loading:
        """The request has its blocks, and `missing_tokens` said that KV of `tokens` is to come."""
        plan, request_id = self._planned.pop(request.request_id), request.request_id
        before, source = plan.end - tokens // self._block_size, plan.source
        hashes = [bytes(name) for name in request.block_hashes[before : plan.end]]
        into = blocks[before : plan.end]
        key = (source["session"], source["epoch"]) if source else None
        self._open[request_id] = Open(request, key, before, into)
        self._tried.add(request_id)
        if source is None or key is None:
            return Loading(request_id, into, hashes)
        return Fetching(key, request_id, source["peers"], into, hashes, source["timeout_s"])

    def end(self, request: Request) -> Open | None:
        """The request is over. What it waits for still, which may yet write its blocks."""
        self._planned.pop(request.request_id, None)
        self._tried.discard(request.request_id)
        return self._open.get(request.request_id)

    def brought(self, blocks: Mapping[str, int]) -> None:
        """Some worker of this replica has got so many blocks, by request. What counts is what all of them have."""
        for request_id, count in blocks.items():
            self._brought[request_id] = min(count, self._brought.get(request_id, count))

    def ended(self, request_ids: Iterable[str]) -> None:
        """All workers have told of these requests. One that lacks blocks goes on from those before."""
        for request_id in request_ids:
            fetch, blocks = self._open.pop(request_id, None), self._brought.pop(request_id, 0)
            if fetch is None:
                continue
            is_fenced = self._fenced is not None and self._fenced.keep(request_id, fetch.into)
            if (is_fenced or blocks < len(fetch.into)) and not fetch.request.is_finished():
                # Of a request that has computed nothing, vLLM frees all blocks, and it gets others.
                computed = 0 if is_fenced else fetch.before + blocks
                fetch.request.num_computed_tokens = computed * self._block_size
                self._scheduler.failed_recving_kv_req_ids.add(request_id)
