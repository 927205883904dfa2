"""Where a session goes: filter the replicas that can hold it, score them in seconds, pick one pair. Pure.

`place` filters, asks the configured policy for its choice (`joint`, or one of those to compare with in `policies`) and
says what the choice is expected to cost. The filter is the same for all: a decode replica must have room for
prompt plus longest answer, so that it never has to preempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from configs.schema import WeightsConfig
from deployments.fleet.columns import Columns, Flags, Numbers
from deployments.fleet.view import View
from deployments.messages import (
    Admit,
    Decision,
    Forecast,
    Mode,
    Placement,
    Queue,
    Reject,
    ReplicaInfo,
    Role,
    SessionRequest,
)
from deployments.policy.chance import Chance
from deployments.policy.placement.estimates import Knowledge, Limits, Outlook
from transfer.memory.blocks import blocks_for


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """`split_min_prompt_tokens`: shorter prompts are prefilled by the decode replica itself.

    `split_always`: longer ones are split wherever they can be; otherwise where that is expected to cost less.
    `prefill_queue_s`: a prefill replica with so much work ahead takes no more, none: engines queue without limit.
    `max_retry_after_s`: the longest that a client is told to stay away. `limits`: by pool, none: it takes anything.
    `moves`: a replica can hand over the KV cache of a session that it lets go.
    """

    split_min_prompt_tokens: int = 1
    handoff_timeout_s: float = 60.0
    session_timeout_s: float = 600.0
    max_retry_after_s: float = 30.0
    split_always: bool = False
    prefill_queue_s: float | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    limits: Mapping[str, Limits] = field(default_factory=dict)
    moves: bool = True


class Field:
    """One request before the fleet: who could take it, and what to expect of each.

    `rng` decides between equals. `objectives`: TTFT and TPOT in seconds of the request's class, infinite where none.
    `decode_s`: what a policy has computed of each role, to be used again.
    """

    def __init__(
        self,
        request: SessionRequest,
        view: View,
        settings: PlacementSettings,
        knowledge: Knowledge,
        rng: Chance,
        objectives: tuple[float, float],
    ) -> None:
        self.request, self.view, self.settings, self.knowledge = request, view, settings, knowledge
        self.rng, self.objectives = rng, objectives
        self._columns: dict[Role, Columns] = {}
        self._outlooks: dict[Role, Outlook] = {}
        self._owners: dict[Role, Flags] = {}
        self.decode_s: dict[Role, Numbers] = {}

    def columns(self, role: Role) -> Columns:
        if role not in self._columns:
            self._columns[role] = self.view.columns(role)
        return self._columns[role]

    def outlook(self, role: Role) -> Outlook:
        if role not in self._outlooks:
            self._outlooks[role] = Outlook(self.request, self.columns(role), self.knowledge, self.view.now_s)
        return self._outlooks[role]

    def owners(self, role: Role) -> Flags:
        """The replicas of a role that can hold the whole answer now."""
        if role not in self._owners:
            self._owners[role] = self._find_owners(role)
        return self._owners[role]

    def _find_owners(self, role: Role) -> Flags:
        columns, tokens = self.columns(role), _tokens(self.request)
        able: Flags = columns["room_blocks"] >= columns.blocks_for(tokens)
        return able & columns.ready & self.can_hold(columns, tokens)

    def helpers(self) -> Flags:
        """The prefill replicas that could compute the prompt. They need not have free blocks: prefills queue."""
        columns = self.columns(Role.PREFILL)
        able = columns.ready & self.can_hold(columns, self.request.prompt_tokens + 1)
        if self.settings.prefill_queue_s is None:
            return able
        return able & (self.outlook(Role.PREFILL).queue_s <= self.settings.prefill_queue_s)

    def can_hold(self, columns: Columns, tokens: int) -> Flags:
        """The replicas that could hold so many tokens if they were empty, and whose pool takes such a request."""
        return _can_hold(self.request, columns, tokens, self.settings.limits)


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows picked: `owner` writes the answer, `helper` prefills for it. `cost_s`: what it costs everybody.

    `helper_role`: not prefill where a decode replica hands over a session that it lets go.
    """

    owner: int
    helper: int | None = None
    cost_s: float = 0.0
    helper_role: Role = Role.PREFILL


