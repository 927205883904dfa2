"""What is expected of one request on every replica, in seconds: columns for the placers to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

import numpy as np

from deployments.fleet_view import Codes, Columns, Numbers
from deployments.messages import SessionRequest

NO_ROWS: Codes = np.zeros(0, np.int64)
NO_TOKENS: Numbers = np.zeros(0)
TOKENS_BELOW = 1 << 32
MANY = 16
"""Hits, from which on it is looked for those that are alike."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pool takes: prompts of these lengths, requests of these classes and adapters (none named: of all)."""

    min_prompt_tokens: int = 0
    max_prompt_tokens: int | None = None
    classes: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()

    def take(self, request: SessionRequest) -> bool:
        """Whether the pool serves such a request at all."""
        within = self.min_prompt_tokens <= request.prompt_tokens
        within = within and (self.max_prompt_tokens is None or request.prompt_tokens <= self.max_prompt_tokens)
        of_class = not self.classes or request.priority in self.classes
        adapter = not request.adapter or not self.adapters or request.adapter in self.adapters
        return within and of_class and adapter


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known at a request's arrival. Everything may be empty: then only memory and counts decide.

    `hits`: leading blocks of the prompt in a replica's prefix cache, by replica id. `output_tokens`: expected.
    `trusted`: the pools whose steps were learnt. `pinned`: the replicas that the request's affinity names.
    `link_bytes_per_s`: between two replicas; 0 is unknown.
    """

    hits: Mapping[str, int] = field(default_factory=dict)
    output_tokens: float = 0.0
    trusted: frozenset[str] = frozenset()
    pinned: frozenset[str] = frozenset()
    link_bytes_per_s: float = 0.0


class Outlook:
    """One request on every replica of a role. All columns have a row per replica; units are tokens and seconds.

    What depends on the pool alone is computed once a pool. `hit_rows`: the replicas that have some of the prompt, and
    `hit_tokens` how much; with a system prompt that all conversations share, that is nearly every replica.
    """

    def __init__(self, request: SessionRequest, columns: Columns, knowledge: Knowledge, now_s: float) -> None:
        self.request, self.columns, self.knowledge, self.now_s = request, columns, knowledge, now_s
        self.hit_rows, self.hit_tokens = self._find_hits(knowledge.hits) if knowledge.hits else (NO_ROWS, NO_TOKENS)

    def _find_hits(self, hits: Mapping[str, int]) -> tuple[Codes, Numbers]:
        rows = np.fromiter(map(self.columns.rows.get, hits, repeat(-1)), np.int64, len(hits))
        blocks = np.fromiter(hits.values(), np.float64, len(hits))
        known = rows >= 0
        rows = rows[known]
        # A prompt that is cached whole is still computed at its last position, and so is that position's block.
        most = max(0, self.request.prompt_tokens - 1)
        return rows, np.minimum(blocks[known] * self.columns["block_size"][rows], most)

    def cached_on(self, row: int) -> int:
        """Prompt tokens in a replica's prefix cache."""
        return int(self.cached_tokens[row])

    @cached_property
    def cached_tokens(self) -> Numbers:
        """The same of all replicas."""
        column = np.zeros(len(self.columns.ready))
        column[self.hit_rows] = self.hit_tokens
        return column

    @cached_property
    def queue_s(self) -> Numbers:
        """Until what was promised before is prefilled: by the clock, and no less than what waits behind the first."""
        seconds: Numbers = np.maximum(self.columns["busy_until_s"] - self.now_s, self.columns["behind_s"])
        return seconds

    @cached_property
    def prefill_s(self) -> Numbers:
        """Computing the part of the prompt that is not cached, in a replica that does nothing else."""
        tokens = self.request.prompt_tokens
        column = self.columns.of_kinds(lambda steps, kind: steps.prefill_s(tokens, 0, kind.chunk_tokens))
        if self.hit_rows.size:
            column[self.hit_rows] = self.hit_prefill_s
        return column

    @cached_property
    def hit_prefill_s(self) -> Numbers:
        """The same of `hit_rows` only: of many, computed once for those of a kind that have as much."""
        found = self.columns.kind[self.hit_rows] * TOKENS_BELOW + self.hit_tokens
        if found.size > MANY:  # only there is it the quicker way
            unlike, places = np.unique(found, return_inverse=True)
            return np.array([self._hit_prefill_s(each) for each in unlike.tolist()])[places]
        return np.array([self._hit_prefill_s(each) for each in found.tolist()])

    def _hit_prefill_s(self, hit: float) -> float:
        kind_number, cached_tokens = divmod(int(hit), TOKENS_BELOW)
        steps, kind = self.columns.of_kind(kind_number)
        return steps.prefill_s(self.request.prompt_tokens, cached_tokens, kind.chunk_tokens)

    @property
    def uncached_prefill_s(self) -> float:
        """The least that it takes a replica that has nothing of the prompt."""
        tokens = self.request.prompt_tokens
        return self.columns.least_of_kinds(lambda steps, kind: steps.prefill_s(tokens, 0, kind.chunk_tokens))

    @cached_property
    def step_s(self) -> Numbers:
        """A decode step as it will be with this request in it."""
        return self.columns["step_s"] + self.added_step_s

    @cached_property
    def added_step_s(self) -> Numbers:
        """What this request adds to every decode step of the others."""
        held = self.request.prompt_tokens + self.knowledge.output_tokens / 2
        return self.columns.of_kinds(lambda steps, kind: steps.sequence_s + held * steps.context_s)

    def kv_bytes(self, rows: Codes) -> Numbers:
        """KV that would have to move to each of these replicas: what its own cache does not hold."""
        missing = self.request.prompt_tokens - (self.cached_tokens[rows] if self.hit_rows.size else 0.0)
        size: Numbers = missing * self.columns["kv_bytes_per_token"][rows]
        return size

    @cached_property
    def fill(self) -> Numbers:
        """The share of a replica's blocks that is expected to be taken with this request in it, 1 when all are."""
        need = self.columns.blocks_for(self.request.prompt_tokens + self.knowledge.output_tokens)
        share: Numbers = (self.columns["expected_blocks"] + need) * self.columns["per_block"]
        return share
