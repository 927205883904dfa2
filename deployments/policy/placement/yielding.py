"""Where work that yields may go: it takes what the other sessions of a replica leave, and no more. Pure."""

from __future__ import annotations

import numpy as np

from deployments.fleet.columns import Columns, Flags, Numbers
from deployments.messages import Role
from deployments.policy.placement.letting_go import EASE

MOST_SHARE = 0.8
"""The share of a replica's blocks, and of the sessions that it runs at once, up to which work that yields may fill it.
The rest is for other sessions, which so find room at once. An empty replica takes one session of any size."""
LONGEST_QUEUE_S = 0.0
"""The predicted seconds of prompts behind which a prompt that yields is placed: none, so that another request's prompt
waits for one of them at most."""
OWN_QUEUE_S = 1.0
"""The same in a pool that takes nothing else: enough to have the next prompt when one is done. What waits there holds
memory already."""


def spares(columns: Columns, blocks: Numbers | float, tpot_s: Numbers, slack: float) -> Flags:
    """The replicas that have what one more session needs to spare.

    `blocks`: what it needs, on each or on all. `tpot_s`: the predicted TPOT of each with it. Its answers that have an
    objective must keep it, up to `slack` times, with some ease.
    """
    left = (columns["room_blocks"] - blocks) * columns["per_block"]
    has_memory = left >= 1.0 - MOST_SHARE
    has_places = columns["sessions"] + 1.0 <= MOST_SHARE * columns["max_sessions"]
    keeps_pace = (columns["tpot_s"] == 0.0) | (tpot_s <= EASE * slack * columns["tpot_s"])
    found: Flags = (has_memory & has_places & keeps_pace) | (columns["sessions"] == 0.0)
    return found


def leaves_one_idle(columns: Columns, own: Flags) -> Flags:
    """The replicas where one more prompt leaves another replica that computes prompts without any.

    `own`: replicas that take nothing but what yields. They do not count.

    A step cannot be interrupted, so a prompt that finds one that yields in the middle of a step waits for its end.
    Where prefill pools, or mixed ones, have two replicas at least, one of them has no prompt that yields, so that
    others find one at once. Those of decode pools do not count, because prompts go on slowly beside answers there.
    """
    computing = columns.ready & columns.prefills & ~columns.is_of(Role.DECODE) & ~own
    if np.count_nonzero(computing) < 2:
        return np.ones_like(computing)
    idle = computing & (columns["prompts"] == 0.0)
    found: Flags = ~computing | (np.count_nonzero(idle) - idle > 0)
    return found