class Policy(Protocol):
    """How to choose among those that fit."""

    def pair(self, here: Field, owners: Flags, helpers: Flags) -> Choice | None:
        """A decode and a prefill replica with the same engine; None when no two match. Neither is all false."""

    def alone(self, here: Field, role: Role, owners: Flags) -> Choice:
        """One replica for prefill and decode. `owners` has at least one."""

    def target(self, here: Field, owners: Flags) -> int:
        """The decode replica that takes over a session with its KV cache. `owners` has at least one."""

    def at_least(self, here: Field, role: Role, owners: Flags) -> float:
        """What `alone` costs at least, found out quickly; infinite where costs cannot be compared with a pair's."""


NOTHING = Knowledge()


def place(
    request: SessionRequest,
    view: View,
    settings: PlacementSettings,
    policy: Policy,
    rng: Chance,
    knowledge: Knowledge = NOTHING,
    objectives: tuple[float, float] = (np.inf, np.inf),
) -> Decision:
    """The best way to serve a request now, or why it has to wait or cannot be served.

    A placement's epoch is 1; whoever keeps the ledger numbers later attempts.
    """
    here = Field(request, view, settings, knowledge, rng, objectives)
    if (move := _choose_move(here, policy)) is not None:
        return Admit(_placement(here, Mode.DISAGGREGATED, "moved", move))
    missed: list[Queue | Reject] = []
    best: tuple[Choice, Mode, str] | None = None
    # Without any idea of times, one replica would always seem to cost less than two.
    weighs = bool(here.columns(Role.DECODE).coefficients) and not settings.split_always
    for mode in _modes(request, here, settings):
        if best is not None and not _may_cost_less(here, policy, mode, best[0].cost_s):
            continue
        choice = _CHOOSERS[mode](here, policy)
        if not isinstance(choice, Choice):
            missed.append(choice)
        elif best is None:
            best = choice, mode, missed[0].reason if missed else _reason(here, mode)
        elif choice.cost_s < best[0].cost_s - near_s(best[0].cost_s, settings.weights):
            best = choice, mode, "cheaper on one replica"
        if best is not None and (not weighs or best[1] is Mode.PREFILL_LOCAL):
            break
    if best is None:
        return next((miss for miss in missed if isinstance(miss, Queue)), missed[0])
    choice, mode, reason = best
    return Admit(_placement(here, mode, reason, choice))


def _may_cost_less(here: Field, policy: Policy, mode: Mode, cost_s: float) -> bool:
    """Whether one replica might serve the request for clearly less."""
    role = Role.PREFILL if mode is Mode.PREFILL_LOCAL else Role.DECODE
    owners = here.owners(role)
    return bool(owners.any()) and policy.at_least(here, role, owners) < cost_s - near_s(cost_s, here.settings.weights)


def near_s(cost_s: float, weights: WeightsConfig) -> float:
    """How much more than `cost_s` counts as equal to it."""
    return max(weights.near_s, weights.near_share * abs(cost_s))


def claimed(request: SessionRequest, view: View, limits: Mapping[str, Limits] | None = None) -> str | None:
    """The ready decode replica that a patient waiter waits for: of those that could hold it if empty, the one that has
    the most blocks free. None where no such replica is ready. `limits`: what a pool takes, by its name.
    """
    columns = view.columns(Role.DECODE)
    able = np.flatnonzero(columns.ready & _can_hold(request, columns, _tokens(request), limits or {}))
    if not able.size:
        return None
    return columns.info(int(able[columns["free_blocks"][able].argmax()])).replica_id


def _modes(request: SessionRequest, here: Field, settings: PlacementSettings) -> tuple[Mode, ...]:
    """The modes to try. The prefill pool decodes only what asks for it first, or when nobody else is up."""
    modes = request.allowed
    if not modes:
        raise ValueError(f"session {request.session_id} allows no mode")
    if _is_short(request, settings):
        modes = tuple(mode for mode in modes if mode is not Mode.DISAGGREGATED)
    if modes[0] is not Mode.PREFILL_LOCAL and here.columns(Role.DECODE).ready.any():
        modes = tuple(mode for mode in modes if mode is not Mode.PREFILL_LOCAL)
    return modes


