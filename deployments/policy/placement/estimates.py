"""What is expected of one request on every replica, in seconds: columns for the placers to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

import numpy as np

from deployments.fleet.columns import Codes, Columns, Kind, Numbers
from deployments.messages import SessionRequest
from deployments.step_cost import Coefficients

NO_ROWS: Codes = np.zeros(0, np.int64)
NO_TOKENS: Numbers = np.zeros(0)
TOKENS_BELOW = 1 << 32
"""More than any number of cached tokens: a kind times this plus the tokens is one number for the two."""

MANY = 16
"""With more hits than this, equal ones are computed once."""

Number = Callable[[Coefficients, Kind, int], float]
"""A number of a kind of replicas, by how many of the prompt's tokens are cached."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The requests that a pool takes, by prompt length, class and adapter. An empty set allows all."""

    min_prompt_tokens: int = 0
    max_prompt_tokens: int | None = None
    classes: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()

    def take(self, request: SessionRequest) -> bool:
        """Whether the pool takes such a request."""
        within = self.min_prompt_tokens <= request.prompt_tokens
        within = within and (self.max_prompt_tokens is None or request.prompt_tokens <= self.max_prompt_tokens)
        of_class = not self.classes or request.priority in self.classes
        adapter = not request.adapter or not self.adapters or request.adapter in self.adapters
        return within and of_class and adapter


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known when a request arrives. All of it may be empty: then only memory and counts decide.

    `hits`: leading blocks of the prompt in a replica's prefix cache, by replica id. `output_tokens`: the expected
    length of the answer. `trusted`: the pools whose step times were learned. `pinned`: the replicas that the request's
    affinity names. `link_bytes_per_s`: between two replicas; 0 where it is not known.
    """

    hits: Mapping[str, int] = field(default_factory=dict)
    output_tokens: float = 0.0
    trusted: frozenset[str] = frozenset()
    pinned: frozenset[str] = frozenset()
    link_bytes_per_s: float = 0.0


class Outlook:
    """One request on every replica of a role. All columns have a row per replica; units are tokens and seconds.

    A number that depends only on the kind of replica is computed once per kind. `hit_rows`: the replicas that have some
    of the prompt in their caches. `hit_tokens`: how much each of them has. With a system prompt that all conversations
    share, that is nearly every replica.
    """

    def __init__(self, request: SessionRequest, columns: Columns, knowledge: Knowledge, now_s: float) -> None:
        self.request, self.columns, self.knowledge, self.now_s = request, columns, knowledge, now_s
        self.hit_rows, self.hit_tokens = self._find_hits(knowledge.hits) if knowledge.hits else (NO_ROWS, NO_TOKENS)

    def _find_hits(self, hits: Mapping[str, int]) -> tuple[Codes, Numbers]:
        rows = np.fromiter(map(self.columns.rows.get, hits, repeat(-1)), np.int64, len(hits))
        blocks = np.fromiter(hits.values(), np.float64, len(hits))
        known = rows >= 0
        rows = rows[known]
        # The last position of a prompt is always computed, also when the whole prompt is cached.
        most = max(0, self.request.prompt_tokens - 1)
        return rows, np.minimum(blocks[known] * self.columns["block_size"][rows], most)

    def cached_on(self, row: int) -> int:
        """Prompt tokens in the prefix cache of the replica in this row."""
        return int(self.cached_tokens[row])

    @cached_property
    def cached_tokens(self) -> Numbers:
        """Prompt tokens in the prefix cache of each replica."""
        column = np.zeros(len(self.columns.ready))
        column[self.hit_rows] = self.hit_tokens
        return column

    @cached_property
    def queue_s(self) -> Numbers:
        """Seconds until the prompts placed before are computed, and at least the time of those behind the first."""
        seconds: Numbers = np.maximum(self.columns["busy_until_s"] - self.now_s, self.columns["behind_s"])
        return seconds

    @cached_property
    def prefill_s(self) -> Numbers:
        """Seconds to compute the part of the prompt that is not cached, on a replica that does nothing else."""
        return self._column(self._prefill_s, self.hit_prefill_s)

    @cached_property
    def hit_prefill_s(self) -> Numbers:
        """The same for `hit_rows` only."""
        return self._of_hits(self._prefill_s)

    @cached_property
    def beside_s(self) -> Numbers:
        """Seconds that computing it adds to the steps of the sessions beside it, which have those steps in any case."""
        return self._column(self._beside_s, self.hit_beside_s)

    @cached_property
    def hit_beside_s(self) -> Numbers:
        """The same for `hit_rows` only."""
        return self._of_hits(self._beside_s)

    def _prefill_s(self, steps: Coefficients, kind: Kind, cached_tokens: int) -> float:
        return steps.prefill_s(self.request.prompt_tokens, cached_tokens, kind.chunk_tokens)

    def _beside_s(self, steps: Coefficients, kind: Kind, cached_tokens: int) -> float:
        return steps.beside_s(self.request.prompt_tokens, cached_tokens)

    def _column(self, number: Number, of_hits: Numbers) -> Numbers:
        column = self.columns.of_kinds(lambda steps, kind: number(steps, kind, 0))
        column[self.hit_rows] = of_hits
        return column

    def _of_hits(self, number: Number) -> Numbers:
        if not self.hit_rows.size:
            return NO_TOKENS
        unlike, places = self._unlike_hits
        found = (divmod(int(hit), TOKENS_BELOW) for hit in unlike)
        seconds = np.array([number(*self.columns.of_kind(kind), cached) for kind, cached in found])
        return seconds if places is None else seconds[places]

    @cached_property
    def _unlike_hits(self) -> tuple[list[float], Codes | None]:
        """Kind and cached tokens of each of `hit_rows` as one number.

        Of many, equal numbers once, and each one's index.
        """
        found = self.columns.kind[self.hit_rows] * TOKENS_BELOW + self.hit_tokens
        if found.size <= MANY:  # for so few, finding equal ones takes longer
            return found.tolist(), None
        unlike, places = np.unique(found, return_inverse=True)
        return unlike.tolist(), places

    @property
    def uncached_prefill_s(self) -> float:
        """The least time of a prefill on a replica that has nothing of the prompt."""
        return self.columns.least_of_kinds(lambda steps, kind: self._prefill_s(steps, kind, 0))

    @property
    def uncached_beside_s(self) -> float:
        """The least time that this prefill adds to the steps of other sessions."""
        return self.columns.least_of_kinds(lambda steps, kind: self._beside_s(steps, kind, 0))

    @cached_property
    def step_s(self) -> Numbers:
        """Seconds of a decode step with this request in it."""
        return self.columns["step_s"] + self.added_step_s

    @cached_property
    def added_step_s(self) -> Numbers:
        """Seconds that this request adds to every decode step of the other sessions."""
        held = self.request.prompt_tokens + self.knowledge.output_tokens / 2
        return self.columns.of_kinds(lambda steps, kind: steps.sequence_s + held * steps.context_s)

    def kv_bytes(self, rows: Codes) -> Numbers:
        """Bytes of KV that would have to move to each of these replicas: what its own cache does not hold."""
        missing = self.request.prompt_tokens - (self.cached_tokens[rows] if self.hit_rows.size else 0.0)
        size: Numbers = missing * self.columns["kv_bytes_per_token"][rows]
        return size

    @cached_property
    def fill(self) -> Numbers:
        """The share of a replica's blocks that is expected to be in use with this request in it; 1 is all."""
        need = self.columns.blocks_for(self.request.prompt_tokens + self.knowledge.output_tokens)
        share: Numbers = (self.columns["expected_blocks"] + need) * self.columns["per_block"]
        return share
