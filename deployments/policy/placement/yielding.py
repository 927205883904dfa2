"""Where work that yields may go: it takes what the other sessions of a replica leave, and no more. Pure."""

from __future__ import annotations

from deployments.fleet.columns import Columns, Flags, Numbers

MOST_SHARE = 0.8
"""The share of a replica's blocks, and of the sessions that it runs at once, up to which work that yields may fill it.
The rest is for other sessions, which so find room at once. An empty replica takes one session of any size."""
LONGEST_QUEUE_S = 0.1
"""The predicted seconds of prompts behind which a prompt that yields is placed: hardly any, so that a replica has the
next one when it is done with one, and another request's prompt waits for one of them at most."""


def spares(columns: Columns, blocks: Numbers | float, tpot_s: Numbers, slack: float) -> Flags:
    """The replicas that have what one more session needs to spare.

    `blocks`: what it needs, on each or on all. `tpot_s`: the predicted TPOT of each with it. Its answers that have an
    objective must keep it, up to `slack` times.
    """
    left = (columns["room_blocks"] - blocks) * columns["per_block"]
    has_memory = left >= 1.0 - MOST_SHARE
    has_places = columns["sessions"] + 1.0 <= MOST_SHARE * columns["max_sessions"]
    keeps_pace = (columns["tpot_s"] == 0.0) | (tpot_s <= slack * columns["tpot_s"])
    found: Flags = (has_memory & has_places & keeps_pace) | (columns["sessions"] == 0.0)
    return found