def _is_short(request: SessionRequest, settings: PlacementSettings) -> bool:
    has_choice = {Mode.DISAGGREGATED, Mode.DECODE_LOCAL} <= set(request.allowed)
    return has_choice and request.prompt_tokens < settings.split_min_prompt_tokens


def _reason(here: Field, mode: Mode) -> str:
    if _is_short(here.request, here.settings):
        return "short prompt"
    return here.request.rule or ("split" if mode is Mode.DISAGGREGATED else "one replica")


def _choose_move(here: Field, policy: Policy) -> Choice | None:
    """Where a session goes that a replica lets go, and that replica as the one that hands over what it has.

    It need not be ready: it may be draining, or full. None: no other replica has room, or nothing can be handed over.
    """
    moved_from = here.request.moved_from
    if not moved_from or not here.settings.moves or Mode.DISAGGREGATED not in here.request.allowed:
        return None
    for role in Role:
        columns, decode = here.columns(role), here.columns(Role.DECODE)
        if (source := columns.rows.get(moved_from)) is not None:
            able = here.owners(Role.DECODE) & (decode.fingerprint == columns.fingerprint[source])
            if role is Role.DECODE:
                able[source] = False
            return Choice(policy.target(here, able), source, helper_role=role) if able.any() else None
    return None


def _choose_pair(here: Field, policy: Policy) -> Choice | Queue | Reject:
    owners = here.owners(Role.DECODE)
    if not owners.any():
        return _shortfall(here, Role.DECODE)
    helpers = here.helpers()
    choice = policy.pair(here, owners, helpers) if helpers.any() else None
    return choice or _helper_shortfall(here)


def _choose_one(role: Role) -> Callable[[Field, Policy], Choice | Queue | Reject]:
    def choose(here: Field, policy: Policy) -> Choice | Queue | Reject:
        owners = here.owners(role)
        return policy.alone(here, role, owners) if owners.any() else _shortfall(here, role)

    return choose


_CHOOSERS: dict[Mode, Callable[[Field, Policy], Choice | Queue | Reject]] = {
    Mode.DISAGGREGATED: _choose_pair,
    Mode.DECODE_LOCAL: _choose_one(Role.DECODE),
    Mode.PREFILL_LOCAL: _choose_one(Role.PREFILL),
}


def _placement(here: Field, mode: Mode, reason: str, choice: Choice) -> Placement:
    role = Role.PREFILL if mode is Mode.PREFILL_LOCAL else Role.DECODE
    owner = here.columns(role).info(choice.owner)
    helper = None if choice.helper is None else here.columns(choice.helper_role).info(choice.helper)
    prefiller = (role, choice.owner) if choice.helper is None else (choice.helper_role, choice.helper)
    return Placement(
        session_id=here.request.session_id,
        epoch=1,
        mode=mode,
        reason=reason,
        decode=owner if role is Role.DECODE else None,
        prefill=helper if role is Role.DECODE else owner,
        reserved_blocks=blocks_for(_tokens(here.request), owner.block_size),
        handoff_timeout_s=here.settings.handoff_timeout_s,
        session_timeout_s=here.settings.session_timeout_s,
        cached_tokens=here.outlook(prefiller[0]).cached_on(prefiller[1]),
        forecast=_forecast(here, (role, choice.owner), prefiller),
    )


def _forecast(here: Field, owner: tuple[Role, int], prefiller: tuple[Role, int]) -> Forecast:
    """What a choice is expected to take, in the numbers that it was made by."""
    (prefill_role, prefill_row), (role, row) = prefiller, owner
    first, then = here.outlook(prefill_role), here.outlook(role)
    queue_s, prefill_s = float(first.queue_s[prefill_row]), float(first.prefill_s[prefill_row])
    transfer_s = 0.0
    if owner != prefiller and here.knowledge.link_bytes_per_s:
        transfer_s = max(0.0, float(then.kv_bytes(np.array([row]))[0]) / here.knowledge.link_bytes_per_s - prefill_s)
    pools = {here.columns(each).info(at).pool for each, at in (owner, prefiller)}
    return Forecast(
        queue_s=queue_s,
        prefill_s=prefill_s,
        transfer_s=transfer_s,
        ttft_s=queue_s + prefill_s,
        tpot_s=float(then.step_s[row]),
        output_tokens=here.knowledge.output_tokens,
        trusted=pools <= here.knowledge.trusted,
    )


