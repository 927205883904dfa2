"""The policies of other systems, to compare `joint` with. Pure.

They choose the decode replica and then the prefill replica, and split every request that may be split.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from deployments.fleet.columns import Flags, Numbers
from deployments.messages import Role
from deployments.policy.placement.choice import Choice, Policy
from deployments.policy.placement.field import Field
from deployments.policy.placement.joint import Joint

Score = Callable[[Field, Role], Numbers]
Pick = Callable[[Field, Role, Flags], int]


class OneByOne:
    """A decode replica by `pick`, then a prefill replica with the same engine by `pick`."""

    def __init__(self, pick: Pick) -> None:
        self._pick = pick

    def pair(self, here: Field, owners: Flags, helpers: Flags) -> Choice | None:
        """See `Policy`; the same holds for the other methods."""
        decode, prefill = here.columns(Role.DECODE), here.columns(Role.PREFILL)
        matched = owners & np.isin(decode.fingerprint, prefill.fingerprint[helpers])
        if not matched.any():
            return None
        owner = self._pick(here, Role.DECODE, matched)
        same = helpers & (prefill.fingerprint == decode.fingerprint[owner])
        return Choice(owner, self._pick(here, Role.PREFILL, same))

    def alone(self, here: Field, role: Role, owners: Flags) -> Choice:
        return Choice(self._pick(here, role, owners))

    def target(self, here: Field, owners: Flags) -> int:
        return self._pick(here, Role.DECODE, owners)

    def at_least(self, here: Field, role: Role, owners: Flags) -> float:
        return math.inf


class RoundRobin:
    """Each replica in its turn. The load does not count."""

    def __init__(self) -> None:
        self._last: dict[Role, int] = {}

    def __call__(self, here: Field, role: Role, able: Flags) -> int:
        rows = np.flatnonzero(able)
        after = rows[rows > self._last.get(role, -1)]
        row = int(after[0]) if after.size else int(rows[0])
        self._last[role] = row
        return row


def by_free_blocks(here: Field, role: Role, able: Flags) -> int:
    """At random, in proportion to free KV blocks: RTP-LLM's weighted round robin, without its turns."""
    rows = np.flatnonzero(able)
    weights = np.maximum(here.columns(role)["free_blocks"][rows], 1.0)
    return int(here.rng.choices(rows.tolist(), weights.tolist())[0])


def power_of_two(here: Field, role: Role, able: Flags) -> int:
    """Of two replicas drawn at random, the one with fewer sessions (Mitzenmacher)."""
    rows = np.flatnonzero(able).tolist()
    two = rows if len(rows) < 2 else here.rng.sample(rows, 2)
    sessions = here.columns(role)["sessions"]
    return int(min(two, key=lambda row: float(sessions[row])))


def tokens(here: Field, role: Role) -> Numbers:
    """The load of each replica: prompt tokens that it has yet to compute, plus tokens held."""
    columns = here.columns(role)
    return columns["backlog_tokens"] + columns["held_tokens"]


def least(score: Score) -> Pick:
    """The replica with the lowest score; equal ones are drawn at random."""

    def pick(here: Field, role: Role, able: Flags) -> int:
        rows = np.flatnonzero(able)
        scores = score(here, role)[rows]
        return int(here.rng.choice(rows[scores == scores.min()].tolist()))

    return pick


def prefix_affinity(here: Field, role: Role, able: Flags) -> int:
    """The replica with the longest cached prefix, unless it is far busier than the others; then the least loaded."""
    rows, load = np.flatnonzero(able), tokens(here, role)
    cached = here.outlook(role).cached_tokens[rows]
    bearable = load[rows] <= BUSIER * float(load[rows].mean()) + here.request.prompt_tokens
    if cached.max() > 0 and bearable[int(cached.argmax())]:
        return int(rows[int(cached.argmax())])
    return least(tokens)(here, role, able)


BUSIER = 1.5
"""The most load of a replica that still gets the prompts it has cached, as a multiple of the mean load."""


class OverlapCost:
    """Prompt blocks to compute plus blocks in use, drawn by softmax, as NVIDIA Dynamo documents its router.

    cost = `overlap_weight` x (prefill blocks that are not cached, with those that wait) + decode blocks, divided by the
    largest cost. At `temperature` 0 the replica with the least cost is taken.
    """

    def __init__(self, overlap_weight: float = 1.0, temperature: float = 0.0) -> None:
        self._overlap_weight, self._temperature = overlap_weight, temperature

    def __call__(self, here: Field, role: Role, able: Flags) -> int:
        columns, rows = here.columns(role), np.flatnonzero(able)
        block = np.maximum(columns["block_size"][rows], 1.0)
        uncached = here.request.prompt_tokens - here.outlook(role).cached_tokens[rows]
        prefill_blocks = (uncached + columns["backlog_tokens"][rows]) / block
        cost = self._overlap_weight * prefill_blocks + columns["held_tokens"][rows] / block
        if self._temperature <= 0:
            return int(here.rng.choice(rows[cost == cost.min()].tolist()))
        scaled = -cost / max(float(cost.max()), 1e-9) / self._temperature
        weights = [math.exp(value) for value in (scaled - scaled.max()).tolist()]
        return int(here.rng.choices(rows.tolist(), weights)[0])


POLICIES: dict[str, Callable[[], Policy]] = {
    "joint": Joint,
    "round_robin": lambda: OneByOne(RoundRobin()),
    "weighted_round_robin": lambda: OneByOne(by_free_blocks),
    "power_of_two": lambda: OneByOne(power_of_two),
    "least_tokens": lambda: OneByOne(least(tokens)),
    "prefix_affinity": lambda: OneByOne(prefix_affinity),
    "overlap_cost": lambda: OneByOne(OverlapCost()),
}
"""The policies by their names in the configuration."""
