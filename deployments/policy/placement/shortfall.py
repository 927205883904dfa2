"""Why a request has no place now, or can never have one, with numbers for its client. Pure."""

from __future__ import annotations

import numpy as np

from deployments.messages import Queue, Reject, Role
from deployments.policy.placement.field import Field, most_tokens, takes
from transfer.memory.blocks import blocks_for


def owner_shortfall(here: Field, role: Role) -> Queue | Reject:
    """Why no replica of a role can own the session now."""
    tokens, columns = most_tokens(here.request), here.columns(role)
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


def helper_shortfall(here: Field) -> Queue | Reject:
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
    """A rejection, when every pool of a role is known and none could ever take the request."""
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
