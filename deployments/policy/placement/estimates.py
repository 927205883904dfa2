"""What is expected of one request on every replica, in seconds: columns for the placers to compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import repeat

import numpy as np

from deployments.fleet.columns import Codes, Columns, Kind, Numbers
from deployments.fleet.flow import WINDOW_S
from deployments.messages import SessionRequest
from deployments.policy.placement.fetch import Fetched, brought_s, fetched
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.step_size import LEAST_SHARE, PROMPT_SHARE, STEADY
from deployments.step_cost import Coefficients

NO_ROWS: Codes = np.zeros(0, np.int64)
NO_TOKENS: Numbers = np.zeros(0)
TOKENS_BELOW = 1 << 32
"""More than any number of cached tokens: a kind times this plus the tokens is one number for the two."""

MANY = 16
"""With more hits than this, equal ones are computed once."""

MOST_LOAD = 0.95
"""The highest load by prompts that is computed with, so that what is divided by the rest stays finite."""

TINY_S = 1e-9
"""Stands for 0 where something is divided by it."""

Number = Callable[[Coefficients, Kind, int], float]
"""A number of a kind of replicas, by how many of the prompt's tokens are cached."""


class Outlook:
    """One request on every replica. All columns have a row per replica; units are tokens and seconds.

    A number that depends only on the kind of replica is computed once per kind. `hit_rows`: the replicas that have some
    of the prompt in their caches. `hit_tokens`: how much each of them has. With a system prompt that all conversations
    share, that is nearly every replica. `prompt_share`: as in the configuration. `may_fetch`: a replica may fetch what
    another one's cache has; then what is left to compute counts.
    """

    def __init__(
        self,
        request: SessionRequest,
        columns: Columns,
        knowledge: Knowledge,
        now_s: float,
        prompt_share: float = PROMPT_SHARE,
        may_fetch: bool = False,
    ) -> None:
        self.request, self.columns, self.knowledge, self.now_s = request, columns, knowledge, now_s
        self._prompt_share, self._may_fetch = prompt_share, may_fetch
        self.hit_rows, self.hit_tokens = self.found(knowledge.hits) if knowledge.hits else (NO_ROWS, NO_TOKENS)

    def found(self, hits: Mapping[str, int]) -> tuple[Codes, Numbers]:
        """The rows of replicas, and the tokens of these blocks of the prompt."""
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
    def fetches(self) -> tuple[Fetched, ...]:
        """Where a part of the prompt would be fetched."""
        return tuple(fetched(self)) if self._may_fetch and self.hit_rows.size else ()

    @cached_property
    def ahead_s(self) -> Numbers:
        """Seconds until the prompt's turn: those before it are computed, and what is loaded or fetched is there."""
        if not self.fetches and not self.knowledge.resident:
            return self.queue_s
        seconds: Numbers = np.maximum(self.queue_s, brought_s(self))
        return seconds

    @cached_property
    def loading_s(self) -> Numbers:
        """Seconds to load the request's adapter where a replica does not have it."""
        if not self.knowledge.adapter_s:
            return np.zeros(len(self.columns.ready))
        column = np.full(len(self.columns.ready), self.knowledge.adapter_s)
        column[[self.columns.rows[each] for each in self.knowledge.adapter_on if each in self.columns.rows]] = 0.0
        return column

    @cached_property
    def beside_s(self) -> Numbers:
        """Seconds that the part of the prompt that is computed adds to the steps that compute it."""
        return self._column(self._beside_s) if self.fetches else self.whole_beside_s

    @cached_property
    def whole_beside_s(self) -> Numbers:
        """The same where nothing is fetched."""
        return self._cached_column(self._beside_s)

    def beside_from(self, cached_tokens: int) -> Numbers:
        """The same where each replica has so much of the prompt."""
        return self._column_at(self._beside_s, cached_tokens)

    @cached_property
    def prefill_s(self) -> Numbers:
        """Seconds to compute that part, in steps that also give the running answers their tokens."""
        seconds: Numbers = self.beside_s / self.share
        return seconds

    @cached_property
    def answers(self) -> Numbers:
        """The answers that are being written on each replica."""
        columns = self.columns
        answers: Numbers = np.maximum(columns["sessions"] - columns["pending"] - columns["prompts"], 0.0)
        return answers

    @cached_property
    def objective_s(self) -> Numbers:
        """The least TPOT objective of the answers on each replica, running and pending; infinite without any."""
        least_s = self.columns["tpot_s"]
        objective_s: Numbers = np.where(least_s > 0, least_s, np.inf)
        return objective_s

    @cached_property
    def prompts_per_s(self) -> Numbers:
        """The prompts that are placed on each replica in a second, lately."""
        rate: Numbers = self.columns["flow_prompts"] * self._flow_left
        return rate

    @cached_property
    def moves_per_s(self) -> Numbers:
        """The answers that are placed on each replica in a second, lately, and whose KV comes from another one."""
        rate: Numbers = self.columns["flow_moves"] * self._flow_left
        return rate

    @cached_property
    def link_load(self) -> Numbers:
        """The share of its time that each replica's link brings the KV of answers, lately; 0 for an unknown link."""
        link = self.knowledge.link_bytes_per_s or np.inf
        load: Numbers = np.minimum(self.columns["flow_bytes"] * self._flow_left / link, MOST_LOAD)
        return load

    @cached_property
    def prefill_load(self) -> Numbers:
        """The share of its time that each replica computes prompts, lately."""
        load: Numbers = np.minimum(self.columns["flow_s"] * self._flow_left, MOST_LOAD)
        return load

    @cached_property
    def _flow_left(self) -> Numbers:
        left: Numbers = np.exp((self.columns["flow_at_s"] - self.now_s) / WINDOW_S) / WINDOW_S
        return left

    @cached_property
    def decoding_s(self) -> Numbers:
        """Seconds of a step without prompts, with the answers of now."""
        seconds: Numbers = self._base_s + self.answers * self._answer_s
        return seconds

    @cached_property
    def decoding_more_s(self) -> Numbers:
        """Seconds of a step without prompts, with one more answer."""
        seconds: Numbers = self._base_s + (self.answers + 1.0) * self._answer_s
        return seconds

    def beside_step_s(self, answers: Numbers, decoding_s: Numbers, tpot_s: float = math.inf) -> Numbers:
        """The longest step with prompts in it, beside so many answers; infinite without any.

        `decoding_s`: what the step takes without prompts. `tpot_s`: the objective of one more answer.
        """
        longest_s = STEADY * np.minimum(self.objective_s, tpot_s)
        if tpot_s == math.inf:
            free_s = np.where(answers + self.columns["pending"] > 0, decoding_s / (1.0 - self._prompt_share), np.inf)
            longest_s = np.where(longest_s < np.inf, longest_s, free_s)
        step_s: Numbers = np.maximum(longest_s, decoding_s / (1.0 - LEAST_SHARE))
        return step_s

    def share_of(self, decoding_s: Numbers, longest_s: Numbers) -> Numbers:
        """The share of each step that goes to prompts, beside its answers. `longest_s`: see `beside_step_s`.

        A step is as long as its decoding and one chunk take, or as long as the answers allow.
        """
        step_s = np.minimum(longest_s, decoding_s + self.chunk_s)
        share: Numbers = 1.0 - decoding_s / np.maximum(step_s, TINY_S)
        return np.maximum(share, TINY_S)

    @cached_property
    def share(self) -> Numbers:
        """The share of each step that goes to prompts, beside the answers of now."""
        return self.share_of(self.decoding_s, self.beside_step_s(self.answers, self.decoding_s))

    @cached_property
    def _base_s(self) -> Numbers:
        return self.columns["base_s"]

    @cached_property
    def _answer_s(self) -> Numbers:
        """Seconds that one of the running answers adds to a step."""
        seconds: Numbers = (self.columns["step_s"] - self._base_s) / np.maximum(self.columns["sessions"], 1.0)
        return seconds

    @cached_property
    def whole_step_s(self) -> Numbers:
        """Seconds of the longest step that computes prompts alone: it cannot be interrupted."""
        return self.columns["whole_step_s"]

    @cached_property
    def chunk_s(self) -> Numbers:
        """Seconds that one chunk of the prompt adds to a step, where nothing limits it but the size of a step."""
        seconds: Numbers = self.beside_s / self._column(self._chunks)
        return seconds

    def _beside_s(self, steps: Coefficients, kind: Kind, cached_tokens: int) -> float:
        return steps.beside_s(self.request.prompt_tokens, cached_tokens)

    def _chunks(self, steps: Coefficients, kind: Kind, cached_tokens: int) -> float:
        return -(-(self.request.prompt_tokens - cached_tokens) // kind.chunk_tokens)

    def _column(self, number: Number) -> Numbers:
        column = self._cached_column(number)
        for each in self.fetches:
            column[each.rows] = self._column_at(number, each.tokens)[each.rows]
        return column

    def _column_at(self, number: Number, cached_tokens: int) -> Numbers:
        """A number where each replica has so much of the prompt."""
        return self.columns.of_kinds(lambda steps, kind: number(steps, kind, cached_tokens))

    def _cached_column(self, number: Number) -> Numbers:
        """A number by what each replica has in its own cache."""
        column = self._column_at(number, 0)
        if self.hit_rows.size:
            column[self.hit_rows] = self._of_hits(number)
        return column

    def _of_hits(self, number: Number) -> Numbers:
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
