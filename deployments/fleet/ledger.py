"""The ledger: what placements have reserved on each replica, and the sums of it that placement reads. Pure.

An entry is a `Promise`: one placement of one session. It concerns at most two replicas. Each replica has a `Share`,
which keeps the sums of its promises up to date with every change, so that no decision has to add them up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat

from deployments.fleet.promise import Key, Promise, Taken
from deployments.messages import NOTHING, Finished, Placement, Reservation

_UNPROMISED = 0
"""The epoch that stands for a session which this ledger did not place. Real epochs begin at 1."""

_CONFIRM_EVERY_S = 1.0
"""The least time between two updates of a replica's promises with `seen_s`, which is compared with far longer times."""


@dataclass(slots=True)
class Share:
    """What the ledger has on one replica.

    `unpromised`: sessions that the replica lists and that this ledger did not place, with their reservations.
    `released`: those of `promises` whose session is closed. `yielding`: those that it may let go. The sums are over all
    that is not released. `prompts`: predicted seconds of the prompts that the replica has yet to compute, the oldest
    first. `begun_s`: when the first of them began. `confirmed_s`: when the replica's sessions were last compared with
    its promises. `objectives`: the TPOT objectives of the answers written here, or soon, each with their number.
    """

    replica_id: str
    promises: dict[Key, Promise] = field(default_factory=dict)
    released: dict[Key, Promise] = field(default_factory=dict)
    yielding: dict[Key, Promise] = field(default_factory=dict)
    unpromised: dict[str, Reservation] = field(default_factory=dict)
    prompts: dict[Key, float] = field(default_factory=dict)
    begun_s: float = 0.0
    confirmed_s: float = -math.inf
    sessions: int = 0
    blocks: int = 0
    expected_blocks: int = 0
    held_tokens: int = 0
    backlog_tokens: int = 0
    work_s: float = 0.0
    pending: int = 0
    objectives: Counter[float] = field(default_factory=Counter)
    _may_let_go: Taken | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is reserved here."""
        return not self.promises and not self.unpromised

    @property
    def may_let_go(self) -> Taken:
        """What the answers have that it may let go. It is added up once, until a promise here changes."""
        if self._may_let_go is None:
            held = [promise.reservation(self.replica_id) for promise in self.yielding.values()]
            tokens, expected = sum(each.held_tokens for each in held), sum(each.expected_blocks for each in held)
            self._may_let_go = Taken(len(held), tokens, expected, sum(each.blocks for each in held))
        return self._may_let_go

    def put(self, promise: Promise, now_s: float) -> None:
        """Enter a promise, or bring it up to date."""
        key = promise.key
        before = self.promises.get(key)
        head = next(iter(self.prompts), None)
        if before is not None and not before.released:
            self._add(before.reservation(self.replica_id), -1)
            self._bind(before, -1)
        self.promises[key] = promise
        reserved = NOTHING if promise.released else promise.reservation(self.replica_id)
        self._add(reserved, 1)
        self._bind(promise, 1)
        if promise.released:
            self.released[key] = promise
        self._may_let_go = None
        if promise.may_be_let_go_by(self.replica_id):
            self.yielding[key] = promise
        else:
            self.yielding.pop(key, None)
        if reserved.prefill_tokens:
            self.prompts[key] = reserved.prefill_s
        else:
            self.prompts.pop(key, None)
        self._update_begun(head, now_s)

    def remove(self, promise: Promise, now_s: float) -> None:
        """Take a promise out."""
        head = next(iter(self.prompts), None)
        before = self.promises.pop(promise.key)
        if not before.released:
            self._add(before.reservation(self.replica_id), -1)
            self._bind(before, -1)
        self.released.pop(promise.key, None)
        self._may_let_go = None
        self.yielding.pop(promise.key, None)
        self.prompts.pop(promise.key, None)
        self._update_begun(head, now_s)

    def put_unpromised(self, unpromised: dict[str, Reservation], listed: Sequence[str], now_s: float) -> None:
        """Take what other ledgers have reserved here, by the replica's newest snapshot.

        `listed`: all sessions of that snapshot, in the order of their prefills.
        """
        if not unpromised and not self.unpromised:
            return
        head = next(iter(self.prompts), None)
        for reserved in self.unpromised.values():
            self._add(reserved, -1)
        for reserved in unpromised.values():
            self._add(reserved, 1)
        self.unpromised = unpromised
        ours = {key: seconds for key, seconds in self.prompts.items() if key[1] != _UNPROMISED}
        places = {session_id: place for place, session_id in enumerate(listed)}
        theirs = {(each, _UNPROMISED): held.prefill_s for each, held in unpromised.items() if held.prefill_tokens}
        in_order = sorted((ours | theirs).items(), key=lambda each: places.get(each[0][0], len(places)))
        self.prompts = dict(in_order)
        self._update_begun(head, now_s)

    def _update_begun(self, head: Key | None, now_s: float) -> None:
        """`head`: the first of the prompts before the change. When it is another one now, that one begins now."""
        if not self.prompts:
            self.work_s = 0.0  # a sum of floats drifts, so it starts anew where it is known to be 0
        elif next(iter(self.prompts)) != head:
            self.begun_s = now_s

    def _add(self, reserved: Reservation, sign: int) -> None:
        self.sessions += sign * (reserved is not NOTHING)
        self.blocks += sign * reserved.blocks
        self.expected_blocks += sign * reserved.expected_blocks
        self.held_tokens += sign * reserved.held_tokens
        self.backlog_tokens += sign * reserved.prefill_tokens
        self.work_s += sign * reserved.prefill_s
        self.pending += sign * reserved.pending

    def _bind(self, promise: Promise, sign: int) -> None:
        objective_s = promise.placement.tpot_s
        if objective_s and promise.is_answered_on(self.replica_id):
            self.objectives[objective_s] += sign
            if not self.objectives[objective_s]:
                del self.objectives[objective_s]


class Ledger:
    """Every promise, found by its key, by its session and by its replicas. Times are seconds of the caller's clock.

    `changed`: replica ids; the ledger adds each replica whose share has changed, and the caller clears it. `yielding`:
    the shares of replicas that may let sessions go. `slack_s`: a promise ends this long after its session's timeout.
    `unconfirmed_s`: a promise ends when no replica has listed its session for this long, because its ingress died
    before the session began, or before it closed it.
    """

    def __init__(self, changed: dict[str, None], slack_s: float, unconfirmed_s: float) -> None:
        self._changed = changed
        self.yielding: dict[str, Share] = {}
        self._slack_s = slack_s
        self._unconfirmed_s = unconfirmed_s
        self._shares: dict[str, Share] = {}
        self._of_session: dict[str, dict[Key, Promise]] = {}
        self._promises: dict[Key, Promise] = {}
        self._epochs: dict[str, tuple[int, float]] = {}

    def share(self, replica_id: str) -> Share:
        """What is reserved on a replica; an empty share where nothing is."""
        return self._shares.get(replica_id) or Share(replica_id)

    def next_epoch(self, session_id: str, now_s: float, least: int = 1) -> int:
        """The epoch of a session's next placement: `least`, or one more than the last epoch given, if that is more.

        `least` is over 1 where another ledger may have made the placements before.
        """
        epoch = max(least, self._epochs.get(session_id, (0, now_s))[0] + 1)
        self._epochs[session_id] = epoch, now_s
        return epoch

    def reserve(self, placement: Placement, prompt_tokens: int, now_s: float) -> None:
        """Enter a placement. Raises ValueError when that session and epoch have a promise."""
        promise = Promise(placement, prompt_tokens, at_s=now_s, seen_s=now_s)
        if promise.key in self._promises:
            raise ValueError(f"session {promise.key[0]} epoch {promise.key[1]} has a promise already")
        self._put(promise, now_s)

    def prefill_done(self, session_id: str, epoch: int, now_s: float) -> bool:
        """The prompt is computed. True when the ledger did not know it yet."""
        promise = self._promises.get((session_id, epoch))
        if promise is None or not promise.prefilling:
            return False
        self._put(replace(promise, prefilling=False), now_s)
        return True

    def release(self, session_id: str, epoch: int, now_s: float, ended: bool) -> Promise | None:
        """The session is closed. Returns the promise, which stays until `remove`; None when it was released before."""
        promise = self._promises.get((session_id, epoch))
        if promise is None or promise.released:
            return None
        released = replace(promise, released=True, prefilling=False, finished=promise.finished or ended)
        self._put(released, now_s)
        return released

    def remove(self, promise: Promise, now_s: float) -> None:
        """Take a promise out of the ledger."""
        del self._promises[promise.key]
        of_session = self._of_session[promise.placement.session_id]
        del of_session[promise.key]
        if not of_session:
            del self._of_session[promise.placement.session_id]
        for replica_id in set(promise.replica_ids):
            share = self._shares[replica_id]
            share.remove(promise, now_s)
            if share.is_empty:
                del self._shares[replica_id]
            self._has_changed(share)

    def put_unpromised(
        self, replica_id: str, listed: Sequence[str], reservations: Iterable[Reservation], now_s: float
    ) -> None:
        """Take the sessions that a replica lists. Those that this ledger did not place count by their reservations.

        `reservations`: one per session of `listed`, in that order; missing ones count as nothing.
        """
        share = self.share(replica_id)
        ours = {session_id for session_id, _ in share.promises}
        unpromised = {
            session_id: reserved
            for session_id, reserved in zip(listed, chain(reservations, repeat(NOTHING)), strict=False)
            if session_id not in ours
        }
        share.put_unpromised(unpromised, listed, now_s)
        if share.is_empty:
            self._shares.pop(replica_id, None)
        else:
            self._shares[replica_id] = share

    def confirm(self, replica_id: str, listed: Collection[str], now_s: float) -> None:
        """A replica lists these sessions: their promises were seen now."""
        share = self._shares.get(replica_id)
        if share is None or now_s - share.confirmed_s < _CONFIRM_EVERY_S:
            return
        share.confirmed_s = now_s
        for promise in [each for key, each in share.promises.items() if key[0] in listed]:
            self._put(replace(promise, seen_s=now_s), now_s)

    def finish(self, replica_id: str, parts: Iterable[Finished], now_s: float) -> None:
        """These parts have ended on a replica. They hold nothing there, although their sessions are not closed yet."""
        for part in parts:
            promise = self._promises.get((part.session_id, part.epoch))
            if promise is not None:
                is_owner = promise.placement.owner.replica_id == replica_id
                self._put(replace(promise, finished=promise.finished or is_owner, prefilling=False), now_s)

    def expire(self, now_s: float) -> tuple[Promise, ...]:
        """Take out the promises that outlived their sessions, and those whose sessions no replica has listed."""
        expired = tuple(promise for promise in self._promises.values() if self._is_void(promise, now_s))
        for promise in expired:
            self.remove(promise, now_s)
        return expired

    def forget_epochs(self, before_s: float) -> None:
        """Forget the epochs given before that time, but those of sessions that have a promise."""
        open_sessions = {session_id for session_id, _ in self._promises}
        for session_id, (_, at_s) in list(self._epochs.items()):
            if session_id not in open_sessions and at_s < before_s:
                del self._epochs[session_id]

    def promises(self) -> tuple[Promise, ...]:
        """The promises of open sessions, oldest first."""
        return tuple(promise for promise in self._promises.values() if not promise.released)

    def promises_of(self, session_id: str) -> tuple[Promise, ...]:
        """The open promises of one session, by epoch: usually one, or none."""
        return tuple(each for each in self._of_session.get(session_id, {}).values() if not each.released)

    def _put(self, promise: Promise, now_s: float) -> None:
        self._promises[promise.key] = promise
        self._of_session.setdefault(promise.placement.session_id, {})[promise.key] = promise
        for replica_id in set(promise.replica_ids):
            share = self._shares.get(replica_id)
            if share is None:
                share = self._shares[replica_id] = Share(replica_id)
            share.put(promise, now_s)
            self._has_changed(share)

    def _has_changed(self, share: Share) -> None:
        self._changed[share.replica_id] = None
        if share.yielding:
            self.yielding[share.replica_id] = share
        else:
            self.yielding.pop(share.replica_id, None)

    def _is_void(self, promise: Promise, now_s: float) -> bool:
        outlived = now_s - promise.at_s > promise.placement.session_timeout_s + self._slack_s
        return outlived or now_s - promise.seen_s > self._unconfirmed_s
