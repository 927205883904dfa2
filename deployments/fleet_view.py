"""What policy reads: the replicas as they are now, by rows of a few and by columns of a thousand.

A decision looks at every replica, so what it computes with is columns: one array per quantity, one row per replica.
`FleetView` holds rows, for people and tests; `Fleet` keeps columns up to date itself and hands them out as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deployments.messages import ReplicaInfo, Role
from deployments.policy.latency import Coefficients

Numbers = NDArray[np.float64]
Codes = NDArray[np.int64]
Flags = NDArray[np.bool_]


def blocks_for(tokens: int, block_size: int) -> int:
    """KV blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica that can be placed on now.

    `free_blocks`: neither used nor promised to anybody. `backlog_tokens`: prompt tokens it has yet to compute.
    `busy_until_s`: when that is predicted to end, `behind_s`: what of it stands behind the prompt in progress.
    `unknown_tokens`: of the backlog, what nobody has predicted. `expected_blocks`: what its sessions are expected to
    hold in the end, `held_tokens` on the way.
    """

    info: ReplicaInfo
    free_blocks: int
    sessions: int
    backlog_tokens: int
    busy_until_s: float = 0.0
    behind_s: float = 0.0
    unknown_tokens: int = 0
    expected_blocks: int = 0
    held_tokens: float = 0.0


CHUNK_TOKENS = 2048
"""Prompt tokens in a step, where a replica does not say."""

SHAPE = ("block_size", "max_sessions", "chunk_tokens", "kv_bytes_per_token")
LOAD = (
    "free_blocks",
    "sessions",
    "backlog_tokens",
    "busy_until_s",
    "behind_s",
    "unknown_tokens",
    "expected_blocks",
    "held_tokens",
)
DERIVED = ("room_blocks", "capacity_tokens", "per_block", "step_s", "queue_until_s", "queue_floor_s")
"""What every decision needs and only an event changes.

