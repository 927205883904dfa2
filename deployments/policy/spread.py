"""Hot prefixes: how many replicas are to have one, and which replica gets a copy next. Pure.

Of each placed prompt, the part counts that some replica had already: that is what it shares with prompts before. The
offered load of such a prefix is what the rest of its prompts takes to compute, in replicas. A prefix is to be on as
many replicas as this load keeps busy if it may fill `SHARE` of each. A copy is ordinary cached KV: nothing renews it,
so it goes when others need its place and nothing asks for it any more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from configs.schema import BatonConfig
from deployments.fleet.columns import Columns, Flags, Numbers
from deployments.fleet.flow import WINDOW_S, per_s
from deployments.messages import Placement, ReplicaInfo, Role, SessionRequest
from deployments.policy.placement.fetch import LINK_BYTES_PER_S
from deployments.step_cost import Coefficients

SHARE = 0.1
"""The share of a replica's time that prompts with one prefix may fill before the prefix gets a further copy. It is
measured (docs/benchmarks/policies.md)."""
WARM_LOAD = 0.02
"""The load from which on a prefix is copied to a replica that has hardly anything yet."""
IDLE = 0.3
"""A replica whose port is busy for a larger share of its time copies nothing."""
MOST, HOTTEST = 256, 16
"""The prefixes that are remembered, and those that are looked at in a plan."""
PLAN_S = 0.2
"""The time from one plan to the next."""
COMES_S = 5.0
"""So long after it was told to, a replica counts as having its copy. It gets no other one meanwhile."""
SOONEST_S = 0.3
"""What comes within the first so many seconds of a prefix counts as if it had taken all of them."""
LEAST_TOKENS = 256
"""A shorter prefix is computed about as fast as it is fetched."""

Find = Callable[[Sequence[int]], tuple[Mapping[str, int], Mapping[str, int]]]
"""`PrefixIndex.find`."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A replica fetches the KV of these leading blocks from `source`. No request waits for it. `reason`: for people."""

    hashes: tuple[int, ...]
    tokens: int
    source: ReplicaInfo
    reason: str


@dataclass(slots=True)
class Prefix:
    """What prompts share. `since_s`: when the first of them came. `seconds`: of their rests, as faded at `at_s`."""

    hashes: tuple[int, ...]
    tokens: int
    since_s: float
    at_s: float
    seconds: float = 0.0

    @property
    def name(self) -> int:
        """The hash of its last block, which covers all of it."""
        return self.hashes[-1]

    def load(self, now_s: float) -> float:
        """The replicas that its prompts keep busy. Of a new one, what came is over the time since it came."""
        seen = 1.0 - math.exp(-max(now_s - self.since_s, SOONEST_S) / WINDOW_S)
        return per_s(self.seconds, self.at_s, now_s) / seen

    def add(self, seconds: float, now_s: float) -> None:
        """A prompt has come, whose rest takes so long."""
        self.seconds = per_s(self.seconds, self.at_s, now_s) * WINDOW_S + seconds
        self.at_s = max(now_s, self.at_s)


