"""The scheduler's side of a request that fetches the first part of its prompt from another replica's cache.

Such a request has `kv_transfer_params["baton_fetch"]`: `session` and `epoch`, `peers` (the control addresses of the
source's workers, by rank), `tokens` (how many of the prompt's to fetch, from its beginning) and `timeout_s`. vLLM holds
the request until its blocks are written. What has not come by then is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transfer.channel.outbox import Key
from transfer.vllm.continued_answer import scheduler_on_the_stack
from transfer.vllm.step_messages import Fetching

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class _Open:
    """A fetch: its request, the blocks that were here before, and the number of blocks that were asked for."""

    request: Request
    key: Key
    before: int
    asked: int


class Fetches:
    """Make it while vLLM's scheduler makes its connector: it finds the scheduler on the stack."""

    def __init__(self, block_size: int) -> None:
        self._scheduler, self._block_size = scheduler_on_the_stack(), block_size
        self._open: dict[str, _Open] = {}
        self._tried: set[str] = set()
        self._brought: dict[str, int] = {}

    def missing_tokens(self, request: Request, computed: int) -> int:
        """How many tokens' KV, after the first `computed`, another replica is to write: whole blocks. 0: none.

        The last token is always computed here, for its output. A request fetches once.
        """
        if _source(request) is None or request.request_id in self._tried:
            return 0
        return max(0, self._end(request) * self._block_size - computed)

    def begin(self, request: Request, blocks: list[int], tokens: int) -> Fetching:
        """The request has its blocks. The last `tokens` of what they hold by now are fetched."""
        source = _source(request)
        assert source is not None
        end, asked = self._end(request), tokens // self._block_size
        before, key = end - asked, (source["session"], source["epoch"])
        self._open[request.request_id] = _Open(request, key, before, asked)
        self._tried.add(request.request_id)
        hashes = [bytes(name) for name in request.block_hashes[before:end]]
        return Fetching(key, request.request_id, source["peers"], blocks[before:end], hashes, source["timeout_s"])

    def _end(self, request: Request) -> int:
        """The number of the prompt's leading blocks that the source is to have written in the end."""
        source = _source(request)
        assert source is not None
        return min(int(source["tokens"]), int(request.num_tokens) - 1) // self._block_size

    def end(self, request: Request) -> Key | None:
        """The request is over. The key of its fetch, where peers may still write its blocks."""
        self._tried.discard(request.request_id)
        fetch = self._open.get(request.request_id)
        return fetch.key if fetch else None

    def brought(self, blocks: Mapping[str, int]) -> None:
        """Some worker of this replica has got so many blocks, by request. What counts is what all of them have."""
        for request_id, count in blocks.items():
            self._brought[request_id] = min(count, self._brought.get(request_id, count))

    def ended(self, request_ids: Iterable[str]) -> None:
        """All workers have told of these requests. One that lacks blocks goes on from those before."""
        for request_id in request_ids:
            fetch, blocks = self._open.pop(request_id, None), self._brought.pop(request_id, 0)
            if fetch is not None and blocks < fetch.asked and not fetch.request.is_finished():
                fetch.request.num_computed_tokens = (fetch.before + blocks) * self._block_size
                self._scheduler.failed_recving_kv_req_ids.add(request_id)


def _source(request: Request) -> dict[str, Any] | None:
    return (request.kv_transfer_params or {}).get("baton_fetch")
