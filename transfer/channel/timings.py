"""How long a channel waits for what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one worker's channel, in the unit that their names end in.

    `active_ms`: the longest sleep of the channel's thread while the transport has work. `waiting_ms`: the same while
    handoffs are open and no write is known to be under way.
    `write_poll_s`: the pause between two looks at writes in flight.
    `warm_up_s`: making or closing a data connection takes at most this, while both sides let the transport work.
    `offer_grace_s`: once a prefill has ended, decode has this long to offer its blocks; it had the prefill's time too.
    `nudge_after_s`: a write that takes longer needs the attention of the decode side, which may be asleep; the decode
    side is told so again every `nudge_again_s`, and stays awake for `nudged_s` each time.
    `finish_writes_s`: a channel that closes waits this long for the writes in flight.
    `end_s`: `Channel.close` waits this long for the channel's thread.
    """

    active_ms: int = 1
    waiting_ms: int = 50
    write_poll_s: float = 0.00005
    warm_up_s: float = 2.0
    offer_grace_s: float = 10.0
    nudge_after_s: float = 0.0005
    nudge_again_s: float = 0.005
    nudged_s: float = 0.02
    finish_writes_s: float = 5.0
    end_s: float = 10.0


TIMINGS = Timings()
