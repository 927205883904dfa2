"""Joint choice of the prefill-decode pair by what it costs everybody, in seconds. Pure.

The cost of a pair is a sum of what its prefill replica costs, what its decode replica costs, and what moving the KV
cache between them costs beyond the computation that hides it. Only the last depends on both, so the best of either
side are found by columns and only those are paired.
"""

from __future__ import annotations

import random

import numpy as np

from deployments.fleet_view import Codes, Flags, Numbers
from deployments.messages import Role
from deployments.policy.placement import Choice, Field, near_s

CANDIDATES = 32
"""The best of each side that are paired."""

FULL = 0.98
"""A fill from here on costs as much as this: the barrier has no pole."""


class Joint:
    """See the module. Chance decides between near-equals, in proportion to the free blocks that would be left."""

    weighs_splitting = True

    def pair(self, here: Field, owners: Flags, helpers: Flags) -> Choice | None:
        decode, prefill = here.columns(Role.DECODE), here.columns(Role.PREFILL)
        best: list[tuple[float, int, int]] = []
        decode_s, prefill_s = _decode_s(here, Role.DECODE), _first_token_s(here, Role.PREFILL)
        for engine in np.unique(decode.fingerprint[owners]):
            there = np.flatnonzero(owners & (decode.fingerprint == engine))
            here_too = np.flatnonzero(helpers & (prefill.fingerprint == engine))
            if here_too.size:
                best += _paired(here, _least(decode_s, there), _least(prefill_s, here_too), decode_s, prefill_s)
        if not best:
            return None
        cost_s, owner, helper = _pick(here, best)
        return Choice(owner, helper, cost_s)

    def alone(self, here: Field, role: Role, owners: Flags) -> Choice:
        """Prefill beside the running requests makes every one of them wait for it."""
        weights, columns = here.settings.weights, here.columns(role)
        cost_s = _decode_s(here, role) + _first_token_s(here, role)
        cost_s = cost_s + weights.others * columns["sessions"] * here.outlook(role).prefill_s()
        rows = _least(cost_s, np.flatnonzero(owners))
        best_s, owner, _ = _pick(here, [(float(cost_s[row]), int(row), -1) for row in rows], role)
        return Choice(owner, None, best_s)


def _first_token_s(here: Field, role: Role) -> Numbers:
    """What it costs to have the prompt computed on each replica."""
    weights, outlook = here.settings.weights, here.outlook(role)
    ttft_s = outlook.queue_s() + outlook.prefill_s()
    late_s = np.maximum(ttft_s - here.objectives[0], 0.0)
    return weights.ttft * ttft_s + weights.late * late_s - _pin(here, role)


def _decode_s(here: Field, role: Role) -> Numbers:
    """What it costs to have the answer written on each replica: to this request, to the others, and in memory."""
    weights, outlook, columns = here.settings.weights, here.outlook(role), here.columns(role)
    steps, step_s = max(here.knowledge.output_tokens, 1.0), outlook.step_s()
    late_s = np.maximum(step_s - here.objectives[1], 0.0)
    others = weights.others * columns["sessions"] * outlook.added_step_s()
    fill = np.clip(outlook.fill(), 0.0, FULL)
    barrier = weights.memory_s * fill / (1.0 - fill)
    cost_s: Numbers = steps * (weights.decode * step_s + others + weights.late * late_s) + barrier - _pin(here, role)
    return cost_s


def _pin(here: Field, role: Role) -> Numbers:
    columns = here.columns(role)
    return columns.by_row(dict.fromkeys(here.knowledge.pinned, here.settings.weights.pin_s))


def _least(cost_s: Numbers, rows: Codes) -> Codes:
    """Of these rows, the `CANDIDATES` that cost least, in no order."""
    if rows.size <= CANDIDATES:
        return rows
    return rows[np.argpartition(cost_s[rows], CANDIDATES)[:CANDIDATES]]


def _paired(
    here: Field, owners: Codes, helpers: Codes, decode_s: Numbers, prefill_s: Numbers
) -> list[tuple[float, int, int]]:
    """The near-equal best of all pairs of these rows, each with its cost."""
    weights, cost_s = here.settings.weights, decode_s[owners, None] + prefill_s[helpers]
    if here.knowledge.link_bytes_per_s:
        moving_s = here.outlook(Role.DECODE).kv_bytes()[owners, None] / here.knowledge.link_bytes_per_s
        cost_s = cost_s + weights.ttft * np.maximum(moving_s - here.outlook(Role.PREFILL).prefill_s()[helpers], 0.0)
    near = np.argwhere(cost_s <= _limit_s(here, float(cost_s.min())))
    return [(float(cost_s[i, j]), int(owners[i]), int(helpers[j])) for i, j in near]


def _limit_s(here: Field, best_s: float) -> float:
    return best_s + near_s(best_s, here.settings.weights)


def _pick(here: Field, candidates: list[tuple[float, int, int]], role: Role = Role.DECODE) -> tuple[float, int, int]:
    """One of the near-equals of these (cost, owner, helper)."""
    limit_s = _limit_s(here, min(cost_s for cost_s, _, _ in candidates))
    near = [candidate for candidate in candidates if candidate[0] <= limit_s]
    return _weighed(here.rng, near, here.columns(role)["free_blocks"]) if len(near) > 1 else near[0]


def _weighed(rng: random.Random, near: list[tuple[float, int, int]], free_blocks: Numbers) -> tuple[float, int, int]:
    return rng.choices(near, [float(free_blocks[owner]) for _, owner, _ in near])[0]
