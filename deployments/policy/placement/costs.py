"""What each replica costs as a place of one request, in seconds of all requests together: columns for `joint`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from deployments.fleet.columns import Codes, Flags, Numbers
from deployments.policy.placement.estimates import TINY_S
from deployments.policy.placement.fetch import displaced_s
from deployments.policy.placement.field import Field

FULL = 0.98
"""The highest fill that the memory cost is computed with, so that it stays finite."""

MISS = 1.0
"""A request that is predicted to miss its TTFT objective costs as much as one that is late by this multiple of it."""

ADAPTER = "adapter"
"""The part that is counted once where one replica computes the prompt and writes the answer."""

Part = tuple[str, Numbers]
"""A part of a cost by its name, a column of seconds."""


class Costs:
    """What each replica costs, as one side of a pair or as both. Columns of seconds."""

    def __init__(self, here: Field) -> None:
        self._here, self._weights = here, here.settings.weights
        self._outlook, self._columns = here.outlook, here.columns
        self._steps = max(here.knowledge.output_tokens, 1.0)

    @cached_property
    def alone_s(self) -> Numbers:
        """The replica computes the prompt and writes the answer."""
        cost_s: Numbers = self.prefill_s + self.decode_s
        return cost_s - self._loading_s if self._here.knowledge.adapter_s else cost_s

    @cached_property
    def prefill_s(self) -> Numbers:
        """The replica computes the prompt: to this request, to the answers beside it, and to requests that come later.

        A prompt of W seconds behind a queue of Q seconds makes later requests wait `rate x W x (Q + W/2) / (1 - load)`
        seconds in all (the externality of a job in an M/G/1 queue, Haviv and Ritov). So what a cache saves counts for
        more where prompts queue.
        """
        return _sum(self.prefill_parts())

    def prefill_parts(self) -> Iterator[Part]:
        """What `prefill_s` adds up, by name."""
        weights, outlook = self._weights, self._outlook
        queue_s, prefill_s = outlook.queue_s, outlook.prefill_s
        ttft_s = outlook.ahead_s + prefill_s
        yield "first_token", weights.ttft * (queue_s + prefill_s)
        if outlook.ahead_s is not queue_s:
            yield "brought_cache", weights.ttft * (outlook.ahead_s - queue_s)
        yield "answers_beside", weights.others * (outlook.answers * outlook.beside_s)
        later = outlook.prompts_per_s / (1.0 - outlook.prefill_load)
        yield "later_prompts", weights.later * later * prefill_s * (queue_s + prefill_s / 2)
        yield "arriving_answers", weights.others * outlook.moves_per_s * prefill_s * self.landing_s
        if outlook.fetches:
            yield "displaced_cache", weights.later * displaced_s(outlook)
        if self._here.view.waiting:
            yield "waiting_requests", self.held_up * outlook.beside_s
        if self._here.knowledge.adapter_s:
            yield ADAPTER, self._loading_s
        objective_s = self._here.objectives[0]
        if objective_s < np.inf:
            over_s = ttft_s - self._here.settings.slack * objective_s
            yield "missed_ttft", weights.late * np.where(over_s > 0, over_s + MISS * objective_s, 0.0)
        yield from self._pinned()

    @cached_property
    def decode_s(self) -> Numbers:
        """The replica writes the answer: to this request, the other sessions, prompts that come, and in memory."""
        return _sum(self.decode_parts())

    def decode_parts(self) -> Iterator[Part]:
        """What `decode_s` adds up, by name."""
        weights, outlook, columns, steps = self._weights, self._outlook, self._columns, self._steps
        load, step_s = outlook.prefill_load, self.mixed_step_s
        yield "writing", (steps * weights.decode) * step_s
        beside = columns["sessions"] * outlook.added_step_s
        yield "answers_beside", (steps * weights.others) * beside * self.strain
        yield "later_prompts", weights.others * self.slower * load / (1.0 - load) * (steps * step_s)
        if self._here.view.waiting:
            yield "waiting_requests", self.held_up * (steps * outlook.added_step_s)
        if self._here.knowledge.adapter_s:
            yield ADAPTER, self._loading_s
        objective_s = self._here.objectives[1]
        if objective_s < np.inf:
            over_s = np.maximum(step_s - objective_s, 0.0)
            yield "missed_tpot", weights.late * np.where(over_s > 0, steps * over_s + self._missed_s, 0.0)
        fill = np.minimum(outlook.fill, FULL)
        yield "memory", weights.memory_s * fill / (1.0 - fill)
        yield from self._pinned()

    def are_pairs_over(self, most_s: float, owners: Flags, helpers: Flags) -> bool:
        """Whether every pair costs more than that, for the least of both sides does without the move between them.

        That costs at least 0. `TINY_S` is more than what rounding can take from it.
        """
        if most_s == np.inf or not owners.any() or not helpers.any():
            return False
        return bool(self.receive_s[owners].min() + self.prefill_s[helpers].min() > most_s + TINY_S)

    @cached_property
    def receive_s(self) -> Numbers:
        """The replica writes an answer whose prompt another one computes, without the move of the KV cache."""
        cost_s: Numbers = self.decode_s + self.between_prompts_s
        return cost_s

    @cached_property
    def strain(self) -> Numbers | float:
        """How much a second counts by which an answer takes longer: the less, the farther it is from its objective."""
        objective_s = self._here.objectives[1]
        if objective_s == np.inf:
            return 1.0
        strain: Numbers = np.minimum(self.mixed_step_s / objective_s, 1.0) ** 2
        return strain

    @cached_property
    def _loading_s(self) -> Numbers:
        """What the load of the request's adapter costs, where a replica does not have it."""
        cost_s: Numbers = self._weights.ttft * self._outlook.loading_s
        return cost_s

    @cached_property
    def held_up(self) -> Numbers:
        """How much those that wait to be placed are held up by each second that the replica's answers take longer.

        They wait until answers end. Of all answers that end, each replica has the share of those that it writes.
        """
        answers = self._outlook.answers
        everywhere = max(float(answers @ self._columns.ready), 1.0)
        share: Numbers = answers * (self._weights.later * self._here.view.waiting / everywhere)
        return share

    @property
    def _missed_s(self) -> float:
        """What a request that misses an objective costs beyond the seconds by which it is late."""
        ttft_s, tpot_s = self._here.objectives
        return MISS * (ttft_s if ttft_s < np.inf else self._steps * tpot_s)

    @cached_property
    def beside_s(self) -> Numbers:
        """Seconds of a step of the answer in which prompts are computed as well: as long as the answers allow."""
        outlook = self._outlook
        whole_s = outlook.step_s + outlook.whole_step_s
        step_s: Numbers = np.maximum(np.minimum(self._longest_s, whole_s), outlook.step_s)
        return step_s

    @cached_property
    def _longest_s(self) -> Numbers:
        outlook = self._outlook
        return outlook.beside_step_s(outlook.answers + 1.0, outlook.decoding_more_s, self._here.objectives[1])

    @cached_property
    def mixed_step_s(self) -> Numbers:
        """Seconds from one token of the answer to the next, expected of steps with prompts in them and those without.

        For a share of the time there are prompts in the steps, which are then longer and so fewer: the mean is over the
        time. With a TPOT objective it is over the steps, which is more: such an answer keeps away from prompts, for
        bad luck with a few of them would make it late.
        """
        outlook = self._outlook
        load, alone_s = outlook.prefill_load, outlook.step_s
        if self._here.objectives[1] < np.inf:
            safe_s: Numbers = alone_s + load * (self.beside_s - alone_s)
            return safe_s
        beside_s, alone_s = np.maximum(self.beside_s, TINY_S), np.maximum(alone_s, TINY_S)
        mean_s: Numbers = 1.0 / (load / beside_s + (1.0 - load) / alone_s)
        return mean_s

    @cached_property
    def slower(self) -> Numbers:
        """How much longer a prompt takes on each replica with this answer beside it, as a share of its time without."""
        outlook = self._outlook
        with_it = outlook.share_of(outlook.decoding_more_s, self._longest_s)
        return np.maximum(outlook.share / with_it - 1.0, 0.0)

    @cached_property
    def beside_prompts_s(self) -> Numbers:
        """What the prompts that wait on the replica cost the answer, and what it costs them.

        For as long as there are prompts, a step is longer.
        """
        weights, outlook, prompts = self._weights, self._outlook, self._columns["prompts"]
        waits_s = np.minimum(outlook.queue_s, self._steps * outlook.step_s)
        cost_s: Numbers = weights.decode * waits_s + weights.others * prompts * outlook.queue_s * self.slower
        return np.where(prompts > 0, cost_s, 0.0)

    @cached_property
    def between_prompts_s(self) -> Numbers:
        """The same of an answer that comes from another replica: its KV cache may arrive in the middle of a step."""
        chance = np.where(self._columns["prompts"] > 0, 1.0, self._outlook.prefill_load)
        cost_s: Numbers = self.beside_prompts_s + chance * self.landing_s
        return cost_s

    @cached_property
    def landing_s(self) -> Numbers:
        """What it costs an answer in expectation that its KV cache arrives in the middle of a step with prompts."""
        delay_s = self.beside_s / 2
        cost_s: Numbers = self._weights.decode * delay_s + self.late_s(delay_s, self.spare_s)
        return cost_s

    @cached_property
    def spare_s(self) -> Numbers:
        """The seconds that an answer of the expected length has to spare until it misses its TPOT objective."""
        spare_s: Numbers = np.maximum(self._steps * (self._here.objectives[1] - self.mixed_step_s), TINY_S)
        return spare_s

    def moving_s(self, owners: Codes, helpers: Codes) -> Numbers:
        """What the move of the KV costs each pair: a row per owner, a column per helper.

        The computation hides its part of it. Others' KV moves to the owner as well, by the rate at which answers are
        placed there; it waits for that as long as in an M/D/1 queue.
        """
        outlook = self._outlook
        move_s = outlook.kv_bytes(owners) / self._here.knowledge.link_bytes_per_s
        prefill_s = outlook.prefill_s[helpers]
        load = outlook.link_load[owners]
        queue_s = move_s * load / (1.0 - load) / 2
        waits_s = np.maximum(move_s[:, None] - prefill_s, 0.0) + queue_s[:, None]
        cost_s: Numbers = self._weights.decode * waits_s + self.late_s(waits_s, self.spare_s[owners, None])
        return cost_s

    def late_s(self, delay_s: Numbers, spare_s: Numbers) -> Numbers:
        """What it costs in expectation that the answer goes on so much later than after its first token.

        `spare_s`: see there. Lengths are taken to be exponentially distributed, so a short answer is late where one of
        the expected length is not.
        """
        if self._here.objectives[1] == np.inf:
            return np.zeros_like(delay_s)
        chance = -np.expm1(-delay_s / spare_s)
        cost_s: Numbers = self._weights.late * (delay_s - spare_s * chance + self._missed_s * chance)
        return cost_s

    def _pinned(self) -> Iterator[Part]:
        """What the request's affinity takes off the replicas that it names."""
        rows = self._columns.rows
        named = [rows[replica_id] for replica_id in self._here.knowledge.pinned if replica_id in rows]
        if named:
            cost_s = np.zeros(len(self._columns.ready))
            cost_s[named] -= self._weights.pin_s
            yield "affinity", cost_s


def _sum(parts: Iterator[Part]) -> Numbers:
    """The sum of new columns, of which the first becomes the sum."""
    cost_s = next(parts)[1]
    for _, part_s in parts:
        cost_s += part_s
    return cost_s
