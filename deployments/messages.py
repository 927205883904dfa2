"""Frozen messages that cross processes between ingress, session manager and replicas.

Lengths are in tokens, memory in KV blocks, durations in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from transfer.memory.blocks import blocks_for


class Role(StrEnum):
    """What a pool is for."""

    PREFILL = "prefill"
    DECODE = "decode"


class Mode(StrEnum):
    """How a session is served."""

    DISAGGREGATED = "disaggregated"
    DECODE_LOCAL = "decode_local"
    PREFILL_LOCAL = "prefill_local"


class Handoff(StrEnum):
    """Who moves a split session's KV cache, and so who samples its first token.

    Pushed: prefill writes it while it computes, and samples the first token. Pulled: decode reads it once prefill is
    over, recomputes the prompt's last position, and samples every token.
    """

    PUSHED = "pushed"
    PULLED = "pulled"


class Phase(StrEnum):
    """What a replica is doing; shown on `/ready` and the status page."""

    LOADING = "loading model"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What does not change in a replica's life.

    `endpoints`: control address of each worker's KV channel, by rank. `chunk_tokens`: prompt tokens that one step
    computes at most. `kv_bytes_per_token`: over all layers and workers. 0 where nobody can tell. `prior`: what its
    hardware and model make of a step, the five numbers of `step_cost.Coefficients`; empty: unknown.
    """

    replica_id: str
    pool: str
    role: Role
    node_id: str
    fingerprint: str
    block_size: int
    total_blocks: int
    max_sessions: int
    max_model_len: int
    endpoints: tuple[str, ...] = ()
    chunk_tokens: int = 0
    kv_bytes_per_token: int = 0
    prior: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepSample:
    """One engine step as it was: what was in it and how long it took.

    `prefill_tokens`: prompt tokens computed. `prefill_context`: the sum, over those tokens, of the tokens before each.
    `decode_sequences`: sequences that got one more token. `decode_context`: the tokens that those hold, summed.
    """

    seconds: float
    prefill_tokens: int = 0
    prefill_context: int = 0
    decode_sequences: int = 0
    decode_context: int = 0


@dataclass(frozen=True, slots=True)
class CacheChange:
    """What a replica's prefix cache gained and lost since its last snapshot, as chained block hashes.

    `sequence` grows by one with every change of that replica; a receiver that misses one asks for the whole.
    `whole`: `stored` is all there is, and what was known before is void.
    """

    sequence: int
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """A session's part that is over on a replica, and the tokens that it generated there.

    `orphaned`: its ingress does not answer any more, and will hardly close it.
    """

    session_id: str
    epoch: int
    output_tokens: int
    orphaned: bool = False


class Reservation(NamedTuple):
    """What is promised to a session on one replica.

    `blocks`: the most that it may come to hold there; `expected_blocks`: at its end, `held_tokens`: on the way.
    `prefill_tokens`: of its prompt, that the replica has yet to compute; `prefill_s`: predicted seconds of that.
    `pending`: 1 while another replica has yet to compute its prompt.
    """

    blocks: int = 0
    expected_blocks: int = 0
    held_tokens: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    pending: int = 0

    def prefilled(self) -> Reservation:
        """The same when the prompt is computed."""
        is_prefilled = not (self.prefill_tokens or self.pending)
        return self if is_prefilled else self._replace(prefill_tokens=0, prefill_s=0.0, pending=0)