def _tokens(request: SessionRequest) -> int:
    """The most tokens a session can come to hold."""
    return request.prompt_tokens + request.max_tokens


def _holds(info: ReplicaInfo, tokens: int) -> bool:
    """Whether an empty replica of this shape could hold so many tokens."""
    return tokens <= info.max_model_len and blocks_for(tokens, info.block_size) <= info.total_blocks


def _can_hold(request: SessionRequest, columns: Columns, tokens: int, limits: Mapping[str, Limits]) -> Flags:
    able: Flags = columns["capacity_tokens"] >= tokens
    if not limits:
        return able
    takes = [limits.get(kind.pool, Limits()).take(request) for kind in columns.kinds]
    taken: Flags = np.array(takes or [True])[columns.kind]
    return able & taken


def takes(request: SessionRequest, info: ReplicaInfo, limits: Mapping[str, Limits], tokens: int | None = None) -> bool:
    """Whether an empty replica of this shape takes a request. `tokens`: of it, that it has to hold; none: all."""
    able = _holds(info, _tokens(request) if tokens is None else tokens)
    return able and limits.get(info.pool, Limits()).take(request)


def _shortfall(here: Field, role: Role) -> Queue | Reject:
    """Why no replica of a role can own the session now."""
    tokens, columns = _tokens(here.request), here.columns(role)
    if never := _never_fits(here, role, tokens):
        return never
    if not columns.ready.any():
        return Queue(f"no {role} replica is ready", unavailable=True)
    able = np.flatnonzero(columns.ready & here.can_hold(columns, tokens))
    if not able.size:
        return Queue(f"no ready {role} replica is large enough for {tokens} tokens")
    if (columns["sessions"][able] >= columns["max_sessions"][able]).all():
        return Queue(f"every {role} replica that fits runs its most sessions")
    best = int(able[columns["free_blocks"][able].argmax()])
    need = blocks_for(tokens, columns.info(best).block_size)
    free = int(columns["free_blocks"][best])
    return Queue(f"KV blocks are short: {need} needed, at most {free} free on a {role} replica")


def _helper_shortfall(here: Field) -> Queue | Reject:
    """Why no replica can prefill for a session that a decode replica could hold."""
    tokens, columns = here.request.prompt_tokens + 1, here.columns(Role.PREFILL)
    if never := _never_fits(here, Role.PREFILL, tokens):
        return never
    if not columns.ready.any():
        return Queue("no prefill replica is ready", unavailable=True)
    if not (columns.ready & here.can_hold(columns, tokens)).any():
        return Queue(f"no ready prefill replica is large enough for {tokens} tokens")
    if not here.helpers().any():
        return Queue(f"every prefill replica has more than {here.settings.prefill_queue_s:g} s of work")
    return Queue("no ready prefill replica has the same engine as a decode replica with room")


def _never_fits(here: Field, role: Role, tokens: int) -> Reject | None:
    """A rejection with numbers, when every pool of a role is known and none could ever take the request."""
    shapes = [info for info in here.view.known if info.role is role]
    if (
        role in here.view.silent
        or not shapes
        or any(takes(here.request, info, here.settings.limits, tokens) for info in shapes)
    ):
        return None
    most = max(min(info.max_model_len, info.total_blocks * info.block_size) for info in shapes)
    prompt = here.request.prompt_tokens
    if tokens <= most:
        return Reject(f"no {role} pool takes such a request: see the pools' limits of prompt length, class and adapter")
    return Reject(
        f"the request needs {tokens} tokens ({prompt} prompt + {tokens - prompt} answer), "
        f"and the largest {role} replica holds {most}"
    )
