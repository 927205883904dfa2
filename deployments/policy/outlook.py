"""What is expected of one request on every replica, in seconds: columns for the placers to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from deployments.fleet_view import Columns, Numbers
from deployments.messages import SessionRequest

BASE, PREFILL_TOKEN, PREFILL_CONTEXT, SEQUENCE, CONTEXT = range(5)
"""Columns of `Knowledge.coefficients`: what a step takes, and each prompt token, sequence, and token before them."""


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

    `coefficients`: five numbers per pool name, seconds of a step (see `BASE` and the rest). `hits`: leading blocks of
    the prompt in a replica's prefix cache, by replica id. `output_tokens`: expected, and `output_p90`. `trusted`: the
    pools whose coefficients were learnt. `pinned`: the replicas that the request's affinity names.
    """

    coefficients: Mapping[str, tuple[float, float, float, float, float]] = field(default_factory=dict)
    hits: Mapping[str, int] = field(default_factory=dict)
    output_tokens: float = 0.0
    trusted: frozenset[str] = frozenset()
    pinned: frozenset[str] = frozenset()
    link_bytes_per_s: float = 0.0


class Outlook:
    """One request on every replica of a role. All columns have a row per replica; units are tokens and seconds."""

    def __init__(self, request: SessionRequest, columns: Columns, knowledge: Knowledge, now_s: float) -> None:
        self.request, self.columns, self.knowledge, self.now_s = request, columns, knowledge, now_s
        table = np.zeros((len(columns.names) + 1, 5))
        for pool, numbers in knowledge.coefficients.items():
            if pool in columns.names:
                table[columns.names[pool]] = numbers
        self._per_row: Numbers = table.T[:, columns.pool]
        hits = columns.by_row(knowledge.hits) * columns["block_size"]
        # A prompt that is cached whole is still computed at its last position, and so is that position's block.
        self.cached_tokens: Numbers = np.minimum(hits, max(0, request.prompt_tokens - 1))

    @cached_property
    def queue_s(self) -> Numbers:
        """Until what was promised before is prefilled: by the clock, and no less than what waits behind the first."""
        columns = self.columns
        ahead = np.maximum(columns["busy_until_s"] - self.now_s, columns["behind_s"])
        seconds: Numbers = np.maximum(ahead, 0.0) + columns["unknown_tokens"] * self._per_row[PREFILL_TOKEN]
        return seconds

    @cached_property
    def prefill_s(self) -> Numbers:
        """Computing the part of the prompt that is not cached, in a replica that does nothing else."""
        per_row, cached = self._per_row, self.cached_tokens
        tokens = self.request.prompt_tokens - cached
        context = tokens * (cached + (tokens - 1) / 2)
        steps = np.ceil(tokens / self.columns["chunk_tokens"])
        seconds: Numbers = steps * per_row[BASE] + tokens * per_row[PREFILL_TOKEN]
        seconds += context * per_row[PREFILL_CONTEXT]
        return seconds

    @cached_property
    def step_s(self) -> Numbers:
        """A decode step as it will be with this request in it."""
        per_row, columns = self._per_row, self.columns
        held = columns["held_tokens"] + self.request.prompt_tokens + self.knowledge.output_tokens / 2
        seconds: Numbers = per_row[BASE] + (columns["sessions"] + 1) * per_row[SEQUENCE] + held * per_row[CONTEXT]
        return seconds

    @cached_property
    def added_step_s(self) -> Numbers:
        """What this request adds to every decode step of the others."""
        held = self.request.prompt_tokens + self.knowledge.output_tokens / 2
        seconds: Numbers = self._per_row[SEQUENCE] + held * self._per_row[CONTEXT]
        return seconds

    @cached_property
    def kv_bytes(self) -> Numbers:
        """KV that would have to move to each replica: what its own cache does not hold."""
        return (self.request.prompt_tokens - self.cached_tokens) * self.columns["kv_bytes_per_token"]

    @cached_property
    def fill(self) -> Numbers:
        """The share of a replica's blocks that is expected to be taken with this request in it, 1 when all are."""
        tokens = self.request.prompt_tokens + self.knowledge.output_tokens
        need = np.ceil(tokens / self.columns["block_size"])
        share: Numbers = (self.columns["expected_blocks"] + need) / self.columns["total_blocks"]
        return share
