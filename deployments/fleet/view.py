"""What policy reads: the replicas as they are now, by rows of a few and by columns of a thousand.

A decision looks at every replica, so what it computes with is columns: one array per quantity, one row per replica.
`FleetView` holds rows, for people and tests; `Fleet` keeps columns up to date itself and hands them out as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from deployments.messages import ReplicaInfo, Role
from deployments.step_cost import Coefficients

Numbers = NDArray[np.float64]
Codes = NDArray[np.int64]
Flags = NDArray[np.bool_]


class ReplicaView(NamedTuple):
    """One replica that can be placed on now.

    `free_blocks`: neither used nor promised to anybody. `backlog_tokens`: prompt tokens it has yet to compute.
    `busy_until_s`: when that is predicted to end, `behind_s`: what of it stands behind the prompt in progress; it takes
    no less than that from now on. `expected_blocks`: what its sessions are expected to hold in the end, `held_tokens`
    on the way. `pending`: those of its sessions whose prompts another replica has yet to compute.
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


CHUNK_TOKENS = 2048
"""Prompt tokens in a step, where a replica does not say."""

LOAD = ReplicaView._fields[1:]
SHAPE = ("block_size", "max_sessions", "kv_bytes_per_token", "capacity_tokens", "per_block")
"""What does not change. `capacity_tokens`: that an empty replica could hold. `per_block`: one block's share of all."""
NUMBERS = (*LOAD, "room_blocks", "step_s", *SHAPE)
"""`room_blocks`: free blocks, none where no session more may run. `step_s`: of a decode step at its load."""
CHANGING = slice(len(LOAD) + 2)

UNKNOWN = Coefficients(0.0, 0.0, 0.0, 0.0, 0.0)


class Kind(NamedTuple):
    """Replicas whose steps take the same: of a pool, and with as many prompt tokens in a step."""

    pool: str
    chunk_tokens: int


class Columns:
    """The replicas of one role. Every array has a row per replica; a row that is not `ready` does not count.

    `fingerprint` has codes: equal for equal strings, from 0, shared by all columns made with the same `names`. `kind`
    has places in `kinds`. `sizes` and `engines` count the replicas by block size and by fingerprint. `coefficients`:
    what the steps of a pool take; empty while nobody knows.
    """

    def __init__(self, names: dict[str, int], capacity: int = 16) -> None:
        self.names = names
        self.rows: dict[str, int] = {}
        self.infos: list[ReplicaInfo | None] = []
        self.ready: Flags = np.zeros(capacity, np.bool_)
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
        room = view.free_blocks if view.sessions < view.info.max_sessions else -1
        step_s = _step_s(self._steps[self.kind[row]], view.sessions, view.held_tokens)
        self._table[CHANGING, row] = (*view[1:], room, step_s)

    def learn(self, coefficients: Mapping[str, Coefficients]) -> None:
        """What each pool's steps take; a new object when that has changed, and not changed itself."""
        if coefficients is not self.coefficients:
            self.coefficients = coefficients
            self._steps = [coefficients.get(kind.pool, UNKNOWN) for kind in self.kinds]
            by_row = Coefficients(*np.array(self._steps or [UNKNOWN]).T[:, self.kind])
            self.numbers["step_s"][:] = _step_s(by_row, self.numbers["sessions"], self.numbers["held_tokens"])

    def of_kind(self, number: int) -> tuple[Coefficients, Kind]:
        """What the steps of a kind of replicas take, by its place in `kinds`."""
        return self._steps[number], self.kinds[number]

    def of_kinds(self, number: Callable[[Coefficients, Kind], float]) -> Numbers:
        """A column of what is the same for all replicas of a kind."""
        table = list(map(number, self._steps, self.kinds))
        column: Numbers = np.array(table or [0.0]).take(self.kind)
        return column

    def least_of_kinds(self, number: Callable[[Coefficients, Kind], float]) -> float:
        """The least of such numbers."""
        return min(map(number, self._steps, self.kinds), default=0.0)

    def _shape(self, row: int, info: ReplicaInfo) -> None:
        self._uncount(row)
        self.infos[row] = info
        kind = Kind(info.pool, info.chunk_tokens or CHUNK_TOKENS)
        if kind not in self.kinds:
            self.kinds.append(kind)
            self._steps.append(self.coefficients.get(info.pool, UNKNOWN))
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
        self.ready, self.seen_s, self.kind, self.fingerprint = (
            np.concatenate([array, np.zeros(size, array.dtype)])
            for array in (self.ready, self.seen_s, self.kind, self.fingerprint)
        )
        self._table = np.concatenate([self._table, _blank(size)], axis=1)
        self.numbers = dict(zip(NUMBERS, self._table, strict=True))


def _blank(size: int) -> Numbers:
    """Rows without a replica. What others are divided by is 1 there."""
    table = np.zeros((len(NUMBERS), size))
    table[NUMBERS.index("block_size")] = 1.0
    return table


def _step_s(steps: Coefficients, sessions: Any, held_tokens: Any) -> Any:
    """Seconds of a decode step on one replica, or a column of them; `steps` of the one, or of each."""
    return steps.base_s + sessions * steps.sequence_s + held_tokens * steps.context_s


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
        for fingerprint in sorted({view.info.fingerprint for view in self.ready}):
            columns.code(fingerprint)  # both roles' columns must agree on the codes
        for view in self.of(role):
            columns.put(view)
        return columns

    def without_room_on(self, replica_ids: Collection[str]) -> FleetView:
        ready = (view._replace(free_blocks=0) if view.info.replica_id in replica_ids else view for view in self.ready)
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
