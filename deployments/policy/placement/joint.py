"""Joint choice of the replicas by what it costs all requests together, in seconds. Pure.

Every way is weighed: each replica alone, and each pair of one that prefills and one that decodes. What a replica costs
as the one that prefills, and as the one that decodes, are columns (`costs`). The cost of one replica alone is the sum
of its two, with the load of an adapter counted once. The cost of a pair is the sum of one each, plus the part of the KV
transfer that the computation does not hide. Only that depends on both, so only the best of each side are paired, and
none where the least of both sides together costs too much already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from deployments.fleet.columns import Codes, Flags, Numbers
from deployments.policy.placement.choice import Choice, near_s
from deployments.policy.placement.costs import Costs
from deployments.policy.placement.field import Field

CANDIDATES = 16
"""The number of the best replicas of each side that are paired."""

SATURATED = 0.5
"""The share of its time that a replica computes prompts, from which on it takes no answers if it can help it."""

LINK_SHARE = 0.3
"""The share of a link that the KV of a replica's answers takes, from which on others take answers as well."""

Ways = tuple[Codes, Codes, Numbers]
"""Owners, helpers (-1: none) and costs in seconds."""


class Joint:
    """See the module. Choices of nearly equal cost are drawn at random, in proportion to their free blocks."""

    def choose(self, here: Field) -> Choice | None:
        """The way that costs least."""
        return next(filter(None, (_pick(here, ways) for ways in ways_of(here, Costs(here)))), None)

    def target(self, here: Field, owners: Flags) -> int:
        """The replica with the least cost of writing the remainder there and moving the KV that its cache lacks."""
        rows, costs = np.flatnonzero(owners), Costs(here)
        cost_s = costs.receive_s[rows]
        if here.knowledge.link_bytes_per_s:
            moving_s = here.outlook.kv_bytes(rows) / here.knowledge.link_bytes_per_s
            cost_s = cost_s + here.settings.weights.ttft * moving_s
        return int(rows[_draw(here, cost_s, rows)])


def ways_of(here: Field, costs: Costs, all_pairs: bool = False) -> Iterator[list[Ways]]:
    """The ways that are weighed against each other, in sets: the first that is not empty counts.

    `all_pairs`: also where every pair costs more than the best replica alone, so that none is worth weighing. It
    keeps to the roles with `split_always`, and while no step times are known: all costs are near 0 then, and one
    replica would always seem to cost less than two.
    """
    if here.columns.coefficients and not here.settings.split_always:
        spare = has_spare_steps(here)
        alone = list(_alone(costs, here.alone & spare))
        owning, helping, most_s = here.pair_owners & spare, here.helpers, _most_s(here, alone)
        is_over = not all_pairs and costs.are_pairs_over(most_s, owning, helping)
        pairs = () if is_over else _pairs(here, costs, owning, helping)
        yield [*pairs, *alone]
        return
    for owners, helpers in here.by_role():
        yield list(_alone(costs, owners) if helpers is None else _pairs(here, costs, owners, helpers))


def has_spare_steps(here: Field) -> Flags:
    """The replicas that take answers: all but those that compute prompts nearly all the time.

    A TPOT objective makes every step of the prompts beside the answer shorter, and all that wait for their prompts hold
    memory meanwhile. Where all others compute prompts all the time, or have no link to spare for more answers, every
    replica takes them. An answer without that objective goes anywhere: prompts keep their share of the time beside it.
    """
    outlook, columns = here.outlook, here.columns
    spare = outlook.prefill_load < (SATURATED if here.objectives[1] < np.inf else np.inf)
    able = spare & columns.ready & columns.decodes & (outlook.link_load < LINK_SHARE)
    return spare if able.any() else np.ones_like(spare)


def _alone(costs: Costs, able: Flags) -> Iterator[Ways]:
    rows = np.flatnonzero(able)
    if rows.size:
        yield rows, np.full(rows.size, -1), costs.alone_s[rows]


def _pairs(here: Field, costs: Costs, owning: Flags, helping: Flags) -> Iterator[Ways]:
    """The best pairs of each engine."""
    if not owning.any() or not helping.any():
        return
    for same in here.columns.by_engine():
        owners = _least(costs.receive_s, np.flatnonzero(owning & same))
        helpers = _least(costs.prefill_s, np.flatnonzero(helping & same))
        cost_s = costs.receive_s[owners, None] + costs.prefill_s[helpers]
        if here.knowledge.link_bytes_per_s:
            cost_s += costs.moving_s(owners, helpers)
        at, by = np.nonzero(owners[:, None] != helpers)
        if at.size:
            yield owners[at], helpers[by], cost_s[at, by]


def _most_s(here: Field, ways: Sequence[Ways]) -> float:
    """The most that a way may cost to be drawn beside these; infinite without any."""
    least_s = min((float(cost_s.min()) for _, _, cost_s in ways), default=np.inf)
    return least_s + near_s(least_s, here.settings.weights) if ways else np.inf


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