`room_blocks`: free blocks, none where no session more may run. `capacity_tokens`: that an empty replica could hold.
`per_block`: one block's share of all. `step_s`: a decode step at its load. `queue_until_s`, `queue_floor_s`: what is to
be prefilled ends then, and takes no less than that from now on.
"""

UNKNOWN = Coefficients(0.0, 0.0, 0.0, 0.0, 0.0)


class Columns:
    """The replicas of one role. Every array has a row per replica; a row that is not `ready` does not count.

    `pool` and `fingerprint` are codes: equal for equal strings, from 0, shared by all columns made with the same
    `names`. `sizes` and `engines` count the replicas by block size and by fingerprint. `by_pool`: what the steps of a
    pool take, by its code; empty while nobody knows.
    """

    def __init__(self, names: dict[str, int], capacity: int = 16) -> None:
        self.names = names
        self.rows: dict[str, int] = {}
        self.infos: list[ReplicaInfo | None] = []
        self.ready: Flags = np.zeros(capacity, np.bool_)
        self.seen_s: Numbers = np.zeros(capacity)
        self.pool: Codes = np.zeros(capacity, np.int64)
        self.fingerprint: Codes = np.zeros(capacity, np.int64)
        self.numbers: dict[str, Numbers] = {name: _blank(name, capacity) for name in (*SHAPE, *LOAD, *DERIVED)}
        self.sizes: Counter[int] = Counter()
        self.engines: Counter[int] = Counter()
        self.by_pool: dict[int, Coefficients] = {}
        self._known: Mapping[str, Coefficients] = {}
        self._unread: list[int] = []
        self._spare: list[int] = []

    def __getitem__(self, name: str) -> Numbers:
        return self.numbers[name]

    def put(self, view: ReplicaView, *, ready: bool = True, seen_s: float = 0.0) -> None:
        """Enter a replica's row, or bring it up to date."""
        row = self.rows.get(view.info.replica_id)
        if row is None:
            row = self._new_row(view.info.replica_id)
        if self.infos[row] is not view.info and self.infos[row] != view.info:
            self._shape(row, view.info)
        self.ready[row], self.seen_s[row] = ready, seen_s
        numbers = self.numbers
        for name in LOAD:
            numbers[name][row] = getattr(view, name)
        numbers["room_blocks"][row] = view.free_blocks if view.sessions < view.info.max_sessions else -1
        self._unread.append(row)

    def derive(self, coefficients: Mapping[str, Coefficients]) -> None:
        """Bring up to date what depends on rows and coefficients, once for all rows that were put; then read.

        `coefficients`: what each pool's steps take; a new object when they have changed.
        """
        rows: list[int] | slice = self._unread
        if coefficients is not self._known:
            self._known = coefficients
            self.by_pool = {self.code(pool): each for pool, each in coefficients.items()}
            rows = slice(None)
        if rows == []:
            return
        table = np.array([self.by_pool.get(code, UNKNOWN) for code in range(len(self.names))] or [UNKNOWN])
        base_s, prefill_token_s, _, sequence_s, context_s = table.T[:, self.pool[rows]]
        numbers = self.numbers
        sessions, held = numbers["sessions"][rows], numbers["held_tokens"][rows]
        numbers["step_s"][rows] = base_s + sessions * sequence_s + held * context_s
        unknown_s = numbers["unknown_tokens"][rows] * prefill_token_s
        numbers["queue_until_s"][rows] = numbers["busy_until_s"][rows] + unknown_s
        numbers["queue_floor_s"][rows] = np.maximum(numbers["behind_s"][rows] + unknown_s, 0.0)
        self._unread.clear()

    def _shape(self, row: int, info: ReplicaInfo) -> None:
        self._uncount(row)
        self.infos[row] = info
        self.pool[row] = self.code(info.pool)
        self.fingerprint[row] = self.code(info.fingerprint)
        for name in SHAPE:
            self.numbers[name][row] = getattr(info, name)
        self.numbers["chunk_tokens"][row] = info.chunk_tokens or CHUNK_TOKENS
        self.numbers["capacity_tokens"][row] = min(info.max_model_len, info.total_blocks * info.block_size)
        self.numbers["per_block"][row] = 1.0 / max(1, info.total_blocks)
        self.sizes[info.block_size] += 1
        self.engines[int(self.fingerprint[row])] += 1

    def _uncount(self, row: int) -> None:
        if (info := self.infos[row]) is not None:
            for counter, key in ((self.sizes, info.block_size), (self.engines, int(self.fingerprint[row]))):
                counter[key] -= 1
                if not counter[key]:
                    del counter[key]

    def drop(self, replica_id: str) -> None:
        """Take a replica out; its row waits for another."""
        row = self.rows.pop(replica_id, None)
        if row is not None:
            self._uncount(row)
            self.infos[row], self.ready[row] = None, False
            self._spare.append(row)

    def blocks_for(self, tokens: float) -> Numbers | float:
        """Blocks that hold so many tokens: one number where all replicas have blocks of one size."""
        if len(self.sizes) == 1:
            return float(math.ceil(tokens / next(iter(self.sizes))))
        blocks: Numbers = np.ceil(tokens / self.numbers["block_size"])
        return blocks

    def code(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def info(self, row: int) -> ReplicaInfo:
        info = self.infos[row]
        assert info is not None, "only rows of replicas are chosen"
        return info

    def at(self, now_s: float, stale_s: float) -> Columns:
        """These columns, ready only what was seen within `stale_s`; the arrays are shared."""
        return self._with(ready=self.ready & (now_s - self.seen_s <= stale_s))

    def without_room_on(self, replica_ids: Collection[str]) -> Columns:
        """These columns, with no free block on the replicas named."""
        free, room = self.numbers["free_blocks"].copy(), self.numbers["room_blocks"].copy()
        rows = [self.rows[replica_id] for replica_id in replica_ids if replica_id in self.rows]
        free[rows] = room[rows] = 0
        return self._with(numbers={**self.numbers, "free_blocks": free, "room_blocks": room})

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
        self.ready, self.seen_s, self.pool, self.fingerprint = (
            np.concatenate([array, np.zeros(size, array.dtype)])
            for array in (self.ready, self.seen_s, self.pool, self.fingerprint)
        )
        self.numbers = {name: np.concatenate([column, _blank(name, size)]) for name, column in self.numbers.items()}


def _blank(name: str, size: int) -> Numbers:
    """Rows without a replica. What others are divided by is 1 there."""
    return np.ones(size) if name in ("block_size", "chunk_tokens") else np.zeros(size)


class View(Protocol):
    """The fleet at one moment. `known`: a shape for every pool ever seen, up or down.

    `silent`: roles of pools that never reported a shape, so that nobody can say yet what fits them.
    """

    @property
    def known(self) -> Sequence[ReplicaInfo]: ...

    @property
    def silent(self) -> Sequence[Role]: ...

    @property
    def now_s(self) -> float: ...

    def columns(self, role: Role) -> Columns: ...

    def without_room_on(self, replica_ids: Collection[str]) -> View:
        """This view, with no free block on the replicas named: they are spoken for."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """A view by rows. `ready`: fresh and READY, by replica id."""

    ready: tuple[ReplicaView, ...] = ()
    known: tuple[ReplicaInfo, ...] = ()
    silent: tuple[Role, ...] = ()
    now_s: float = field(default=0.0, compare=False)

    def of(self, role: Role) -> tuple[ReplicaView, ...]:
        """The ready replicas of a role."""
        return tuple(view for view in self.ready if view.info.role is role)

    def columns(self, role: Role) -> Columns:
        columns = Columns({}, max(1, len(self.ready)))
        for name in sorted({text for view in self.ready for text in (view.info.pool, view.info.fingerprint)}):
            columns.code(name)  # both roles' columns must agree on the codes
        for view in self.of(role):
            columns.put(view)
        columns.derive({})
        return columns

    def without_room_on(self, replica_ids: Collection[str]) -> FleetView:
        ready = (replace(view, free_blocks=0) if view.info.replica_id in replica_ids else view for view in self.ready)
        return replace(self, ready=tuple(ready))


@dataclass(frozen=True, slots=True)
class LiveView:
    """A view by columns, good until the fleet changes."""

    by_role: Mapping[Role, Columns]
    known: Sequence[ReplicaInfo]
    silent: Sequence[Role]
    now_s: float

    def columns(self, role: Role) -> Columns:
        return self.by_role[role]

    def without_room_on(self, replica_ids: Collection[str]) -> LiveView:
        by_role = {role: columns.without_room_on(replica_ids) for role, columns in self.by_role.items()}
        return replace(self, by_role=by_role)
