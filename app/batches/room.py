"""How many lines run at once: as many as admission lets in. Pure.

Additive increase and multiplicative decrease: a window of as many answered lines adds one place, a refusal takes half
of the places, once for each round of refusals, and no line is tried for a while. So batches take the room that other
requests leave, find it again when it is there, and give way when it is not.
"""

from __future__ import annotations

HOLD_S = 1.0
"""After a refusal, others in this time count as the same."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
FIRST = 4


class Room:
    """`most`: places at most. `places`: those of now. Times are seconds of the caller's clock."""

    def __init__(self, most: int, first: int = FIRST) -> None:
        self._most = most
        self._places = float(min(first, most))
        self._pause_s = FIRST_PAUSE_S
        self._same_until_s = 0.0
        self.shut_until_s = 0.0
        """No line is tried before."""

    @property
    def places(self) -> int:
        return int(self._places)

    def answered(self) -> None:
        """A line was let in and has its answer."""
        self._places = min(self._most, self._places + 1.0 / self._places)
        self._pause_s = FIRST_PAUSE_S

    def refused(self, now_s: float, retry_after_s: float = 0.0) -> None:
        """A line was not let in. `retry_after_s`: after which trying again makes sense, as it was told."""
        if now_s < self._same_until_s:
            return
        self._places = max(1.0, self._places / 2)
        pause_s = min(LONGEST_PAUSE_S, max(self._pause_s, retry_after_s))
        self.shut_until_s, self._same_until_s = now_s + pause_s, now_s + pause_s + HOLD_S
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