NOTHING = Reservation()


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """A replica's load at one moment. `version` grows by one with every snapshot of that replica.

    `peers_version`: of the newest `Peers` that it has. `running_tokens`: tokens held by the sequences that decode.
    `reservations`: of each of `sessions`, in their order, which is that of their prefills; none where nobody can tell.
    `cached_blocks`: free blocks that hold a reusable prefix. `finished`: parts that ended since a while ago, the
    newest last, `finished_version` the count of all that ever did, so that a lost snapshot loses none.
    `steps`: steps since the last snapshot. `cache`: none when nothing changed, or where the engine does not tell.
    With `placement.overcommit` over 1, `held_tokens`: of each of `sessions` prompt and answer so far, 0 before its
    first output; `movable`: those of them that can go on elsewhere. `is_starting`: Serve does not know of it yet.
    """

    replica_id: str
    version: int
    phase: Phase
    info: ReplicaInfo | None = None
    used_blocks: int = 0
    running: int = 0
    waiting: int = 0
    backlog_tokens: int = 0
    sessions: tuple[str, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    pool: str = ""
    counters: dict[str, float] = field(default_factory=dict)
    peers_version: int = 0
    running_tokens: int = 0
    cached_blocks: int = 0
    finished: tuple[Finished, ...] = ()
    finished_version: int = 0
    steps: tuple[StepSample, ...] = ()
    cache: CacheChange | None = None
    held_tokens: tuple[int, ...] = ()
    movable: frozenset[str] = frozenset()
    is_starting: bool = False


@dataclass(frozen=True, slots=True)
class Peers:
    """The replicas that a replica may exchange KV with: each the control addresses of its workers, by rank.

    `version` is made from the addresses: equal for equal peers, whoever counts.
    """

    version: int
    endpoints: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """What the manager says to a snapshot.

    `peers`: none when the replica knows them. `resync`: the manager has missed a `CacheChange`, or has had none; the
    next is to be a whole one. `hold`: a replica that is starting is not to go on yet (`Fleet.is_out_of_step`).
    `move`: the sessions that it is to let go, before its KV blocks run out. `interval_s`: it is to report no more
    often, also if its configuration lets it, but for what cannot wait.
    """

    peers: Peers | None = None
    resync: bool = False
    hold: bool = False
    move: tuple[str, ...] = ()
    interval_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ManagerView:
    """What the session manager knows of the replicas that it would place on, for when it is away.

    `life`: another one after each restart. `snapshots`: one of each replica; what is promised there, or in use, is one
    sum, as if it were that of one session.
    """

    life: str
    snapshots: tuple[ReplicaSnapshot, ...]


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What admission and placement need to know of a request.

    `allowed`: the modes in which the request's parameters can be served exactly, best first; `rule` names the
    reason when that is not all of them. `hashes`: chained hashes of the prompt's full blocks
    (`transfer.memory.blocks.chained_hashes`). `priority`: the class that it asks for, "" the default one.
    `client`: whom fairness is between. `affinity`: sessions with the same key go to the same replicas where they can.
    `adapter`: the LoRA adapter it needs. `chat`: it came as messages, not as text. `attempt`: which placement of the
    session this is, from 1; a later one is what is left of it, with the tokens answered so far as part of the prompt.
    `moved_from`: the replica that has let it go, where its KV cache is; "" where it was lost, and for a first attempt.
    `least_epoch`: its placement gets an epoch no lower, whatever the ledger knows of the session.
    `progressed`: the one before it gave more than a first token, so that this one is no retry of what failed.
    """

    session_id: str
    prompt_tokens: int
    max_tokens: int
    allowed: tuple[Mode, ...] = (Mode.DISAGGREGATED, Mode.DECODE_LOCAL)
    rule: str = ""
    hashes: tuple[int, ...] = ()
    priority: str = ""
    client: str = ""
    affinity: str = ""
    adapter: str = ""
    chat: bool = False
    attempt: int = 1
    moved_from: str = ""
    least_epoch: int = 1
    progressed: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a placement is expected to cost its request, in seconds from the moment it is made.

    `queue_s`: until its prefill begins. `prefill_s`: computing the part of the prompt that is not cached.
    `transfer_s`: what of the KV transfer that does not hide. `ttft_s`: until the first token, the above included.
    `tpot_s`: from one token to the next, at the load as it will be when its decode begins. `output_tokens`: the
    answer's expected length. `trusted`: the replicas have reported enough for the numbers to be acted upon.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    output_tokens: float = 0.0
    trusted: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a session goes, what was reserved for it, and how long each step may take.

    `cached_tokens`: prompt tokens expected in the prefix cache of whoever prefills. `forecast`: the times expected.
    """

    session_id: str
    epoch: int
    mode: Mode
    reason: str
    decode: ReplicaInfo | None
    prefill: ReplicaInfo | None
    reserved_blocks: int
    handoff_timeout_s: float
    session_timeout_s: float
    cached_tokens: int = 0
    forecast: Forecast = Forecast()

    @property
    def owner(self) -> ReplicaInfo:
        """The replica that writes the end of the answer."""
        replica = self.decode or self.prefill
        assert replica is not None, "a placement names at least one replica"
        return replica

    @property
    def prefiller(self) -> ReplicaInfo:
        """The replica that computes the prompt."""
        return self.prefill or self.owner

    def reservation(self, replica_id: str, prompt_tokens: int) -> Reservation:
        """What it takes on a replica, before the prompt is computed.

        On its owner to the end; on a helper the prompt's blocks, while prefilling.
        """
        prefill_tokens, prefill_s = 0, 0.0
        if replica_id == self.prefiller.replica_id:
            prefill_tokens, prefill_s = max(1, prompt_tokens - self.cached_tokens), self.forecast.prefill_s
        if replica_id != self.owner.replica_id:
            blocks = blocks_for(prompt_tokens + 1, self.prefiller.block_size)
            return Reservation(blocks, 0, 0, prefill_tokens, prefill_s)
        output, expected = int(self.forecast.output_tokens), self.reserved_blocks
        if output:  # else nobody predicted anything
            expected = min(expected, blocks_for(prompt_tokens + output, self.owner.block_size))
        pending = int(replica_id != self.prefiller.replica_id)
        held_tokens = prompt_tokens + output // 2
        return Reservation(self.reserved_blocks, expected, held_tokens, prefill_tokens, prefill_s, pending)


@dataclass(frozen=True, slots=True)
class Admit:
    placement: Placement


@dataclass(frozen=True, slots=True)
class Queue:
    """Not now: capacity will come back. `unavailable`: no replica of a kind that is needed is up."""

    reason: str
    unavailable: bool = False


@dataclass(frozen=True, slots=True)
class Reject:
    """Not at all (`retry_after_s` is None: the request can never be served here), or not soon.

    `code`: the kind of reason, for programs: `queue_full`, `queue_timeout`, `displaced`, `predicted_ttft`,
    `predicted_tpot`, `unknown_class` or `manager_retires`; "" for any other.
    """

    reason: str
    retry_after_s: float | None = None
    unavailable: bool = False
    code: str = ""


Decision = Admit | Queue | Reject

MANAGER_RETIRES = "manager_retires"
"""The code of a refusal that says no more than to ask again: another session manager will answer."""


@dataclass(frozen=True, slots=True)
class SessionTask:
    """One replica's part of a session, the argument of its `run` call.

    `request`: the frames of an encoded EngineCoreRequest. `reply_to`: the ingress's output address; engine
    outputs go there by step, not through the call. `reservation`: what it was promised on this replica. `movable`: the
    answer ends here, and can go on elsewhere. `hands_over`: the session moves away from this replica,
    which only hands over what it has; it may be draining, and Serve may have taken it out.
    """

    session_id: str
    epoch: int
    replica_id: str
    request_id: str
    request: tuple[bytes, ...]
    reply_to: str
    timeout_s: float
    prompt_tokens: int
    reservation: Reservation = NOTHING
    movable: bool = False
    hands_over: bool = False


MOVED = "moved"
"""The outcome of a part that a replica has let go: its KV cache is there, for another replica to take."""


@dataclass(frozen=True, slots=True)
class SessionReport:
    """What a replica says of its part when it is over. `outcome`: `finished`, `expired` or `MOVED`."""

    session_id: str
    replica_id: str
    outcome: str
    output_tokens: int = 0
