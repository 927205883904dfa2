"""Joint choice of the prefill-decode pair by what it costs all requests together, in seconds. Pure.

The cost of a pair is the cost of its prefill replica, plus the cost of its decode replica, plus the part of the KV
transfer that the computation does not hide. Only the last depends on both replicas, so the best of each side are found
by columns, and only those are paired.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deployments.fleet.columns import Codes, Columns, Flags, Numbers
from deployments.messages import Role
from deployments.policy.placement.choice import Choice, near_s
from deployments.policy.placement.field import Field

CANDIDATES = 16
"""The number of the best replicas of each side that are paired."""

FULL = 0.98
"""The highest fill that the memory cost is computed with, so that it stays finite."""


class Joint:
    """See the module. Choices of nearly equal cost are drawn at random, in proportion to their free blocks."""

    def pair(self, here: Field, owners: Flags, helpers: Flags) -> Choice | None:
        """The best pair of all engines."""
        decode, prefill = here.columns(Role.DECODE), here.columns(Role.PREFILL)
        if len(decode.engines) == 1 and decode.engines.keys() == prefill.engines.keys():
            return _best_pair(here, np.flatnonzero(owners), np.flatnonzero(helpers))
        best: Choice | None = None
        for engine in decode.engines:
            there = np.flatnonzero(owners & (decode.fingerprint == engine))
            matching = np.flatnonzero(helpers & (prefill.fingerprint == engine))
            if there.size and matching.size:
                choice = _best_pair(here, there, matching)
                best = choice if best is None or choice.cost_s < best.cost_s else best
        return best

    def at_least(self, here: Field, role: Role, owners: Flags) -> float:
        """The cost if no prompt waited on any replica, and the least loaded one decoded fastest."""
        weights, sessions, decode_s = here.settings.weights, _decoding(here.columns(role)), _decode_s(here, role)
        outlook = here.outlook(role)

        def cost_s(decode_s: Any, sessions: Any, prefill_s: Any, beside_s: Any) -> Any:
            return decode_s + weights.ttft * prefill_s + weights.others * sessions * beside_s

        uncached_s = outlook.uncached_prefill_s, outlook.uncached_beside_s
        least_s = float(cost_s(decode_s[owners].min(), sessions[owners].min(), *uncached_s))
        if outlook.hit_rows.size and (able := owners[outlook.hit_rows]).any():
            rows = outlook.hit_rows[able]
            with_hit_s = cost_s(decode_s[rows], sessions[rows], outlook.hit_prefill_s[able], outlook.hit_beside_s[able])
            least_s = min(least_s, float(with_hit_s.min()))
        return least_s - (weights.pin_s if here.knowledge.pinned else 0.0)

    def target(self, here: Field, owners: Flags) -> int:
        """The replica with the least cost of writing the remainder there and moving the KV that its cache lacks."""
        rows = np.flatnonzero(owners)
        cost_s = _decode_s(here, Role.DECODE)[rows]
        if here.knowledge.link_bytes_per_s:
            moving_s = here.outlook(Role.DECODE).kv_bytes(rows) / here.knowledge.link_bytes_per_s
            cost_s = cost_s + here.settings.weights.ttft * moving_s
        return int(rows[_pick(here, cost_s, here.columns(Role.DECODE)["free_blocks"][rows])])

    def alone(self, here: Field, role: Role, owners: Flags) -> Choice:
        """One replica for both. Its prefill makes the steps of the running sessions longer."""
        weights, columns = here.settings.weights, here.columns(role)
        cost_s = _decode_s(here, role) + _first_token_s(here, role)
        cost_s = cost_s + weights.others * _decoding(columns) * here.outlook(role).beside_s
        rows = np.flatnonzero(owners)
        at = _pick(here, cost_s[rows], columns["free_blocks"][rows])
        return Choice(int(rows[at]), None, float(cost_s[rows[at]]))


def _best_pair(here: Field, owners: Codes, helpers: Codes) -> Choice:
    decode_s, prefill_s = _decode_s(here, Role.DECODE), _first_token_s(here, Role.PREFILL)
    owners, helpers = _least(decode_s, owners), _least(prefill_s, helpers)
    cost_s = decode_s[owners, None] + prefill_s[helpers]
    if here.knowledge.link_bytes_per_s:
        moving_s = here.outlook(Role.DECODE).kv_bytes(owners)[:, None] / here.knowledge.link_bytes_per_s
        hidden_s = here.outlook(Role.PREFILL).prefill_s[helpers]
        cost_s = cost_s + here.settings.weights.ttft * np.maximum(moving_s - hidden_s, 0.0)
    free = np.repeat(here.columns(Role.DECODE)["free_blocks"][owners], helpers.size)
    at = _pick(here, cost_s.ravel(), free)
    return Choice(int(owners[at // helpers.size]), int(helpers[at % helpers.size]), float(cost_s.flat[at]))


def _first_token_s(here: Field, role: Role) -> Numbers:
    """The cost of computing the prompt on each replica."""
    weights, outlook = here.settings.weights, here.outlook(role)
    ttft_s = outlook.queue_s + outlook.prefill_s
    cost_s: Numbers = weights.ttft * ttft_s + weights.later * outlook.queue_s
    if here.objectives[0] < np.inf:
        cost_s += weights.late * np.maximum(ttft_s - here.objectives[0], 0.0)
    return _pinned(here, role, cost_s)


def _decoding(columns: Columns) -> Numbers:
    """The sessions of each replica, but those whose prompts another replica has yet to compute."""
    sessions: Numbers = columns["sessions"] - columns["pending"]
    return sessions


def _decode_s(here: Field, role: Role) -> Numbers:
    if role not in here.decode_s:
        here.decode_s[role] = _find_decode_s(here, role)
    return here.decode_s[role]


def _find_decode_s(here: Field, role: Role) -> Numbers:
    """The cost of writing the answer on each replica: to this request, to the other sessions, and in memory."""
    weights, outlook, columns = here.settings.weights, here.outlook(role), here.columns(role)
    steps, step_s = max(here.knowledge.output_tokens, 1.0), outlook.step_s
    cost_s: Numbers = (steps * weights.decode) * step_s
    cost_s += (steps * weights.others) * (columns["sessions"] * outlook.added_step_s)
    if here.objectives[1] < np.inf:
        cost_s += (steps * weights.late) * np.maximum(step_s - here.objectives[1], 0.0)
    fill = np.minimum(outlook.fill, FULL)
    cost_s += weights.memory_s * fill / (1.0 - fill)
    return _pinned(here, role, cost_s)


def _pinned(here: Field, role: Role, cost_s: Numbers) -> Numbers:
    rows = here.columns(role).rows
    for replica_id in here.knowledge.pinned:
        if replica_id in rows:
            cost_s[rows[replica_id]] -= here.settings.weights.pin_s
    return cost_s


def _least(cost_s: Numbers, rows: Codes) -> Codes:
    """The `CANDIDATES` of these rows that cost least, in no order."""
    if rows.size <= CANDIDATES:
        return rows
    return rows[np.argpartition(cost_s[rows], CANDIDATES)[:CANDIDATES]]


def _pick(here: Field, cost_s: Numbers, free_blocks: Numbers) -> int:
    """The index of a choice with the least cost, or nearly: drawn at random, in proportion to free blocks."""
    least_s = float(cost_s.min())
    near = np.flatnonzero(cost_s <= least_s + near_s(least_s, here.settings.weights))
    if near.size == 1:
        return int(near[0])
    up_to = np.cumsum(free_blocks[near] + 1.0)
    return int(near[np.searchsorted(up_to, here.rng.random() * up_to[-1], side="right")])
