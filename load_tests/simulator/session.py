"""A placed request, on the replicas that serve it."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.messages import Placement
from load_tests.simulator.cluster import Node
from load_tests.simulator.ingress import Ingress
from load_tests.simulator.metrics import Record
from load_tests.simulator.traces import TraceRequest
from load_tests.simulator.work import Work


@dataclass(slots=True, eq=False)
class Session:
    """A placed request: its part on the owner, and its part on the helper that prefills for it where it is split.

    `first_s`: when its client had its first token. `landed_s`: when the KV sent so far is at the owner. A session that
    has moved has the replica that gave it up as its helper. `moves`: how often it has. `answered_tokens`: what it had
    answered when it last did. `kept`: what its owner has given up and keeps the KV of, until it is known where it goes.
    """

    request: TraceRequest
    ingress: Ingress
    placement: Placement
    answer: Work
    owner: Node
    helper: Node | None = None
    prefill: Work | None = None
    first_s: float = -1.0
    landed_s: float = 0.0
    cached_tokens: int = 0
    moves: int = 0
    answered_tokens: int = 0
    kept: Work | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.placement.session_id, self.placement.epoch

    def record(self, begin_s: float, last_s: float, block_tokens: int) -> Record:
        """What its client saw. `begin_s`: when the trace began. `last_s`: when the client had its last token."""
        request, tokens = self.request, self.request.output_tokens
        return Record(
            request.at_s,
            request.prompt_tokens,
            tokens,
            ttft_s=self.first_s - begin_s - request.at_s,
            tpot_s=(last_s - self.first_s) / (tokens - 1) if tokens > 1 else 0.0,
            cached_blocks=self.cached_tokens // block_tokens,
            prompt_blocks=len(request.hashes) or request.prompt_tokens // block_tokens,
            pool=self.placement.owner.pool,
            mode=self.placement.mode.value,
            client=request.client,
        )
