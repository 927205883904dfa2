"""Columns: the fleet as arrays, one array per quantity and one row per replica. Pure.

A decision compares every replica, of which there may be a thousand, so it computes with columns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.fleet.promise import Taken
from deployments.messages import ReplicaInfo, Role
from deployments.step_cost import Coefficients

Numbers = NDArray[np.float64]
Codes = NDArray[np.int64]
Flags = NDArray[np.bool_]


class ReplicaView(NamedTuple):
    """One replica that can take placements now: the source of its row in the columns.

    `free_blocks`: neither used nor reserved. `backlog_tokens`: prompt tokens that it has yet to compute.
    `busy_until_s`: when this backlog is predicted to be computed. `behind_s`: predicted seconds of the backlog behind
    the prompt in progress; the backlog takes at least as long from now on. `expected_blocks`: the blocks that its
    sessions are expected to hold at their ends. `held_tokens`: the tokens that they are expected to hold halfway.
    `pending`: the number of its sessions whose prompts another replica has yet to compute. `prompts`: the number of
    prompts that it has yet to compute itself. `tpot_s`: the least TPOT objective of the answers that run or
    are pending; 0: none. `flow_prompts`, `flow_s`, `flow_moves`, `flow_bytes`: prompts that were placed here lately,
    their predicted seconds, answers whose KV cache comes from another replica, and the bytes of that, as they had faded
    at `flow_at_s` (`Flow`). `loaded_bytes`, `load_s`, `fetched_bytes`, `fetch_s`: what its KV
    tiers and other replicas' caches have given since it started, and in what time.
    """

    info: ReplicaInfo
    free_blocks: int
    sessions: int
    backlog_tokens: int
    busy_until_s: float = 0.0
    behind_s: float = 0.0
    expected_blocks: int = 0
    held_tokens: float = 0.0
    pending: int = 0
    prompts: int = 0
    tpot_s: float = 0.0
    flow_prompts: float = 0.0
    flow_s: float = 0.0
    flow_moves: float = 0.0
    flow_bytes: float = 0.0
    flow_at_s: float = 0.0
    loaded_bytes: float = 0.0
    load_s: float = 0.0
    fetched_bytes: float = 0.0
    fetch_s: float = 0.0

    @property
    def answers(self) -> int:
        """The answers that it writes now."""
        return max(0, self.sessions - self.pending - self.prompts)


CHUNK_TOKENS = 2048
"""The most prompt tokens in a step of a replica that does not report its own number."""

LOAD = ReplicaView._fields[1:]
SHAPE = (
    "block_size",
    "max_sessions",
    "kv_bytes_per_token",
    "capacity_tokens",
    "per_block",
)
"""The numbers that do not change. `capacity_tokens`: the most that one session may hold on an empty replica.
`per_block`: one block as a share of the replica's blocks."""
NUMBERS = (*LOAD, "room_blocks", "step_s", "base_s", "whole_step_s", *SHAPE)
"""`room_blocks`: free blocks, or -1 where no further session may run. `step_s`: seconds of a decode step at the
replica's load. `base_s`: of one without answers. `whole_step_s`: of one that computes as many prompt tokens as it can,
and nothing else."""
CHANGING = slice(len(LOAD) + 4)

UNKNOWN = Coefficients(0.0, 0.0, 0.0, 0.0, 0.0)
"""The coefficients of a pool whose steps are not known yet."""


class Kind(NamedTuple):
    """Replicas of one pool with equally large steps: their steps take equally long."""

    pool: str
    chunk_tokens: int


