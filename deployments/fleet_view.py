"""What policy reads: the replicas as they are now, by rows of a few and by columns of a thousand.

A decision looks at every replica, so what it computes with is columns: one array per quantity, one row per replica.
`FleetView` holds rows, for people and tests; `Fleet` keeps columns up to date itself and hands them out as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deployments.messages import ReplicaInfo, Role

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
    `work_s`: seconds that they are predicted to take, `busy_until_s`: when that began plus what it takes, and
    `behind_s`: what of it stands behind the prompt in progress. `unknown_tokens`: of the backlog, what nobody has
    predicted. `expected_blocks`: what its sessions are expected to hold in the end, `held_tokens` on the way.
    """

    info: ReplicaInfo
    free_blocks: int
    sessions: int
    backlog_tokens: int
    work_s: float = 0.0
    busy_until_s: float = 0.0
    behind_s: float = 0.0
    unknown_tokens: int = 0
    expected_blocks: int = 0
    held_tokens: float = 0.0


CHUNK_TOKENS = 2048
"""Prompt tokens in a step, where a replica does not say."""

SHAPE = ("total_blocks", "block_size", "max_sessions", "max_model_len", "chunk_tokens", "kv_bytes_per_token")
LOAD = (
    "free_blocks",
    "sessions",
    "backlog_tokens",
    "work_s",
    "busy_until_s",
    "behind_s",
    "unknown_tokens",
    "expected_blocks",
    "held_tokens",
)


class Columns:
    """The replicas of one role. Every array has a row per replica; a row that is not `ready` does not count.

    `pool` and `fingerprint` are codes: equal for equal strings, from 0, shared by all columns made with the same
    `names`.
    """

    def __init__(self, names: dict[str, int], capacity: int = 16) -> None:
        self.names = names
        self.rows: dict[str, int] = {}
        self.infos: list[ReplicaInfo | None] = []
        self.ready: Flags = np.zeros(capacity, np.bool_)
        self.seen_s: Numbers = np.zeros(capacity)
        self.pool: Codes = np.zeros(capacity, np.int64)
        self.fingerprint: Codes = np.zeros(capacity, np.int64)
        self.numbers: dict[str, Numbers] = {name: _blank(name, capacity) for name in (*SHAPE, *LOAD)}
        self._spare: list[int] = []

    def __getitem__(self, name: str) -> Numbers:
        return self.numbers[name]

    def put(self, view: ReplicaView, *, ready: bool = True, seen_s: float = 0.0) -> None:
        """Enter a replica's row, or bring it up to date."""
        row = self.rows.get(view.info.replica_id)
        if row is None:
            row = self._new_row(view.info.replica_id)
        if self.infos[row] != view.info:
            self.infos[row] = view.info
            self.pool[row] = self.code(view.info.pool)
            self.fingerprint[row] = self.code(view.info.fingerprint)
            for name in SHAPE:
                self.numbers[name][row] = getattr(view.info, name)
            self.numbers["chunk_tokens"][row] = view.info.chunk_tokens or CHUNK_TOKENS
        self.ready[row], self.seen_s[row] = ready, seen_s
        for name in LOAD:
            self.numbers[name][row] = getattr(view, name)

    def drop(self, replica_id: str) -> None:
        """Take a replica out; its row waits for another."""
        row = self.rows.pop(replica_id, None)
        if row is not None:
            self.infos[row], self.ready[row] = None, False
            self._spare.append(row)

    def code(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def info(self, row: int) -> ReplicaInfo:
        info = self.infos[row]
        assert info is not None, "only rows of replicas are chosen"
        return info

    def by_row(self, by_replica: Mapping[str, float]) -> Numbers:
        """A column of what is given by replica id, 0 for the others."""
        column = np.zeros(len(self.ready))
        for replica_id, value in by_replica.items():
            row = self.rows.get(replica_id)
            if row is not None:
                column[row] = value
        return column

    def at(self, now_s: float, stale_s: float) -> Columns:
        """These columns, ready only what was seen within `stale_s`; the arrays are shared."""
        return self._with(ready=self.ready & (now_s - self.seen_s <= stale_s))

    def without_room_on(self, replica_ids: Collection[str]) -> Columns:
        """These columns, with no free block on the replicas named."""
        free = self.numbers["free_blocks"].copy()
        free[[self.rows[replica_id] for replica_id in replica_ids if replica_id in self.rows]] = 0
        return self._with(numbers={**self.numbers, "free_blocks": free})

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
    return np.ones(size) if name in ("block_size", "total_blocks", "chunk_tokens") else np.zeros(size)


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
