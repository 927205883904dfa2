"""What is refused before it is placed or waits, however much room there is. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from deployments.messages import Reject, SessionRequest
from deployments.policy.admission.classes import PriorityClasses
from deployments.policy.admission.poison import Poison
from deployments.policy.admission.retry_budget import RETRY_AFTER_S, RETRY_BUDGET, RetryBudget

CLOSED = Reject("the session was closed before it could be opened")

OVERTAKEN_S = 60.0
"""The longest time that a withdrawal is remembered: an opening that it has overtaken arrives within this time."""


class Entry:
    """Times are seconds of the caller's clock."""

    def __init__(self, classes: PriorityClasses) -> None:
        self._classes = classes
        self._poison, self._retries = Poison(), RetryBudget()
        self._withdrawn: dict[str, float] = {}

    def refusal(self, request: SessionRequest, now_s: float) -> Reject | None:
        """The refusal of a request that no change of the load would let in; None for all others."""
        return self._classes.refusal(request.priority) or self._poison.refusal(request.digest, now_s)

    def refuse_opening(self, request: SessionRequest, open_sessions: Callable[[], int], now_s: float) -> Reject | None:
        """The refusal of an opening; None for all others. It counts: call it once for each."""
        if wrong := self.refusal(request, now_s):
            return wrong
        if request.session_id in self._withdrawn:
            return CLOSED
        if request.attempt == 1:
            self._retries.opened(now_s)
        elif not request.moved_from and not request.progressed and not self._retries.take(now_s, open_sessions()):
            return Reject("too many sessions are placed again", RETRY_AFTER_S, unavailable=True, code=RETRY_BUDGET)
        return None

    def withdrawn(self, session_id: str, now_s: float) -> None:
        """The opening of a session is taken back, perhaps before it has come."""
        self._withdrawn[session_id] = now_s

    def crashed(self, replica_id: str, digests: Collection[int], now_s: float) -> None:
        """An engine has crashed while it had these requests."""
        self._poison.crashed(replica_id, set(digests), now_s)

    def sweep(self, now_s: float) -> None:
        """Forget what has outlived its time."""
        self._withdrawn = {session: at_s for session, at_s in self._withdrawn.items() if now_s - at_s < OVERTAKEN_S}
