"""Views: the fleet at one moment, as policy reads it. Pure.

`FleetView` holds rows, for people and for tests. `Fleet` keeps columns up to date and hands them out in a `LiveView`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from deployments.fleet.columns import Columns, ReplicaView
from deployments.fleet.ledger import Share
from deployments.fleet.promise import Taken
from deployments.messages import ReplicaInfo, Role


class View(Protocol):
    """The fleet at one moment. `known`: the shapes of all pools ever seen, also of those with no replica now.

    `silent`: the roles of pools that never reported a shape, so that it is not known yet which requests fit them.
    `waiting`: the number of requests that wait to be placed.
    """

    @property
    def known(self) -> Sequence[ReplicaInfo]: ...

    @property
    def silent(self) -> Sequence[Role]: ...

    @property
    def now_s(self) -> float: ...

    @property
    def waiting(self) -> int: ...

    @property
    def columns(self) -> Columns:
        """The replicas."""

    def without(self, replica_ids: Collection[str]) -> View:
        """This view, in which none of these replicas is ready."""

    def without_room_on(self, replica_ids: Collection[str]) -> View:
        """This view, with no free block on these replicas: their room is kept for other requests."""

    def without_yielding(self) -> View | None:
        """This view, without the answers that replicas may let go; None: there are none."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """A view by rows, for people and for tests. `ready`: the replicas that can take placements, by replica id."""

    ready: tuple[ReplicaView, ...] = ()
    known: tuple[ReplicaInfo, ...] = ()
    silent: tuple[Role, ...] = ()
    now_s: float = field(default=0.0, compare=False)
    waiting: int = 0

    @property
    def columns(self) -> Columns:
        """Columns made from the rows."""
        columns = Columns(max(1, len(self.ready)))
        for view in self.ready:
            columns.put(view)
        return columns

    def without(self, replica_ids: Collection[str]) -> FleetView:
        """See `View`."""
        return replace(self, ready=tuple(view for view in self.ready if view.info.replica_id not in replica_ids))

    def without_room_on(self, replica_ids: Collection[str]) -> FleetView:
        """See `View`."""
        ready = (view._replace(free_blocks=0) if view.info.replica_id in replica_ids else view for view in self.ready)
        return replace(self, ready=tuple(ready))

    def without_yielding(self) -> FleetView | None:
        """None: rows do not say which answers those are."""
        return None


@dataclass(frozen=True, slots=True)
class LiveView:
    """A view by columns, for policy. It is valid until the fleet changes.

    `yielding`: what is reserved on the replicas that may let answers go, by replica id.
    """

    columns: Columns
    known: Sequence[ReplicaInfo]
    silent: Sequence[Role]
    now_s: float
    waiting: int = 0
    yielding: Mapping[str, Share] = field(default_factory=dict)

    def without(self, replica_ids: Collection[str]) -> LiveView:
        """See `View`."""
        return replace(self, columns=self.columns.without(replica_ids))

    def without_room_on(self, replica_ids: Collection[str]) -> LiveView:
        """See `View`. What yields there is not let go either."""
        yielding = {name: share for name, share in self.yielding.items() if name not in replica_ids}
        return replace(self, columns=self.columns.without_room_on(replica_ids), yielding=yielding)

    def without_answer(self, replica_id: str, held_tokens: int, expected_blocks: int) -> LiveView:
        """This view, without one of the answers that a replica writes."""
        taken = {self.columns.rows[replica_id]: Taken(1, held_tokens, expected_blocks)}
        return replace(self, columns=self.columns.without_answers(taken))

    def without_yielding(self) -> LiveView | None:
        """See `View`."""
        rows = self.columns.rows
        taken = {rows[name]: share.may_let_go for name, share in self.yielding.items() if name in rows}
        return replace(self, columns=self.columns.without_answers(taken), yielding={}) if taken else None
