"""Views: the fleet at one moment, as policy reads it. Pure.

`FleetView` holds rows, for people and for tests. `Fleet` keeps columns up to date and hands them out in a `LiveView`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from deployments.fleet.columns import Columns, ReplicaView
from deployments.messages import ReplicaInfo, Role


class View(Protocol):
    """The fleet at one moment. `known`: the shapes of all pools ever seen, also of those with no replica now.

    `silent`: the roles of pools that never reported a shape, so that it is not known yet which requests fit them.
    """

    @property
    def known(self) -> Sequence[ReplicaInfo]: ...

    @property
    def silent(self) -> Sequence[Role]: ...

    @property
    def now_s(self) -> float: ...

    def columns(self, role: Role) -> Columns:
        """The replicas of a role."""

    def without_room_on(self, replica_ids: Collection[str]) -> View:
        """This view, with no free block on these replicas: their room is kept for other requests."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """A view by rows, for people and for tests. `ready`: the replicas that can take placements, by replica id."""

    ready: tuple[ReplicaView, ...] = ()
    known: tuple[ReplicaInfo, ...] = ()
    silent: tuple[Role, ...] = ()
    now_s: float = field(default=0.0, compare=False)

    def of(self, role: Role) -> tuple[ReplicaView, ...]:
        """The ready replicas of a role."""
        return tuple(view for view in self.ready if view.info.role is role)

    def columns(self, role: Role) -> Columns:
        """Columns made from the rows."""
        columns = Columns({}, max(1, len(self.ready)))
        for fingerprint in sorted({view.info.fingerprint for view in self.ready}):
            columns.code(fingerprint)  # the columns of both roles must agree on the codes
        for view in self.of(role):
            columns.put(view)
        return columns

    def without_room_on(self, replica_ids: Collection[str]) -> FleetView:
        """See `View`."""
        ready = (view._replace(free_blocks=0) if view.info.replica_id in replica_ids else view for view in self.ready)
        return replace(self, ready=tuple(ready))


@dataclass(frozen=True, slots=True)
class LiveView:
    """A view by columns, for policy. It is valid until the fleet changes."""

    by_role: Mapping[Role, Columns]
    known: Sequence[ReplicaInfo]
    silent: Sequence[Role]
    now_s: float

    def columns(self, role: Role) -> Columns:
        """The columns that the fleet keeps."""
        return self.by_role[role]

    def without_room_on(self, replica_ids: Collection[str]) -> LiveView:
        """See `View`."""
        by_role = {role: columns.without_room_on(replica_ids) for role, columns in self.by_role.items()}
        return replace(self, by_role=by_role)