class Columns:
    """The replicas of a fleet. Every array has a row per replica. Rows that are not `ready` do not count.

    `decodes`: which replicas may write answers. `prefills`: which may compute prompts that can be split from their
    answers. `seen_s`: when each replica last reported. `fingerprint`: codes from 0, equal for equal strings. `kind`:
    indices into `kinds`. `sizes` and `engines` count the replicas by block size and by fingerprint. `coefficients`:
    what the steps of each pool take; empty while that is not known.
    """

    def __init__(self, capacity: int = 16) -> None:
        self.names: dict[str, int] = {}
        self.rows: dict[str, int] = {}
        self.infos: list[ReplicaInfo | None] = []
        self.ready: Flags = np.zeros(capacity, np.bool_)
        self.decodes: Flags = np.zeros(capacity, np.bool_)
        self.prefills: Flags = np.zeros(capacity, np.bool_)
        self._roles: dict[Role, Flags] = {role: np.zeros(capacity, np.bool_) for role in Role}
        self.seen_s: Numbers = np.zeros(capacity)
        self.kinds: list[Kind] = []
        self.kind: Codes = np.zeros(capacity, np.int64)
        self.fingerprint: Codes = np.zeros(capacity, np.int64)
        self._table: Numbers = _blank(capacity)
        self.numbers: dict[str, Numbers] = dict(zip(NUMBERS, self._table, strict=True))
        self.sizes: Counter[int] = Counter()
        self.engines: Counter[int] = Counter()
        self.coefficients: Mapping[str, Coefficients] = {}
        self._steps: list[Coefficients] = []
        self._whole_s: list[float] = []  # of each kind, as `_steps`
        self._spare: list[int] = []

    def __getitem__(self, name: str) -> Numbers:
        """The column of that name, one of `NUMBERS`."""
        return self.numbers[name]

    def put(self, view: ReplicaView, *, ready: bool = True, seen_s: float = 0.0) -> None:
        """Enter a replica's row, or bring it up to date."""
        row = self.rows.get(view.info.replica_id)
        if row is None:
            row = self._new_row(view.info.replica_id)
        if self.infos[row] is not view.info and self.infos[row] != view.info:
            self._shape(row, view.info)
        self.ready[row], self.seen_s[row] = ready, seen_s
        room = view.free_blocks if view.sessions < view.info.max_sessions else -1
        steps, whole_s = self._steps[self.kind[row]], self._whole_s[self.kind[row]]
        step_s = steps.step_s(0, 0, view.sessions, view.held_tokens)
        self._table[CHANGING, row] = (*view[1:], room, step_s, steps.base_s, whole_s)

    def learn(self, coefficients: Mapping[str, Coefficients]) -> None:
        """Take what each pool's steps take.

        The caller passes a new mapping when something has changed, and never changes one that it has passed.
        """
        if coefficients is not self.coefficients:
            self.coefficients = coefficients
            self._steps = [coefficients.get(kind.pool, UNKNOWN) for kind in self.kinds]
            self._whole_s = list(map(_whole_s, self._steps, self.kinds))
            self.numbers["step_s"][:] = self._step_column(self.numbers)
            self.numbers["base_s"][:] = self.of_kinds(lambda steps, kind: steps.base_s)
            self.numbers["whole_step_s"][:] = self.of_kinds(_whole_s)

    def of_kind(self, number: int) -> tuple[Coefficients, Kind]:
        """A kind of replicas, by its index in `kinds`, and what its steps take."""
        return self._steps[number], self.kinds[number]

    def of_kinds(self, number: Callable[[Coefficients, Kind], float]) -> Numbers:
        """A column of a number that is the same for all replicas of a kind."""
        table = list(map(number, self._steps, self.kinds))
        column: Numbers = np.array(table or [0.0]).take(self.kind)
        return column

    def _shape(self, row: int, info: ReplicaInfo) -> None:
        self._uncount(row)
        self.infos[row] = info
        kind = Kind(info.pool, info.chunk_tokens or CHUNK_TOKENS)
        if kind not in self.kinds:
            self.kinds.append(kind)
            self._steps.append(self.coefficients.get(info.pool, UNKNOWN))
            self._whole_s.append(_whole_s(self._steps[-1], kind))
        self.kind[row] = self.kinds.index(kind)
        self.fingerprint[row] = self.code(info.fingerprint)
        capacity_tokens = min(info.max_model_len, info.total_blocks * info.block_size)
        shape = (
            info.block_size,
            info.max_sessions,
            info.kv_bytes_per_token,
            capacity_tokens,
            1.0 / max(1, info.total_blocks),
        )
        self._table[-len(SHAPE) :, row] = shape
        self.decodes[row], self.prefills[row] = info.decodes, info.prefills
        for role, flags in self._roles.items():
            flags[row] = role is info.role
        self.sizes[info.block_size] += 1
        self.engines[int(self.fingerprint[row])] += 1

    def _uncount(self, row: int) -> None:
        if (info := self.infos[row]) is not None:
            for counter, key in ((self.sizes, info.block_size), (self.engines, int(self.fingerprint[row]))):
                counter[key] -= 1
                if not counter[key]:
                    del counter[key]

    def drop(self, replica_id: str) -> None:
        """Take a replica out. Its row is used again for a later one."""
        row = self.rows.pop(replica_id, None)
        if row is not None:
            self._uncount(row)
            self.infos[row], self.ready[row] = None, False
            self._spare.append(row)

    def is_of(self, role: Role) -> Flags:
        """Which rows are of pools with this role."""
        return self._roles[role]

    def by_engine(self) -> Iterator[Flags | np.bool_]:
        """Which rows have the same fingerprint, for each that there is; True for all rows where there is but one."""
        if len(self.engines) == 1:
            yield np.True_
        else:
            yield from (self.fingerprint == code for code in self.engines)

    def blocks_for(self, tokens: float) -> Numbers | float:
        """The blocks that hold so many tokens: one number where all replicas have the same block size."""
        if len(self.sizes) == 1:
            return float(math.ceil(tokens / next(iter(self.sizes))))
        blocks: Numbers = np.ceil(tokens / self.numbers["block_size"])
        return blocks

    def code(self, name: str) -> int:
        """The code of a fingerprint."""
        return self.names.setdefault(name, len(self.names))

    def info(self, row: int) -> ReplicaInfo:
        """The replica of a row."""
        info = self.infos[row]
        assert info is not None, "a chosen row belongs to a replica"
        return info

    def at(self, now_s: float, stale_s: float) -> Columns:
        """These columns, with only the replicas ready that reported within `stale_s`. The other arrays are shared."""
        return self._with(ready=self.ready & (now_s - self.seen_s <= stale_s))

    def without(self, replica_ids: Collection[str]) -> Columns:
        """These columns, with none of these replicas ready."""
        ready = self.ready.copy()
        ready[[self.rows[replica_id] for replica_id in replica_ids if replica_id in self.rows]] = False
        return self._with(ready=ready)

    def without_room_on(self, replica_ids: Collection[str]) -> Columns:
        """These columns, with no free block on these replicas."""
        free, room = self.numbers["free_blocks"].copy(), self.numbers["room_blocks"].copy()
        rows = [self.rows[replica_id] for replica_id in replica_ids if replica_id in self.rows]
        free[rows] = room[rows] = 0
        return self._with(numbers={**self.numbers, "free_blocks": free, "room_blocks": room})

    def without_answers(self, taken: Mapping[int, Taken]) -> Columns:
        """These columns, without some of the answers that replicas write. `taken`: by row."""
        rows, parts = np.fromiter(taken, np.int64, len(taken)), np.array([*taken.values()], float).T
        new = {name: self.numbers[name].copy() for name in (*Taken._fields, "room_blocks", "step_s")}
        for name, part in zip(Taken._fields, parts, strict=True):
            new[name][rows] = np.maximum(new[name][rows] + (part if name == "free_blocks" else -part), 0.0)
        is_full = new["sessions"] >= self.numbers["max_sessions"]
        new["room_blocks"][rows] = np.where(is_full, -1, new["free_blocks"])[rows]
        new["step_s"][rows] = self._step_column(new)[rows]
        return self._with(numbers={**self.numbers, **new})

    def _step_column(self, numbers: Mapping[str, Numbers]) -> Numbers:
        """Seconds of a decode step of each replica."""
        steps: Any = Coefficients(*np.array(self._steps or [UNKNOWN]).T[:, self.kind])  # with columns for numbers
        column: Numbers = steps.step_s(0, 0, numbers["sessions"], numbers["held_tokens"])
        return column

    def _with(self, **changed: Any) -> Columns:
        other = Columns.__new__(Columns)
        other.__dict__.update(self.__dict__ | changed)
        return other

    def _new_row(self, replica_id: str) -> int:
        if self._spare:
            row = self._spare.pop()
        else:
            row = len(self.infos)
            self.infos.append(None)
            if row == len(self.ready):
                self._grow()
        self.rows[replica_id] = row
        return row

    def _grow(self) -> None:
        size = len(self.ready)
        for name in ("ready", "decodes", "prefills", "seen_s", "kind", "fingerprint"):
            setattr(self, name, _grown(getattr(self, name), size))
        self._roles = {role: _grown(flags, size) for role, flags in self._roles.items()}
        self._table = np.concatenate([self._table, _blank(size)], axis=1)
        self.numbers = dict(zip(NUMBERS, self._table, strict=True))


def _grown(array: NDArray[Any], size: int) -> NDArray[Any]:
    return np.concatenate([array, np.zeros(size, array.dtype)])


def _blank(size: int) -> Numbers:
    """Rows without a replica. Block sizes, which other numbers are divided by, are 1 there."""
    table = np.zeros((len(NUMBERS), size))
    table[NUMBERS.index("block_size")] = 1.0
    return table


def _whole_s(steps: Coefficients, kind: Kind) -> float:
    return steps.step_s(kind.chunk_tokens, 0, 0, 0)
