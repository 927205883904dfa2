"""The policies that people use elsewhere, to compare `joint` with. Pure; each chooses among those that fit.

They choose the decode and the prefill replica one after the other, and split whatever may be split.
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
    """Each in its turn, whatever it has to do."""

    def __init__(self) -> None:
        self._last: dict[Role, int] = {}

    def __call__(self, here: Field, role: Role, able: Flags) -> int:
        rows = np.flatnonzero(able)
        after = rows[rows > self._last.get(role, -1)]
        row = int(after[0]) if after.size else int(rows[0])
        self._last[role] = row
        return row


def by_free_blocks(here: Field, role: Role, able: Flags) -> int:
    """By chance, in proportion to free KV blocks: weighted round robin, as RTP-LLM has it, without its turns."""
    rows = np.flatnonzero(able)
    weights = np.maximum(here.columns(role)["free_blocks"][rows], 1.0)
    return int(here.rng.choices(rows.tolist(), weights.tolist())[0])


def power_of_two(here: Field, role: Role, able: Flags) -> int:
    """The one with fewer sessions of two drawn by chance (Mitzenmacher)."""
    rows = np.flatnonzero(able).tolist()
    two = rows if len(rows) < 2 else here.rng.sample(rows, 2)
    sessions = here.columns(role)["sessions"]
    return int(min(two, key=lambda row: float(sessions[row])))


def tokens(here: Field, role: Role) -> Numbers:
    """Prompt tokens to compute and tokens held."""
    columns = here.columns(role)
    return columns["backlog_tokens"] + columns["held_tokens"]


def least(score: Score) -> Pick:
    """The one with the lowest score; chance decides between equals."""

    def pick(here: Field, role: Role, able: Flags) -> int:
        rows = np.flatnonzero(able)
        scores = score(here, role)[rows]
        return int(here.rng.choice(rows[scores == scores.min()].tolist()))

    return pick


def prefix_affinity(here: Field, role: Role, able: Flags) -> int:
    """The longest prefix in its cache, while it is not far busier than others; then the least tokens."""
    rows, load = np.flatnonzero(able), tokens(here, role)
    cached = here.outlook(role).cached_tokens[rows]
    bearable = load[rows] <= BUSIER * float(load[rows].mean()) + here.request.prompt_tokens
    if cached.max() > 0 and bearable[int(cached.argmax())]:
        return int(rows[int(cached.argmax())])
    return least(tokens)(here, role, able)


BUSIER = 1.5
"""How many times the mean load a replica may have and still get what it has cached."""


class OverlapCost:
    """Prompt blocks to compute plus blocks in use, drawn by softmax, as NVIDIA Dynamo documents its router.

    cost = `overlap_weight` x (prefill blocks not cached, with those that wait) + decode blocks, divided by the largest;
    temperature 0 takes the least.
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
"""By the name that the configuration uses."""
