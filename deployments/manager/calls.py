"""The session manager's whole interface: one frozen message per call.

`ask(call)` is how every call is made: to the manager itself, over a connection (`client`), and to the stand-in. A call
names the type of its answer: `Call[Admit | Reject]` is answered with `Admit` or `Reject`, `Call[None]` with nothing.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import msgspec

from deployments.messages import (
    Adapter,
    AdapterList,
    Admit,
    CachedPrompt,
    ManagerView,
    Pin,
    Placement,
    Reject,
    ReplicaSnapshot,
    ReportAnswer,
    SessionRequest,
)

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


class Call(msgspec.Struct, Generic[A_co], frozen=True, tag=True):
    """Base of all calls; the parameter is the type of the answer."""


class Open(Call[Admit | Reject], frozen=True, tag=True):
    """Place a session. Waits for capacity, at most as long as the queue lets it.

    Every placement must be closed; until then its blocks are reserved. Opening a session again gives it a new epoch. A
    cancelled call leaves nothing behind. Fails where the session is waiting already, and where the request allows no
    mode.
    """

    request: SessionRequest


class PrefillDone(Call[None], frozen=True, tag=True):
    """The prompt is computed, so its prefill replica has that much less to do; idempotent."""

    session_id: str
    epoch: int


class Close(Call[None], frozen=True, tag=True):
    """A placement is over, and its parts on the replicas have ended: its blocks are free; idempotent.

    `output_tokens`: of the answer; None where it is not known. `ended`: the replica that writes the answer has said
    that its part is over. Then it holds nothing of the session, even if its newest report still lists it.
    """

    session_id: str
    epoch: int
    outcome: str
    output_tokens: int | None = None
    ended: bool = False


class Withdraw(Call[None], frozen=True, tag=True):
    """Take back the opening of a session whose placement the caller never learnt, and close what is open of it.

    Calls may overtake each other: the opening may still be on its way, and is then refused.
    """

    session_id: str
    outcome: str


class Lost(Call[None], frozen=True, tag=True):
    """A session was lost on a replica: nothing is placed there for a while, nor until the replica reports again.

    `gone`: Serve has taken the replica out, though it may go on reporting until it is stopped. `crashed`: its engine
    has crashed, perhaps for a request that was on it.
    """

    replica_id: str
    gone: bool = False
    crashed: bool = False


class Silent(Call[tuple[str, ...]], frozen=True, tag=True):
    """Ask which of these replicas have not reported for `snapshot_stale_s`, or are not known at all.

    A manager that has just begun knows no replica yet, and calls none silent.
    """

    replica_ids: tuple[str, ...]


class View(Call[ManagerView], frozen=True, tag=True):
    """Ask for what an ingress needs to place sessions while the manager is away.

    `after_s`: seconds until the answer. An open call breaks at once when the manager dies. So an ingress that always
    has one open learns of it at once.
    """

    after_s: float = 0.0


class Report(Call[ReportAnswer], frozen=True, tag=True):
    """A replica's load: on change, at most every `snapshot_interval_s`, and at least every second.

    The answer has the replica's peers when the replica does not know them, and the sessions that it must move.
    """

    snapshot: ReplicaSnapshot


class Ready(Call[dict[str, Any]], frozen=True, tag=True):
    """Ask whether every pool of the configuration has a replica to place on, and for every replica's phase.

    A pool that may scale to zero counts as ready without one.

    `{"ready", "pools": {name: {"ready", "replicas": {id: {"phase", "age_s", "fresh", "load"}}}}}`
    """


class Status(Call[dict[str, Any]], frozen=True, tag=True):
    """Ask for all that the manager knows: what `Ready` says, sessions, promises, the queue, predictions, replicas, and
    the plan of `scaling`.

    Counts begin when the manager does.
    """


class Overview(Call[dict[str, Any]], frozen=True, tag=True):
    """Ask for what the live page shows: `Status` without what grows with the number of sessions.

    `{"ready", "pools", "scaling", "sessions": {"open", "queued", "closed"}, "modes", "rejects", "breakers", "waiting",
    "flows": [{"prefill", "decode", "prefilling", "writing"}]}`. `waiting`: requests by class. `flows`: sessions by the
    pools that compute their prompts and write their answers.
    """


class Explain(Call[dict[str, Any]], frozen=True, tag=True):
    """Ask what would become of such a request now, and why: every way with its cost. Nothing is reserved or counted.

    See `policy.decider.Decider.explain`. Fails where the request allows no mode.
    """

    request: SessionRequest


class Drain(Call[dict[str, Any]], frozen=True, tag=True):
    """Take a replica out of service for an operator, or put it back; idempotent.

    Nothing is placed on it from then on, its sessions move as others have room, and those that cannot move end there.
    `{"replica", "draining", "sessions"}`: the sessions that are there now. Where nothing changes:
    `{"replica", "refused", "known"}`, with the reason, and whether there is such a replica.
    """

    replica_id: str
    resume: bool = False


class Prefixes(Call[dict[str, Any]], frozen=True, tag=True):
    """Pin a prefix, or unpin the one of this id, or neither; both are idempotent.

    A change is answered once a replica has heard of it, or after `prefixes.HEARD_S`. `{"prefixes": [{"id", "tokens",
    "blocks", "replicas", "missing"}]}`: all that are pinned then, where they stand, and where they are to stand yet.
    `{"refused"}`, with the reason, where nothing changes.
    """

    pin: Pin | None = None
    unpin: str = ""


class HandOn(Call[int], frozen=True, tag=True):
    """A replica leaves for good: others fetch the hottest beginnings of these prompts from its cache.

    `prompts`: the newest first. `left_s`: the answer comes within this time, once all has come or nothing more may. It
    is the number of blocks that other replicas have got. A cancelled call leaves nothing behind.
    """

    replica_id: str
    prompts: tuple[CachedPrompt, ...]
    left_s: float


class Brought(Call[None], frozen=True, tag=True):
    """A replica has done what `bring` of a report's answer asked for; idempotent.

    `blocks`: those that came; None where it was late or refused.
    """

    replica_id: str
    bring_id: str
    blocks: int | None


class TellPrefix(Call[None], frozen=True, tag=True):
    """The tokens of a hot prefix, as `Admit.tell_tokens` asks for. `name`: the hash of its last block."""

    name: int
    prefix: Pin


class Adopt(Call[None], frozen=True, tag=True):
    """Count a session that another manager has placed. It must be closed like all others.

    `prefilling`: its prompt is not computed yet. Fails where this manager knows the placement already.
    """

    placement: Placement
    prompt_tokens: int
    prefilling: bool


class ShareAdapters(Call[AdapterList], frozen=True, tag=True):
    """Load or unload LoRA adapters in all ingresses; without a change, wait at most `wait_s` for a list newer than
    `known`.

    The answer is the list. A manager that has restarted knows none, and takes the newest that ingresses know.
    """

    known: AdapterList
    load: tuple[Adapter, ...] = ()
    unload: tuple[str, ...] = ()
    wait_s: float = 0.0


Notice = PrefillDone | Close | Withdraw | Lost
"""Calls that tell the manager something and need no answer."""
Shown = Ready | Status | Overview | Explain | Prefixes
"""Calls that are answered with what an administrator or a probe reads."""
Leaving = Drain | HandOn | Brought
AnyCall = Open | Notice | Silent | View | Report | Shown | Leaving | Adopt | TellPrefix | ShareAdapters
Answer = Admit | Reject | tuple[str, ...] | ManagerView | ReportAnswer | AdapterList | dict[str, Any] | int | None


class Manager(Protocol):
    """Answers calls: the manager itself, its client, or the stand-in."""

    async def ask(self, call: Call[A]) -> A:
        """The answer to a call. Raises Unavailable when the manager cannot be reached, or cannot answer."""
