"""Where a session goes: filter the replicas that can hold it, score them, pick one. Pure.

Decode replicas are scored by the share of their KV blocks that would be left. A share, and not a count, lets
unlike pools fill side by side: the large one takes more, and the small one serves from the first moments of
load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deployments.fleet import FleetView, ReplicaView, blocks_for
from deployments.messages import (
    Admit,
    Decision,
    Mode,
    Placement,
    Queue,
    Reject,
    ReplicaInfo,
    Role,
    SessionRequest,
)


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """`split_min_prompt_tokens`: shorter prompts are prefilled by the decode replica itself.

    `max_retry_after_s`: the longest that a client is told to stay away.
    """

    split_min_prompt_tokens: int = 1
    handoff_timeout_s: float = 60.0
    session_timeout_s: float = 600.0
    max_retry_after_s: float = 30.0


def place(request: SessionRequest, view: FleetView, settings: PlacementSettings) -> Decision:
    """The first of the request's modes that can be served now, or why it has to wait or cannot be served.

    A placement's epoch is 1; whoever keeps the ledger numbers later attempts.
    """
    missed: list[Queue | Reject] = []
    reason = _not_worth_splitting(request, settings) or request.rule or "split"
    for mode in _modes(request, view, settings):
        decision = _PLACERS[mode](request, view)
        if isinstance(decision, _Pair):
            why = missed[0].reason if missed else reason
            return Admit(_placement(request, settings, mode, why, decision))
        missed.append(decision)
    return next((miss for miss in missed if isinstance(miss, Queue)), missed[0])


def claims(request: SessionRequest, view: FleetView) -> frozenset[str]:
    """The ready decode replicas that could hold a request if empty: what a patient waiter waits for."""
    return frozenset(
        replica.info.replica_id for replica in view.of(Role.DECODE) if _holds(replica.info, _tokens(request))
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    """The replicas picked: `owner` writes the answer, `helper` prefills for it."""

    owner: ReplicaInfo
    helper: ReplicaInfo | None = None


def _modes(request: SessionRequest, view: FleetView, settings: PlacementSettings) -> tuple[Mode, ...]:
    """The modes to try. The prefill pool decodes only what asks for it first, or when nobody else is up."""
    modes = request.allowed
    if not modes:
        raise ValueError(f"session {request.session_id} allows no mode")
    if _not_worth_splitting(request, settings):
        modes = tuple(mode for mode in modes if mode is not Mode.DISAGGREGATED)
    if modes[0] is not Mode.PREFILL_LOCAL and view.of(Role.DECODE):
        modes = tuple(mode for mode in modes if mode is not Mode.PREFILL_LOCAL)
    return modes


def _not_worth_splitting(request: SessionRequest, settings: PlacementSettings) -> str:
    short = request.prompt_tokens < settings.split_min_prompt_tokens
    has_choice = {Mode.DISAGGREGATED, Mode.DECODE_LOCAL} <= set(request.allowed)
    return "short prompt" if short and has_choice else ""


def _place_disaggregated(request: SessionRequest, view: FleetView) -> _Pair | Queue | Reject:
    owners = _owners(request, view, Role.DECODE)
    if not owners:
        return _shortfall(request, view, Role.DECODE)
    for owner in owners:
        if helper := _helper(request, view, owner.info.fingerprint):
            return _Pair(owner.info, helper)
    return _helper_shortfall(request, view)


def _place_decode_local(request: SessionRequest, view: FleetView) -> _Pair | Queue | Reject:
    owners = _owners(request, view, Role.DECODE)
    return _Pair(owners[0].info) if owners else _shortfall(request, view, Role.DECODE)


def _place_prefill_local(request: SessionRequest, view: FleetView) -> _Pair | Queue | Reject:
    owners = _owners(request, view, Role.PREFILL)
    return _Pair(owners[0].info) if owners else _shortfall(request, view, Role.PREFILL)


_PLACERS: dict[Mode, Callable[[SessionRequest, FleetView], _Pair | Queue | Reject]] = {
    Mode.DISAGGREGATED: _place_disaggregated,
    Mode.DECODE_LOCAL: _place_decode_local,
    Mode.PREFILL_LOCAL: _place_prefill_local,
}


def _owners(request: SessionRequest, view: FleetView, role: Role) -> list[ReplicaView]:
    """The replicas of a role that can hold the whole answer now, best first."""
    tokens = _tokens(request)

    def fits(replica: ReplicaView) -> bool:
        room = blocks_for(tokens, replica.info.block_size) <= replica.free_blocks
        return room and replica.sessions < replica.info.max_sessions and _holds(replica.info, tokens)

    def score(replica: ReplicaView) -> tuple[float, float, int, str]:
        left = replica.free_blocks - blocks_for(tokens, replica.info.block_size)
        backlog = float(replica.backlog_tokens) if role is Role.PREFILL else 0.0
        return backlog, -left / replica.info.total_blocks, replica.sessions, replica.info.replica_id

    return sorted(filter(fits, view.of(role)), key=score)


def _helper(request: SessionRequest, view: FleetView, fingerprint: str) -> ReplicaInfo | None:
    """The least loaded prefill replica with the same engine. It need not have free blocks: prefills queue."""
    fits = [
        replica
        for replica in view.of(Role.PREFILL)
        if replica.info.fingerprint == fingerprint and _holds(replica.info, request.prompt_tokens + 1)
    ]
    best = min(fits, key=lambda replica: (replica.backlog_tokens, replica.info.replica_id), default=None)
    return best.info if best else None


def _placement(request: SessionRequest, settings: PlacementSettings, mode: Mode, reason: str, pair: _Pair) -> Placement:
    on_decode = pair.owner.role is Role.DECODE
    return Placement(
        session_id=request.session_id,
        epoch=1,
        mode=mode,
        reason=reason,
        decode=pair.owner if on_decode else None,
        prefill=pair.helper if on_decode else pair.owner,
        reserved_blocks=blocks_for(_tokens(request), pair.owner.block_size),
        handoff_timeout_s=settings.handoff_timeout_s,
        session_timeout_s=settings.session_timeout_s,
    )


def _tokens(request: SessionRequest) -> int:
    """The most tokens a session can come to hold."""
    return request.prompt_tokens + request.max_tokens


def _holds(info: ReplicaInfo, tokens: int) -> bool:
    """Whether an empty replica of this shape could hold so many tokens."""
    return tokens <= info.max_model_len and blocks_for(tokens, info.block_size) <= info.total_blocks


def _shortfall(request: SessionRequest, view: FleetView, role: Role) -> Queue | Reject:
    """Why no replica of a role can own the session now."""
    tokens = _tokens(request)
    if never := _never_fits(request, view, role, tokens):
        return never
    if not view.of(role):
        return Queue(f"no {role} replica is ready", unavailable=True)
    able = [replica for replica in view.of(role) if _holds(replica.info, tokens)]
    if not able:
        return Queue(f"no ready {role} replica is large enough for {tokens} tokens")
    if all(replica.sessions >= replica.info.max_sessions for replica in able):
        return Queue(f"every {role} replica that fits runs its most sessions")
    best = max(able, key=lambda replica: (replica.free_blocks, replica.info.replica_id))
    need = blocks_for(tokens, best.info.block_size)
    return Queue(f"KV blocks are short: {need} needed, at most {best.free_blocks} free on a {role} replica")


def _helper_shortfall(request: SessionRequest, view: FleetView) -> Queue | Reject:
    """Why no replica can prefill for a session that a decode replica could hold."""
    tokens = request.prompt_tokens + 1
    if never := _never_fits(request, view, Role.PREFILL, tokens):
        return never
    if not view.of(Role.PREFILL):
        return Queue("no prefill replica is ready", unavailable=True)
    if any(_holds(replica.info, tokens) for replica in view.of(Role.PREFILL)):
        return Queue("no ready prefill replica has the same engine as a decode replica with room")
    return Queue(f"no ready prefill replica is large enough for {tokens} tokens")


def _never_fits(request: SessionRequest, view: FleetView, role: Role, tokens: int) -> Reject | None:
    """A rejection with numbers, when every pool of a role is known and none could ever hold the tokens."""
    shapes = [info for info in view.known if info.role is role]
    if role in view.silent or not shapes or any(_holds(info, tokens) for info in shapes):
        return None
    most = max(min(info.max_model_len, info.total_blocks * info.block_size) for info in shapes)
    prompt = request.prompt_tokens
    return Reject(
        f"the request needs {tokens} tokens ({prompt} prompt + {tokens - prompt} answer), "
        f"and the largest {role} replica holds {most}"
    )
