"""Why a request has no place now, or can never have one, with numbers for its client. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deployments.messages import Mode, Queue, Reject, ReplicaInfo, Role
from deployments.policy.placement.field import Field, most_tokens, takes
from transfer.memory.blocks import blocks_for


def shortfall(here: Field) -> Queue | Reject:
    """Why a request has no place now."""
    found = _shortfall(here)
    if here.yields and isinstance(found, Queue) and not found.unavailable:
        return Queue("no replica has anything to spare for a class that yields", for_turn=found.for_turn)
    return found


def _shortfall(here: Field) -> Queue | Reject:
    could_prefill = here.alone_with_room | (here.all_helpers if here.pair_owners.any() else False)
    if could_prefill.any() and not (could_prefill & here.has_turn).any():
        limit_s = here.longest_queue_s
        return Queue(f"every replica that prefills has more than {limit_s:g} s of work", for_turn=True)
    if Mode.DISAGGREGATED in here.modes and here.owners.any() and (missed := pair_shortfall(here)) is not None:
        return missed
    if (here.owners | here.alone_with_room).any():
        return Queue("the replicas with room compute prompts, and those that write answers are full", for_turn=True)
    return owner_shortfall(here)


def owner_shortfall(here: Field) -> Queue | Reject:
    """Why no replica can write the answer now."""
    tokens, columns = most_tokens(here.request), here.columns
    answers_whole = here.modes[0] is Mode.PREFILL_LOCAL
    if never := _never_fits(here, lambda info: info.decodes or answers_whole, tokens, "replica"):
        return never
    ready = columns.ready & (here.may_own | answers_whole)
    if not ready.any():
        return Queue("no replica is ready that decodes", unavailable=True)
    able = np.flatnonzero(ready & here.can_hold(tokens))
    if not able.size:
        return Queue(f"no ready replica is large enough for {tokens} tokens")
    if (columns["sessions"][able] >= columns["max_sessions"][able]).all():
        return Queue("every replica that fits runs its most sessions")
    best = int(able[columns["free_blocks"][able].argmax()])
    need = blocks_for(tokens, columns.info(best).block_size)
    return Queue(f"KV blocks are short: {need} needed, at most {int(columns['free_blocks'][best])} free on a replica")


def pair_shortfall(here: Field) -> Queue | Reject | None:
    """Why a request that decodes somewhere cannot be split now, by the roles of the pools; None where it can."""
    tokens, columns = here.request.prompt_tokens + 1, here.columns
    helps = ~columns.is_of(Role.DECODE)
    helpers, owners = here.helpers & helps, here.pair_owners & ~columns.is_of(Role.PREFILL)
    if any(_makes_pair(owners & same, helpers & same) for same in columns.by_engine()):
        return None
    if not (columns.ready & ~columns.is_of(Role.PREFILL)).any():
        return Queue("no decode replica is ready", unavailable=True)
    if never := _never_fits(here, lambda info: info.role is not Role.DECODE, tokens, "prefill replica"):
        return never
    if not (columns.ready & helps).any():
        return Queue("no prefill replica is ready", unavailable=True)
    if not (columns.ready & helps & here.can_hold(tokens)).any():
        return Queue(f"no ready prefill replica is large enough for {tokens} tokens")
    if not helpers.any():
        return Queue(f"every prefill replica has more than {here.longest_queue_s:g} s of work", for_turn=True)
    return Queue("no ready prefill replica has the same engine as a decode replica with room")


def _makes_pair(owners: np.ndarray, helpers: np.ndarray) -> bool:
    """Whether there is one of each that are not the same replica."""
    return bool(owners.any() and helpers.any() and np.count_nonzero(owners | helpers) > 1)


def _never_fits(here: Field, counts: Callable[[ReplicaInfo], bool], tokens: int, name: str) -> Reject | None:
    """A rejection, when every pool is known and none of those that count could ever take the request."""
    shapes = [info for info in here.view.known if counts(info)]
    is_taken = any(takes(here.request, info, here.settings.limits, tokens) for info in shapes)
    if here.view.silent or not shapes or is_taken:
        return None
    most = max(min(info.max_model_len, info.total_blocks * info.block_size) for info in shapes)
    prompt = here.request.prompt_tokens
    if tokens <= most:
        return Reject("no pool takes such a request: see the pools' limits of prompt length, class and adapter")
    return Reject(
        f"the request needs {tokens} tokens ({prompt} prompt + {tokens - prompt} answer), "
        f"and the largest {name} holds {most}"
    )
