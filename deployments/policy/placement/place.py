"""Where a session goes: filter the replicas that can hold it, score them in seconds, pick the best way. Pure.

`place` filters (`field`), asks the configured policy for its choice (`joint`, or one of `baselines` to compare with),
and says what the choice is expected to cost.
"""

from __future__ import annotations

import numpy as np

from deployments.messages import MOVED, Admit, Decision, Forecast, Mode, Placement, Role
from deployments.policy.placement.choice import Choice, Policy
from deployments.policy.placement.fetch import fetch_plan
from deployments.policy.placement.field import Field, is_short, most_tokens
from deployments.policy.placement.shortfall import pair_shortfall, shortfall
from transfer.memory.blocks import blocks_for

HANDOFF_FAILED = "a handoff failed"
"""The reason of a placement on one replica, where the session's handoff has failed."""


def place(here: Field, policy: Policy) -> Decision:
    """The best way to serve a request now, or why it has to wait or cannot be served.

    The placement's epoch is 1; the ledger's keeper replaces it.
    """
    if (move := _choose_move(here, policy)) is not None:
        return Admit(_placement(here, Mode.DISAGGREGATED, MOVED, move))
    if (choice := policy.choose(here)) is None:
        return shortfall(here)
    mode = mode_of(here, choice)
    return Admit(_placement(here, mode, _reason(here, mode), choice))


def mode_of(here: Field, choice: Choice) -> Mode:
    """The mode in which a choice serves its request."""
    if choice.helper is not None:
        return Mode.DISAGGREGATED
    return Mode.PREFILL_LOCAL if here.columns.info(choice.owner).role is Role.PREFILL else Mode.DECODE_LOCAL


def _reason(here: Field, mode: Mode) -> str:
    if mode is Mode.DISAGGREGATED:
        return "split"
    if here.request.failed_handoffs:
        return HANDOFF_FAILED
    if is_short(here.request, here.settings):
        return "short prompt"
    if Mode.DISAGGREGATED not in here.request.allowed:
        return here.request.rule or "one replica"
    missed = pair_shortfall(here)
    return "cheaper on one replica" if missed is None else missed.reason


def _choose_move(here: Field, policy: Policy) -> Choice | None:
    """Where a session moves to, with the replica that gives it up as the helper, which hands over its KV.

    The helper need not be ready: it may be draining, or full. None: no other replica has room, or nothing can be handed
    over.
    """
    source = here.columns.rows.get(here.request.moved_from)
    if source is None or not here.settings.moves or Mode.DISAGGREGATED not in here.request.allowed:
        return None
    able = here.owners & (here.columns.fingerprint == here.columns.fingerprint[source])
    able[source] = False
    return Choice(policy.target(here, able), source) if able.any() else None


def _placement(here: Field, mode: Mode, reason: str, choice: Choice) -> Placement:
    owner = here.columns.info(choice.owner)
    helper = None if choice.helper is None else here.columns.info(choice.helper)
    prefiller = choice.owner if choice.helper is None else choice.helper
    is_whole_on_prefill = mode is Mode.PREFILL_LOCAL
    fetch = None if reason == MOVED else fetch_plan(here.outlook, prefiller)
    return Placement(
        session_id=here.request.session_id,
        epoch=1,
        mode=mode,
        reason=reason,
        decode=None if is_whole_on_prefill else owner,
        prefill=owner if is_whole_on_prefill else helper,
        reserved_blocks=blocks_for(most_tokens(here.request), owner.block_size),
        handoff_timeout_s=here.settings.handoff_timeout_s,
        session_timeout_s=here.settings.session_timeout_s,
        cached_tokens=fetch.tokens if fetch else here.outlook.cached_on(prefiller),
        forecast=_forecast(here, choice.owner, prefiller, computes=reason != MOVED),
        tpot_s=here.objectives[1] if here.objectives[1] < np.inf else 0.0,
        fetch=fetch,
    )


def _forecast(here: Field, owner: int, prefiller: int, computes: bool) -> Forecast:
    """The times expected of a choice, from the numbers that it was made by.

    `computes`: the prompt is computed; a session that moves has it already.
    """
    outlook = here.outlook
    queue_s, prefill_s = float(outlook.ahead_s[prefiller]), float(outlook.prefill_s[prefiller])
    if not computes:
        queue_s = prefill_s = 0.0
    transfer_s = 0.0
    if owner != prefiller and here.knowledge.link_bytes_per_s:
        moving_s = float(outlook.kv_bytes(np.array([owner]))[0]) / here.knowledge.link_bytes_per_s
        transfer_s = max(0.0, moving_s - prefill_s)
    pools = {here.columns.info(row).pool for row in (owner, prefiller)}
    return Forecast(
        queue_s=queue_s,
        prefill_s=prefill_s,
        transfer_s=transfer_s,
        ttft_s=queue_s + prefill_s + float(outlook.loading_s[prefiller]),
        tpot_s=float(outlook.step_s[owner]),
        output_tokens=here.knowledge.output_tokens,
        trusted=pools <= here.knowledge.trusted,
    )
