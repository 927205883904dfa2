"""Frozen messages that cross processes between ingress, session manager and replicas.

Lengths are in tokens, memory is in KV blocks, durations are in seconds.

This file is longer than 300 lines, and `ReplicaSnapshot` has more than 15 fields, on purpose. Ray Serve pickles classes
by their module's path, and during a rolling update processes of the old and the new version exchange these messages:
the classes and their fields stay where they are. A new field gets a default, so that an old sender need not know it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from transfer.memory.blocks import blocks_for


class Role(StrEnum):
    """What a pool is for, and the name of each side of a split session."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


def may_decode(role: Role, strict: bool) -> bool:
    """Whether a replica of such a pool may write answers, and so receives KV."""
    return not (strict and role is Role.PREFILL)


class Mode(StrEnum):
    """How a session is served."""

    DISAGGREGATED = "disaggregated"
    DECODE_LOCAL = "decode_local"
    PREFILL_LOCAL = "prefill_local"


class Handoff(StrEnum):
    """Which side moves a split session's KV cache. The first token is sampled by that side.

    Pushed: prefill writes the KV cache while it computes, and samples the first token. Pulled: decode reads the KV
    cache when the prefill is over, computes the prompt's last position again, and samples every token.
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

    `endpoints`: the control address of each worker's KV channel, by rank. `chunk_tokens`: the most prompt tokens that
    one step computes. `kv_bytes_per_token`: over all layers and workers. Both are 0 where they are not known. `prior`:
    the five coefficients of a step by its hardware and model (`step_cost.Coefficients`); empty where they are not
    known. `strict`: a prefill replica never decodes, or a decode replica never computes the prompt of a request that
    can be split.
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
    strict: bool = False

    @property
    def decodes(self) -> bool:
        """Whether it may write answers."""
        return may_decode(self.role, self.strict)

    @property
    def prefills(self) -> bool:
        """Whether it may compute prompts that can be split from their answers."""
        return not (self.strict and self.role is Role.DECODE)


@dataclass(frozen=True, slots=True)
class StepSample:
    """One engine step: what was in it and how long it took.

    `prefill_tokens`: prompt tokens computed. `prefill_context`: the sum, over those tokens, of the tokens before each.
    `decode_sequences`: sequences that got one more token. `decode_context`: the tokens that those sequences hold
    together.
    """

    seconds: float
    prefill_tokens: int = 0
    prefill_context: int = 0
    decode_sequences: int = 0
    decode_context: int = 0


@dataclass(frozen=True, slots=True)
class CacheChange:
    """What a replica's prefix cache gained and lost since its last snapshot, as chained block hashes.

    `sequence` grows by one with every change of that replica; a receiver that misses one asks for the whole cache.
    `whole`: `stored` is the whole cache, and what the receiver knew before is void. `left`: cached blocks that only a
    KV tier has now. `returned`: blocks of which that is not so any more.
    """

    sequence: int
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    whole: bool = False
    left: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldAdapters:
    """The LoRA adapters that a replica has loaded, by the digits of their ids. `load_s`: its newest load; 0: none."""

    ids: tuple[str, ...] = ()
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """A part of a session that is over on a replica, and the tokens that it generated there.

    `orphaned`: its ingress no longer answers, so it will probably not close the session.
    """

    session_id: str
    epoch: int
    output_tokens: int
    orphaned: bool = False


class Reservation(NamedTuple):
    """The amounts reserved for a session on one replica.

    `blocks`: the most that it may come to hold there. `expected_blocks`: those expected at its end. `held_tokens`:
    those expected halfway. `prefill_tokens`: tokens of its prompt that the replica has yet to compute. `prefill_s`: the
    predicted seconds of that. `pending`: 1 while another replica has yet to compute its prompt.
    """

    blocks: int = 0
    expected_blocks: int = 0
    held_tokens: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    pending: int = 0

    def prefilled(self) -> Reservation:
        """The same once the prompt is computed."""
        is_prefilled = not (self.prefill_tokens or self.pending)
        return self if is_prefilled else self._replace(prefill_tokens=0, prefill_s=0.0, pending=0)


NOTHING = Reservation()


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: the model name that clients ask for, its folder, and its id (`checkpoint.adapter.adapter_id`)."""

    name: str
    path: str
    number: int


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix whose blocks stay in the prefix caches of replicas until it is unpinned.

    `blocks`: those that its tokens fill. `salt`: the cache salt that engines get, "" for none. `adapter`: its name is
    the one that engines know.
    """

    id: str
    tokens: tuple[int, ...]
    blocks: int
    salt: str = ""
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class PinList:
    """The prefixes that are to be pinned. `version` grows with every change; 0: there was none yet."""

    version: int = 0
    pins: tuple[Pin, ...] = ()


@dataclass(frozen=True, slots=True)
class BeginPin:
    """The prefix of its `PinList` that a replica pins now.

    `source`: where it is pinned already, and may be fetched from; None: it is computed.
    """

    id: str
    source: ReplicaInfo | None = None


@dataclass(frozen=True, slots=True)
class BeginCopy:
    """A hot prefix that a replica fetches from `source` into its own cache. `prefix.id` is "": nothing pins it."""

    prefix: Pin
    source: ReplicaInfo


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """A replica's load at one moment. `version` grows by one with every snapshot of that replica.

    `peers_version`: the version of the newest `Peers` that it has. `running_tokens`: tokens held by the sequences that
    decode. `sessions`: in the order of their prefills. `reservations`: one per session, in the same order; empty where
    they are not known. `cached_blocks`: free blocks that hold a reusable prefix. `finished`: the newest parts that
    ended, the last one last. `finished_version`: the number of all parts that ever ended, so that a lost snapshot loses
    none. `steps`: steps since the last snapshot. `cache`: None when nothing changed, or where the engine does not
    report it. `is_starting`: Serve does not know of the replica yet.

    With `placement.rebalance`, or `placement.overcommit` over 1: `held_tokens`: the tokens of prompt and answer so far,
    one per session, 0 before its first output. `movable`: the sessions that can go on elsewhere.

    `pinned`: the blocks that stand of each pinned prefix, by its id. `pins_version`: of the `PinList` that it has.
    `pins`: that list, where the manager has asked for all that the replica knows; None otherwise.
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
    adapters: HeldAdapters = HeldAdapters()
    pinned: dict[str, int] = field(default_factory=dict)
    pins_version: int = 0
    pins: PinList | None = None

    @property
    def pinned_blocks(self) -> int:
        """The blocks of all prefixes that are pinned there."""
        return sum(self.pinned.values())


