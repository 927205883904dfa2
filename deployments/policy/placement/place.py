"""Where a session goes: filter the replicas that can hold it, score them in seconds, pick one pair. Pure.

`place` filters (`field`), asks the configured policy for its choice (`joint`, or one of `baselines` to compare with),
and says what the choice is expected to cost.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deployments.fleet.view import View
from deployments.messages import Admit, Decision, Forecast, Mode, Placement, Queue, Reject, Role, SessionRequest
from deployments.policy.chance import Chance
from deployments.policy.placement.choice import Choice, Policy, near_s
from deployments.policy.placement.estimates import Knowledge
from deployments.policy.placement.field import Field, PlacementSettings, most_tokens
from deployments.policy.placement.shortfall import helper_shortfall, owner_shortfall
from transfer.memory.blocks import blocks_for

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

    The placement's epoch is 1; the ledger's keeper replaces it.
    """
    here = Field(request, view, settings, knowledge, rng, objectives)
    if (move := _choose_move(here, policy)) is not None:
        return Admit(_placement(here, Mode.DISAGGREGATED, "moved", move))
    missed: list[Queue | Reject] = []
    best: tuple[Choice, Mode, str] | None = None
    # While no step times are known, all costs are near 0, and one replica would always seem to cost less than two.
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


def _modes(request: SessionRequest, here: Field, settings: PlacementSettings) -> tuple[Mode, ...]:
    """The modes to try.

    The prefill pool decodes only requests that ask for it first, or when no decode replica is up.
    """
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
    """Where a session moves to, with the replica that gives it up as the helper, which hands over its KV.

    The helper need not be ready: it may be draining, or full. None: no other replica has room, or nothing can be handed
    over.
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
        return owner_shortfall(here, Role.DECODE)
    helpers = here.helpers()
    choice = policy.pair(here, owners, helpers) if helpers.any() else None
    return choice or helper_shortfall(here)


def _choose_one(role: Role) -> Callable[[Field, Policy], Choice | Queue | Reject]:
    def choose(here: Field, policy: Policy) -> Choice | Queue | Reject:
        owners = here.owners(role)
        return policy.alone(here, role, owners) if owners.any() else owner_shortfall(here, role)

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
        reserved_blocks=blocks_for(most_tokens(here.request), owner.block_size),
        handoff_timeout_s=here.settings.handoff_timeout_s,
        session_timeout_s=here.settings.session_timeout_s,
        cached_tokens=here.outlook(prefiller[0]).cached_on(prefiller[1]),
        forecast=_forecast(here, (role, choice.owner), prefiller),
    )


def _forecast(here: Field, owner: tuple[Role, int], prefiller: tuple[Role, int]) -> Forecast:
    """The times expected of a choice, from the numbers that it was made by."""
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
