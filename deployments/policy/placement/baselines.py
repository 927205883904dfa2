"""The policies of other systems, to compare `joint` with. Pure.

They keep to the roles: a decode replica is chosen, then a prefill replica for it, and every request that may be split
is split. A mixed replica is both.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from deployments.fleet.columns import Flags, Numbers
from deployments.messages import Mode, Role
from deployments.policy.placement.choice import Choice, Policy
from deployments.policy.placement.field import Field
from deployments.policy.placement.joint import Joint

Score = Callable[[Field], Numbers]
Pick = Callable[[Field, Role, Flags], int]
"""One of the rows with a flag. The role says what for."""


class OneByOne:
    """A decode replica by `pick`, then a prefill replica with the same engine by `pick`."""

    def __init__(self, pick: Pick) -> None:
        self._pick = pick

    def choose(self, here: Field) -> Choice | None:
        """See `Policy`; the same holds for the other method."""
        for owners, helpers in here.by_role():
            choice = self._one(here, owners) if helpers is None else self._pair(here, owners, helpers)
            if choice is not None:
                return choice
        return None

    def _one(self, here: Field, able: Flags) -> Choice | None:
        role = Role.PREFILL if (able & here.columns.is_of(Role.PREFILL)).any() else Role.DECODE
        return Choice(self._pick(here, role, able)) if able.any() else None

    def _pair(self, here: Field, owners: Flags, helpers: Flags) -> Choice | None:
        engines = here.columns.fingerprint
        matched = owners & np.isin(engines, engines[helpers])
        if not matched.any():
            return None
        owner = self._pick(here, Role.DECODE, matched)
        helper = self._pick(here, Role.PREFILL, helpers & (engines == engines[owner]))
        return Choice(owner) if helper == owner else Choice(owner, helper)

    def target(self, here: Field, owners: Flags) -> int:
        kept = owners & ~here.columns.is_of(Role.PREFILL)
        return self._pick(here, Role.DECODE, kept if kept.any() else owners)


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
    weights = np.maximum(here.columns["free_blocks"][rows], 1.0)
    return int(here.rng.choices(rows.tolist(), weights.tolist())[0])


def power_of_two(here: Field, role: Role, able: Flags) -> int:
    """Of two replicas drawn at random, the one with fewer sessions (Mitzenmacher)."""
    rows = np.flatnonzero(able).tolist()
    two = rows if len(rows) < 2 else here.rng.sample(rows, 2)
    sessions = here.columns["sessions"]
    return int(min(two, key=lambda row: float(sessions[row])))


def tokens(here: Field) -> Numbers:
    """The load of each replica: prompt tokens that it has yet to compute, plus tokens held."""
    return here.columns["backlog_tokens"] + here.columns["held_tokens"]


def least(score: Score) -> Pick:
    """The replica with the lowest score; equal ones are drawn at random."""

    def pick(here: Field, role: Role, able: Flags) -> int:
        rows = np.flatnonzero(able)
        scores = score(here)[rows]
        return int(here.rng.choice(rows[scores == scores.min()].tolist()))

    return pick


def prefix_affinity(here: Field, role: Role, able: Flags) -> int:
    """The replica with the longest cached prefix, unless it is far busier than the others; then the least loaded."""
    rows, load = np.flatnonzero(able), tokens(here)
    cached = here.outlook.cached_tokens[rows]
    bearable = load[rows] <= BUSIER * float(load[rows].mean()) + here.request.prompt_tokens
    if cached.max() > 0 and bearable[int(cached.argmax())]:
        return int(rows[int(cached.argmax())])
    return least(tokens)(here, role, able)


BUSIER = 1.5
"""The most load of a replica that still gets the prompts it has cached, as a multiple of the mean load."""


MOSTLY = 0.5
"""The share of a prompt in a replica's cache from which on the prompt is a later turn of what runs there."""


class AppendOnDecode(OneByOne):
    """`ppd`: a first turn is split; a later one is served whole by the decode replica that has most of it cached.

    After PPD (arXiv 2603.13358). Replicas are picked by `tokens`.
    """

    def __init__(self) -> None:
        super().__init__(least(tokens))

    def choose(self, here: Field) -> Choice | None:
        able = np.flatnonzero(here.alone & ~here.columns.is_of(Role.PREFILL))
        if able.size and Mode.DECODE_LOCAL in here.modes:
            cached = here.outlook.cached_tokens[able]
            if cached.max() >= MOSTLY * here.request.prompt_tokens:
                return Choice(int(able[int(cached.argmax())]))
        return super().choose(here)


class MovedOnce(OneByOne):
    """`pinned`: the first request of a client is split; all later ones stay on its decode replica while it has room.

    `CLIENTS`: the most clients that are remembered.
    """

    CLIENTS = 65_536

    def __init__(self) -> None:
        super().__init__(least(tokens))
        self._home: OrderedDict[str, str] = OrderedDict()

    def choose(self, here: Field) -> Choice | None:
        client = here.request.affinity or here.request.client
        row = here.columns.rows.get(self._home.get(client, ""))
        if row is not None and here.alone[row]:
            return Choice(row)
        choice = super().choose(here)
        if choice is not None and client:
            self._home[client] = here.columns.info(choice.owner).replica_id
            if len(self._home) > self.CLIENTS:
                self._home.popitem(last=False)
        return choice


class OverlapCost:
    """Prompt blocks to compute plus blocks in use, drawn by softmax, as NVIDIA Dynamo documents its router.

    cost = `overlap_weight` x (prefill blocks that are not cached, with those that wait) + decode blocks, divided by the
    largest cost. At `temperature` 0 the replica with the least cost is taken.
    """

    def __init__(self, overlap_weight: float = 1.0, temperature: float = 0.0) -> None:
        self._overlap_weight, self._temperature = overlap_weight, temperature

    def __call__(self, here: Field, role: Role, able: Flags) -> int:
        columns, rows = here.columns, np.flatnonzero(able)
        block = np.maximum(columns["block_size"][rows], 1.0)
        uncached = here.request.prompt_tokens - here.outlook.cached_tokens[rows]
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
    "ppd": AppendOnDecode,
    "pinned": MovedOnce,
}
"""The policies by their names in the configuration."""