class Spread:
    """Counts what is placed, and plans copies. Times are seconds of the caller's clock.

    `link_bytes_per_s`: between two replicas; 0 where it is not known. `told`: the copies that replicas were told of.
    """

    def __init__(self, link_bytes_per_s: float = 0.0) -> None:
        self.told = 0
        self._link_bytes_per_s = link_bytes_per_s or LINK_BYTES_PER_S
        self._prefixes: dict[int, Prefix] = {}
        self._coming: dict[str, tuple[int, float]] = {}
        self._plan: dict[str, Copy] = {}
        self._planned_s = -PLAN_S

    def __len__(self) -> int:
        """The prefixes that are remembered."""
        return len(self._prefixes)

    def placed(
        self,
        request: SessionRequest,
        placement: Placement,
        hits: Mapping[str, int],
        steps: Coefficients,
        now_s: float,
    ) -> None:
        """A request was placed. `hits`: as in `Knowledge`. `steps`: what those of its prefiller take."""
        shared = max(hits.values(), default=0)
        tokens = shared * placement.prefiller.block_size
        if request.attempt == 1 and tokens >= LEAST_TOKENS:
            self.note(request.hashes[:shared], tokens, steps.beside_s(request.prompt_tokens, tokens), now_s)

    def note(self, hashes: Sequence[int], tokens: int, seconds: float, now_s: float) -> None:
        """A prompt was placed whose first `tokens` tokens, these blocks, were somewhere already.

        `seconds`: what the rest of it takes to compute.
        """
        prefix = self._prefixes.get(hashes[-1])
        if prefix is None:
            self._make_room(now_s)
            prefix = self._prefixes[hashes[-1]] = Prefix(tuple(hashes), tokens, now_s, now_s)
        prefix.add(seconds, now_s)

    def _make_room(self, now_s: float) -> None:
        """Forget the coldest half once there are twice as many as are to be remembered."""
        if len(self._prefixes) >= 2 * MOST:
            kept = heapq.nlargest(MOST, self._prefixes.values(), key=lambda each: each.load(now_s))
            self._prefixes = {each.name: each for each in kept}

    def next_for(self, replica_id: str, now_s: float) -> Copy | None:
        """The copy that a replica is to fetch now; None: none. From then on it counts as told."""
        copy = self._plan.pop(replica_id, None)
        if copy is not None:
            self._coming[replica_id] = copy.hashes[-1], now_s + COMES_S
            self.told += 1
        return copy

    def withdraw(self, replica_id: str) -> None:
        """A replica was not told of its copy after all."""
        self._coming.pop(replica_id, None)
        self.told -= 1

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for a plan."""
        return bool(self._prefixes) and not self._planned_s <= now_s < self._planned_s + PLAN_S

    def plan(self, columns: Columns, find: Find, empty: Collection[str], now_s: float) -> None:
        """Plan copies of the hottest prefixes, at most one to a replica, and from one as many as its port has time for.

        `empty`: replicas whose caches have hardly anything.
        """
        self._planned_s, self._plan = now_s, {}
        self._coming = {each: coming for each, coming in self._coming.items() if now_s < coming[1]}
        ports = _Ports.now(columns, self._link_bytes_per_s, now_s)
        for prefix in heapq.nlargest(HOTTEST, self._prefixes.values(), key=lambda each: each.load(now_s)):
            if prefix.load(now_s) < WARM_LOAD:
                break
            hits, resident = find(prefix.hashes)
            whole = {each for each in hits if resident.get(each, hits[each]) >= len(prefix.hashes)}
            for same in columns.by_engine():
                self._plan_one(prefix, prefix.load(now_s), whole, empty, ports, same)

    def _plan_one(
        self,
        prefix: Prefix,
        load: float,
        whole: Collection[str],
        empty: Collection[str],
        ports: _Ports,
        same: Flags | np.bool_,
    ) -> None:
        """`whole`: the replicas that have all of it in memory. `same`: the rows of one engine."""
        has = ports.flags(whole) & same & ports.columns.ready
        coming = ports.flags(each for each, (name, _) in self._coming.items() if name == prefix.name) & same
        have, wanted = int((has | coming).sum()), math.ceil(load / SHARE)
        free = ports.computing & same & ~has & ~ports.flags(self._coming.keys() | self._plan.keys())
        free &= ports.idle & (ports.columns["free_blocks"] >= len(prefix.hashes))
        new = ports.flags(empty)
        while (source := ports.least(has & ports.idle)) is not None:
            target = ports.least(free) if have < wanted else ports.least(free & new)
            if target is None:
                return
            why = f"{load:.2f} replicas' load on {have} of {wanted}" if have < wanted else "it has hardly anything yet"
            info = ports.columns.info
            self._plan[info(target).replica_id] = Copy(prefix.hashes, prefix.tokens, info(source), why)
            size = prefix.tokens * float(ports.columns["kv_bytes_per_token"][target])
            ports.link[[source, target]] += size / self._link_bytes_per_s / PLAN_S
            free[target], have = False, have + 1


def spread_of(config: BatonConfig) -> Spread | None:
    """What a manager of this configuration begins with; None where nothing is spread."""
    return Spread(config.channel.link_bytes_per_s) if config.placement.spread else None


@dataclass(frozen=True, slots=True, eq=False)
class _Ports:
    """The replicas as copies see them, by row.

    `link`, `prompts`: the shares of its time that its port and prompts take, and of its port also the copies of this
    plan. `computing`: it is there to compute prompts.
    """

    columns: Columns
    link: Numbers
    prompts: Numbers
    computing: Flags

    @classmethod
    def now(cls, columns: Columns, link_bytes_per_s: float, now_s: float) -> _Ports:
        left: Numbers = np.exp((columns["flow_at_s"] - now_s) / WINDOW_S) / WINDOW_S
        link = columns["flow_bytes"] * left / link_bytes_per_s
        computing = columns.ready & columns.prefills
        apart = computing & ~columns.is_of(Role.DECODE)
        return cls(columns, link, columns["flow_s"] * left, apart if apart.any() else computing)

    @property
    def idle(self) -> Flags:
        """Their ports have time for a copy."""
        idle: Flags = self.columns.ready & (self.link < IDLE)
        return idle

    def flags(self, replica_ids: Iterable[str]) -> Flags:
        """The rows of these replicas."""
        flags: Flags = np.zeros(len(self.columns.ready), np.bool_)
        flags[[row for each in replica_ids if (row := self.columns.rows.get(each)) is not None]] = True
        return flags

    def least(self, flags: Flags | np.bool_) -> int | None:
        """The least busy of these rows; None of none."""
        rows = np.flatnonzero(flags)
        return int(rows[np.argmin((self.link + self.prompts)[rows])]) if rows.size else None
