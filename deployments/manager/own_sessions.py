"""What an ingress has placed itself, and what a view of the fleet says of all sessions, and so of the others'."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from operator import add, sub

from deployments.fleet.columns import ReplicaView
from deployments.fleet.promise import Promise
from deployments.fleet.row import reservable
from deployments.manager.calls import Close, Notice, PrefillDone, Withdraw
from deployments.messages import ManagerView, Occupancy, Phase, Placement, ReplicaSnapshot, Reservation

OTHERS = "the sessions of other ingresses"
"""A view says what all sessions of other ingresses together hold on a replica, but does not name them. The stand-in's
manager counts them as one session of this name."""


class OwnSessions:
    """This ingress's open placements, by session and epoch, from the manager and from the stand-in."""

    def __init__(self) -> None:
        self._promises: dict[str, dict[int, Promise]] = {}
        self._seen: tuple[Promise, ...] = ()  # as they were when the last view came

    def __bool__(self) -> bool:
        return bool(self._promises)

    def add(self, placement: Placement, prompt_tokens: int, now_s: float) -> None:
        """Add a session that was placed."""
        promise = Promise(placement, prompt_tokens, now_s, now_s)
        self._promises.setdefault(placement.session_id, {})[placement.epoch] = promise

    def note(self, notice: Notice) -> None:
        """Take in a notice that goes to the manager."""
        match notice:
            case PrefillDone(session_id, epoch):
                epochs = self._promises.get(session_id, {})
                if epoch in epochs:
                    epochs[epoch] = replace(epochs[epoch], prefilling=False)
            case Close(session_id, epoch):
                epochs = self._promises.get(session_id, {})
                epochs.pop(epoch, None)
                if not epochs:
                    self._promises.pop(session_id, None)
            case Withdraw(session_id):
                self._promises.pop(session_id, None)

    def promises(self) -> tuple[Promise, ...]:
        """All open placements."""
        return tuple(promise for epochs in self._promises.values() for promise in epochs.values())

    def seen(self) -> None:
        """Note that a view has come that includes the present placements."""
        self._seen = self.promises()

    def by_replica(self) -> dict[str, tuple[int, Reservation]]:
        """How many of the sessions in the last view are this ingress's, and what they hold, by replica."""
        found: defaultdict[str, tuple[int, Reservation]] = defaultdict(lambda: (0, Reservation()))
        for promise in self._seen:
            for replica_id in set(promise.replica_ids):
                sessions, held = found[replica_id]
                found[replica_id] = sessions + 1, Reservation(*map(add, held, promise.reservation(replica_id)))
        return found


def occupancy(view: ReplicaView, overcommit: float, now_s: float) -> Occupancy:
    """What is taken on a replica. `overcommit`: as in the configuration."""
    held = Reservation(
        blocks=reservable(view.info, overcommit) - view.free_blocks,
        expected_blocks=view.expected_blocks,
        held_tokens=int(view.held_tokens),
        prefill_tokens=view.backlog_tokens,
        prefill_s=max(0.0, view.busy_until_s - now_s),
        pending=view.pending,
    )
    return Occupancy(view.info, view.sessions, held)


def snapshots_of_others(
    view: ManagerView, own: dict[str, tuple[int, Reservation]], ingresses: int
) -> Iterator[ReplicaSnapshot]:
    """Snapshots of what other ingresses hold on each replica, and may come to hold.

    Ingresses do not hear of each other, so each leaves the others their share of what is free.
    """
    for replica in view.replicas:
        info = replica.info
        sessions, mine = own.get(info.replica_id, (0, Reservation()))
        theirs = Reservation(*(max(0, left) for left in map(sub, replica.held, mine)))
        free = max(0, info.total_blocks - replica.held.blocks)
        theirs = theirs._replace(blocks=theirs.blocks + free * (ingresses - 1) // ingresses)
        listed = ((OTHERS,), (theirs,)) if any(theirs) else ((), ())
        running = max(0, replica.sessions - sessions)
        yield ReplicaSnapshot(
            info.replica_id, 1, Phase.READY, info, running=running, sessions=listed[0], reservations=listed[1]
        )