@dataclass(frozen=True, slots=True)
class Peers:
    """The replicas that a replica may exchange KV with: of each, the control addresses of its workers, by rank.

    `version` is made from the addresses: every manager computes the same version for the same peers.
    """

    version: int
    endpoints: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """A prompt that a replica was asked lately.

    `request`: the frames of the encoded EngineCoreRequest. `hashes`: chained hashes of its full blocks.
    """

    request: tuple[bytes, ...]
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bring:
    """Fetch the first `tokens` tokens of a prompt, whole blocks, from the cache of `source` within `timeout_s`.

    `request`: as in `CachedPrompt`. `id`: of this task alone.
    """

    id: str
    request: tuple[bytes, ...]
    tokens: int
    source: ReplicaInfo
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """The session manager's answer to a snapshot.

    `peers`: None when the replica knows them. `resync`: the manager has missed a `CacheChange`, or has had none, so the
    next one must be whole, and the next report has the replica's `PinList`. `hold`: a starting replica must not go on
    yet (`Fleet.is_out_of_step`). `move`: the sessions that the replica must give up, before its KV blocks run out.
    `interval_s`: the least time between two reports, also where the configuration allows less; urgent reports are
    exempt. `drain`: an operator takes the replica out of service (True) or puts it back (False); None: it stays as it
    is. `pins`: None when the replica knows them. `begin_pin`: the one that it is to pin now, repeated until it stands.
    `bring`: what the replica fetches from one that leaves, each told once.
    `copy`: a hot prefix that it fetches when it pins nothing, told once.
    """

    peers: Peers | None = None
    resync: bool = False
    hold: bool = False
    move: tuple[str, ...] = ()
    interval_s: float = 0.0
    drain: bool | None = None
    pins: PinList | None = None
    begin_pin: BeginPin | None = None
    bring: tuple[Bring, ...] = ()
    copy: BeginCopy | None = None


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What is taken on one replica. `held`: what its `sessions` hold there or are promised, summed."""

    info: ReplicaInfo
    sessions: int
    held: Reservation


@dataclass(frozen=True, slots=True)
class ManagerView:
    """What the session manager knows of the replicas that it would place on, for the time when it is away.

    `life`: a new value after each restart of the manager.
    """

    life: str
    replicas: tuple[Occupancy, ...]


@dataclass(frozen=True, slots=True)
class AdapterList:
    """The adapters that were loaded by HTTP. `version` grows by one with every change."""

    version: int = 0
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class Quota:
    """What the API key of a request may use in a minute; 0: any amount. `key`: its name.

    `answers`: of the whole request, which its first session begins. Its other sessions, and placements after the first,
    have 0: what they use is counted, and they are not refused.
    """

    key: str
    requests: int = 0
    tokens: int = 0
    answers: int = 0


@dataclass(frozen=True, slots=True)
class Allowance:
    """What an API key has left of its `Quota`, once a session is decided; of a limit that it does not have, zeros.

    `requests`, `tokens`: what the last minute leaves. `requests_reset_s`, `tokens_reset_s`: seconds until all of the
    limit is there again, if nothing more is used.
    """

    requests: int = 0
    requests_reset_s: float = 0.0
    tokens: int = 0
    tokens_reset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What admission and placement need to know of a request.

    `allowed`: the modes in which the request's parameters can be served exactly, best first. `rule`: the reason where
    some modes are missing. `hashes`: chained hashes of the prompt's full blocks
    (`transfer.memory.blocks.chained_hashes`). `priority`: the class that it asks for; "" is the default class.
    `client`: clients share the turns fairly. `affinity`: sessions with the same key go to the same replicas where they
    can. `adapter`: the LoRA adapter that it needs. `chat`: it came as messages, not as text. `attempt`: the number of
    this placement of the session, from 1; from 2 on, the request is the remainder, and its prompt includes the tokens
    answered so far. `moved_from`: the replica that gave the session up and holds its KV cache; "" where the attempt
    before was lost, and for the first attempt. `failed_handoffs`: the prefill replica of each handoff of the session
    that has failed since it gave more than a first token. `least_epoch`: the placement gets this epoch or a higher one,
    also where the ledger does not know the session. `progressed`: the attempt before gave more than a first token, so
    this attempt does not repeat one that failed at once. `answered_tokens`: the end of the prompt that was answered
    before. `digest`: equal requests have equal ones; 0: not known. `quota`: None where its key has no limits, or there
    is none. `traceparent`: the parent of the session manager's span, as W3C writes it; "" where nothing is traced.
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
    failed_handoffs: tuple[str, ...] = ()
    least_epoch: int = 1
    progressed: bool = False
    answered_tokens: int = 0
    digest: int = 0
    quota: Quota | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The times expected of a placement, in seconds from the moment it is made.

    `queue_s`: until its prefill begins. `prefill_s`: computing the part of the prompt that is not cached. `transfer_s`:
    the part of the KV transfer that the prefill does not hide. `ttft_s`: until the first token, the queue and the
    prefill included. `tpot_s`: from one token to the next, at the load when its decode begins. `output_tokens`: the
    expected length of the answer. `trusted`: the replicas have reported enough steps for requests to be refused by it.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    output_tokens: float = 0.0
    trusted: bool = False


MOVED = "moved"
"""The reason of a placement whose helper hands over the KV cache of a session that it gave up, and computes nothing."""


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The replica that computes a prompt first gets the KV of its first `tokens` tokens from `source`'s cache.

    `timeout_s`: what has not come by then is computed. `saved_s`: the seconds that it is expected to save.
    """

    source: ReplicaInfo
    tokens: int
    timeout_s: float
    saved_s: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a session goes, what is reserved for it, and how long each stage may take.

    `cached_tokens`: prompt tokens expected in the prefix cache of the replica that prefills. `forecast`: the times
    expected. `tpot_s`: the TPOT objective of its class in seconds; 0 where it has none. `fetch`: None: nothing.
    `yields`: its owner may let it go for another session. `let_go`: the sessions that its owner lets go for it.
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
    tpot_s: float = 0.0
    fetch: FetchPlan | None = None
    yields: bool = False
    let_go: tuple[str, ...] = ()

    @property
    def is_move(self) -> bool:
        """Whether its helper hands over a session that it gave up."""
        return self.reason == MOVED

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
        """What it reserves on a replica, before the prompt is computed.

        On its owner: all blocks, to the end. On a helper: the blocks of the prompt, while it prefills.
        """
        prefill_tokens, prefill_s = 0, 0.0
        if replica_id == self.prefiller.replica_id:
            prefill_tokens, prefill_s = max(1, prompt_tokens - self.cached_tokens), self.forecast.prefill_s
        if replica_id != self.owner.replica_id:
            blocks = blocks_for(prompt_tokens + 1, self.prefiller.block_size)
            return Reservation(blocks, 0, 0, prefill_tokens, prefill_s)
        output, expected = int(self.forecast.output_tokens), self.reserved_blocks
        if output:  # 0 where the length is not predicted
            expected = min(expected, blocks_for(prompt_tokens + output, self.owner.block_size))
        pending = int(replica_id != self.prefiller.replica_id)
        held_tokens = prompt_tokens + output // 2
        return Reservation(self.reserved_blocks, expected, held_tokens, prefill_tokens, prefill_s, pending)


