"""Joint choice of the replicas by what it costs all requests together, in seconds. Pure.

Every way is weighed: each replica alone, and each pair of one that prefills and one that decodes. What a replica costs
as the one that prefills, and what it costs as the one that decodes, are columns. The cost of one replica alone is the
sum of its two. The cost of a pair is the sum of one each, plus the part of the KV transfer that the computation does
not hide. Only that part depends on both, so the best of each side are found by columns, and only those are paired.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from deployments.fleet.columns import Codes, Flags, Numbers
from deployments.policy.placement.choice import Choice, near_s
from deployments.policy.placement.estimates import TINY_S
from deployments.policy.placement.field import Field

CANDIDATES = 16
"""The number of the best replicas of each side that are paired."""

FULL = 0.98
"""The highest fill that the memory cost is computed with, so that it stays finite."""

MISS = 1.0
"""A request that is predicted to miss its TTFT objective costs as much as one that is late by this multiple of it."""

SATURATED = 0.5
"""The share of its time that a replica computes prompts, from which on it takes no answers if it can help it."""

Ways = tuple[Codes, Codes, Numbers]
"""Owners, helpers (-1: none) and costs in seconds."""


class Joint:
    """See the module. Choices of nearly equal cost are drawn at random, in proportion to their free blocks."""

    def choose(self, here: Field) -> Choice | None:
        """The way that costs least.

        It keeps to the roles with `split_always`, and while no step times are known: all costs are near 0 then, and one
        replica would always seem to cost less than two.
        """
        costs = Costs(here)
        if here.columns.coefficients and not here.settings.split_always:
            spare = _has_spare_steps(here)
            pairs = _pairs(here, costs, here.pair_owners & spare, here.helpers)
            return _pick(here, [*pairs, *_alone(costs, here.alone & spare)])
        for owners, helpers in here.by_role():
            ways = _alone(costs, owners) if helpers is None else _pairs(here, costs, owners, helpers)
            if (choice := _pick(here, list(ways))) is not None:
                return choice
        return None

    def target(self, here: Field, owners: Flags) -> int:
        """The replica with the least cost of writing the remainder there and moving the KV that its cache lacks."""
        rows = np.flatnonzero(owners)
        cost_s = Costs(here).decode_s[rows]
        if here.knowledge.link_bytes_per_s:
            moving_s = here.outlook.kv_bytes(rows) / here.knowledge.link_bytes_per_s
            cost_s = cost_s + here.settings.weights.ttft * moving_s
        return int(rows[_draw(here, cost_s, rows)])


class Costs:
    """What each replica costs, as one side of a pair or as both. Columns of seconds."""

    def __init__(self, here: Field) -> None:
        self._here, self._weights, self._outlook, self._columns = (
            here,
            here.settings.weights,
            here.outlook,
            here.columns,
        )
        self._steps = max(here.knowledge.output_tokens, 1.0)

    @cached_property
    def alone_s(self) -> Numbers:
        """The replica computes the prompt and writes the answer."""
        seconds: Numbers = self.prefill_s + self.decode_s
        return seconds

    @cached_property
    def prefill_s(self) -> Numbers:
        """The replica computes the prompt: to this request, to the answers beside it, and to requests that come later.

        A prompt of W seconds behind a queue of Q seconds makes later requests wait `rate x W x (Q + W/2) / (1 - load)`
        seconds in all (the externality of a job in an M/G/1 queue, Haviv and Ritov). So what a cache saves counts for
        more where prompts queue.
        """
        weights, outlook = self._weights, self._outlook
        queue_s, prefill_s = outlook.queue_s, outlook.prefill_s
        ttft_s = queue_s + prefill_s
        cost_s: Numbers = weights.ttft * ttft_s + weights.others * (outlook.answers * outlook.beside_s)
        later = outlook.prompts_per_s / (1.0 - outlook.prefill_load)
        cost_s += weights.later * later * prefill_s * (queue_s + prefill_s / 2)
        objective_s = self._here.objectives[0]
        if objective_s < np.inf:
            over_s = ttft_s - self._here.settings.slack * objective_s
            cost_s += weights.late * np.where(over_s > 0, over_s + MISS * objective_s, 0.0)
        return self._pinned(cost_s)

    @cached_property
    def decode_s(self) -> Numbers:
        """The replica writes the answer: to this request, to the other sessions, to prompts that come, and in memory.

        While a prompt is computed, steps are as long as the answers allow, and prompts get a smaller share of them.
        """
        weights, outlook, columns, steps = self._weights, self._outlook, self._columns, self._steps
        longest_s = outlook.beside_step_s(outlook.answers + 1.0, self._here.objectives[1])
        beside_s = np.maximum(np.minimum(longest_s, outlook.step_s + outlook.whole_step_s), outlook.step_s)
        load = outlook.prefill_load
        step_s = outlook.step_s + load * (beside_s - outlook.step_s)
        cost_s: Numbers = (steps * weights.decode) * step_s
        cost_s += (steps * weights.others) * (columns["sessions"] * outlook.added_step_s)
        cost_s += weights.others * self.slower * load / (1.0 - load) * (steps * step_s)
        if self._here.objectives[1] < np.inf:
            cost_s += (steps * weights.late) * np.maximum(step_s - self._here.objectives[1], 0.0)
        fill = np.minimum(outlook.fill, FULL)
        cost_s += weights.memory_s * fill / (1.0 - fill)
        return self._pinned(cost_s)

    @cached_property
    def slower(self) -> Numbers:
        """How much longer a prompt takes on each replica with this answer beside it, as a share of its time without."""
        outlook = self._outlook
        with_it = outlook.share(outlook.answers + 1.0, self._here.objectives[1])
        slower = outlook.share(outlook.answers) / with_it - 1.0
        return np.maximum(slower, 0.0)

    @cached_property
    def between_prompts_s(self) -> Numbers:
        """What the replica's prompts cost an answer that comes from another one, and what it costs them.

        For as long as there are prompts, a step is longer. The KV cache arrives in the middle of a step, and has to
        wait until that ends. An answer of few tokens may be late by that alone.
        """
        weights, outlook, prompts = self._weights, self._outlook, self._columns["prompts"]
        waits_s = np.minimum(outlook.queue_s, self._steps * outlook.step_s)
        cost_s: Numbers = weights.decode * waits_s + weights.others * prompts * outlook.queue_s * self.slower
        cost_s = np.where(prompts > 0, cost_s, 0.0)
        whole_s = np.maximum(outlook.whole_step_s, outlook.chunk_s)
        step_s = np.minimum(outlook.beside_step_s(outlook.answers), whole_s)
        chance = np.where(prompts > 0, 1.0, outlook.prefill_load)
        cost_s += weights.decode * chance * step_s / 2
        objective_s = self._here.objectives[1]
        if objective_s < np.inf:
            spare_s = np.maximum(self._steps * (objective_s - outlook.step_s), TINY_S)
            cost_s += weights.late * chance * _late_s(step_s, spare_s)
        return cost_s

    def _pinned(self, cost_s: Numbers) -> Numbers:
        rows = self._columns.rows
        for replica_id in self._here.knowledge.pinned:
            if replica_id in rows:
                cost_s[rows[replica_id]] -= self._weights.pin_s
        return cost_s


def _has_spare_steps(here: Field) -> Flags:
    """The replicas that take answers: all but those that compute prompts nearly all the time.

    An answer there makes every step of the prompts shorter, and all that wait for their prompts hold memory meanwhile.
    Where all replicas compute prompts all the time, all of them take answers.
    """
    spare = here.outlook.prefill_load < SATURATED
    return spare if (spare & here.columns.ready & here.columns.decodes).any() else np.ones_like(spare)


def _late_s(delay_s: Numbers, spare_s: Numbers) -> Numbers:
    """The expected seconds by which an answer is late after a delay.

    `spare_s`: the time that an answer of the expected length has to spare. Lengths are taken to be exponentially
    distributed, so a short answer is late where one of the expected length is not.
    """
    late: Numbers = delay_s + spare_s * np.expm1(-delay_s / spare_s)
    return late


def _alone(costs: Costs, able: Flags) -> Iterator[Ways]:
    rows = np.flatnonzero(able)
    if rows.size:
        yield rows, np.full(rows.size, -1), costs.alone_s[rows]


def _pairs(here: Field, costs: Costs, owning: Flags, helping: Flags) -> Iterator[Ways]:
    """The best pairs of each engine."""
    if not owning.any() or not helping.any():
        return
    decode_s = costs.decode_s + costs.between_prompts_s
    engines = here.columns.engines
    for same in (np.True_,) if len(engines) == 1 else map(here.columns.is_engine, engines):
        owners = _least(decode_s, np.flatnonzero(owning & same))
        helpers = _least(costs.prefill_s, np.flatnonzero(helping & same))
        cost_s = decode_s[owners, None] + costs.prefill_s[helpers]
        if here.knowledge.link_bytes_per_s:
            moving_s = here.outlook.kv_bytes(owners)[:, None] / here.knowledge.link_bytes_per_s
            cost_s += here.settings.weights.ttft * np.maximum(moving_s - here.outlook.prefill_s[helpers], 0.0)
        at, by = np.nonzero(owners[:, None] != helpers)
        if at.size:
            yield owners[at], helpers[by], cost_s[at, by]


def _least(cost_s: Numbers, rows: Codes) -> Codes:
    """The `CANDIDATES` of these rows that cost least, in no order."""
    if rows.size <= CANDIDATES:
        return rows
    return rows[np.argpartition(cost_s[rows], CANDIDATES)[:CANDIDATES]]


def _pick(here: Field, ways: Sequence[Ways]) -> Choice | None:
    """The cheapest of these ways, or one that costs nearly as little."""
    if not ways:
        return None
    owners, helpers, cost_s = ways[0] if len(ways) == 1 else tuple(map(np.concatenate, zip(*ways, strict=True)))
    at = _draw(here, cost_s, owners)
    return Choice(int(owners[at]), None if helpers[at] < 0 else int(helpers[at]))


def _draw(here: Field, cost_s: Numbers, owners: Codes) -> int:
    """The index of one with the least cost, or nearly: drawn at random, in proportion to its owner's free blocks."""
    least_s = float(cost_s.min())
    near = np.flatnonzero(cost_s <= least_s + near_s(least_s, here.settings.weights))
    if near.size == 1:
        return int(near[0])
    up_to = np.cumsum(here.columns["free_blocks"][owners[near]] + 1.0)
    return int(near[np.searchsorted(up_to, here.rng.random() * up_to[-1], side="right")])
