"""The waiting times of a channel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one worker's channel, in the unit that their names end in.

    `active_ms`: the longest sleep of the channel's thread while the transport has work.
    `waiting_ms`: the longest sleep while handoffs are open and no write is known to be under way.
    `write_poll_s`: the pause between two looks at writes in flight.
    `warm_up_s`: the longest time to make or close a data connection, while both sides let the transport work.
    `offer_grace_s`: the time after a prefill's end in which decode may still offer its blocks. It also had the time of
    the prefill.
    `fetch_grace_s`: the time that a fetch has to stop once its time is over. Then its request waits no longer for it.
    `nudge_after_s`: a write that takes longer than this needs the decode side, which may be asleep. A nudge wakes it.
    `nudge_again_s`: the pause between two nudges.
    `nudged_s`: the time that the decode side stays awake after each nudge.
    `finish_writes_s`: the longest time that a closing channel waits for the writes in flight.
    `end_s`: the longest time that `Channel.close` waits for the channel's thread.
    """

    active_ms: int = 1
    waiting_ms: int = 50
    write_poll_s: float = 0.00005
    warm_up_s: float = 2.0
    offer_grace_s: float = 10.0
    fetch_grace_s: float = 0.25
    nudge_after_s: float = 0.0005
    nudge_again_s: float = 0.005
    nudged_s: float = 0.02
    finish_writes_s: float = 5.0
    end_s: float = 10.0


TIMINGS = Timings()