@dataclass(frozen=True, slots=True)
class Admit:
    """The session goes where the placement says. `allowance`: None where its key has no limits, or there is none.

    `tell_tokens`: the ingress tells the manager the first so many tokens of the prompt, which begin many prompts.
    """

    placement: Placement
    allowance: Allowance | None = None
    tell_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Queue:
    """The session must wait: capacity will come back. `unavailable`: no replica of a kind that it needs is up.

    `for_turn`: there is room, but every replica has prompts enough to compute.
    """

    reason: str
    unavailable: bool = False
    for_turn: bool = False


@dataclass(frozen=True, slots=True)
class Reject:
    """The session is refused. `retry_after_s`: when to ask again; None: the request can never be served here.

    `code`: the kind of reason, for programs: `queue_full`, `queue_timeout`, `displaced`, `predicted_ttft`,
    `predicted_tpot`, `unknown_class`, `ends_engines`, `requests_per_minute`, `tokens_per_minute` or `manager_retires`;
    "" for any other. `allowance`: as in `Admit`.
    """

    reason: str
    retry_after_s: float | None = None
    unavailable: bool = False
    code: str = ""
    allowance: Allowance | None = None


Decision = Admit | Queue | Reject

MANAGER_RETIRES = "manager_retires"
"""The code of a refusal that only asks the caller to repeat its question: another session manager will answer."""


@dataclass(frozen=True, slots=True)
class SessionTask:
    """One replica's part of a session.

    `request`: the frames of an encoded EngineCoreRequest. `reservation`: what is reserved for it on this replica.
    `movable`: this replica writes the end of the answer, and another one could go on with it. `hands_over`: the session
    moves away from this replica, which only hands over its KV; it may be draining, and Serve may have taken it out.
    `traceparent`: the parent of the replica's span, as W3C writes it; "" where nothing is traced. `let_go`: the
    sessions that the replica lets go before it begins this one, which needs what they hold.
    """

    session_id: str
    epoch: int
    replica_id: str
    request_id: str
    request: tuple[bytes, ...]
    timeout_s: float
    prompt_tokens: int
    reservation: Reservation = NOTHING
    movable: bool = False
    hands_over: bool = False
    traceparent: str = ""
    let_go: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Locate:
    """Asks one replica where ingresses connect to it: the argument of its `address` call, which our router delivers.

    `session_id`: the session that is to begin there. `hands_over`: as in `SessionTask`.
    """

    replica_id: str
    session_id: str
    hands_over: bool = False


MOVED = "moved"
"""The outcome of a part that a replica gave up. Its KV cache stays there, for another replica to take."""
