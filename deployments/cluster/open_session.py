"""One open session: its attempts, one after the other, until the client has an answer or an error.

A session that loses a replica is placed again, with what was answered so far. `recovery.py` decides whether.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import takewhile

from deployments.cluster.answer import Answer
from deployments.cluster.attempt import Attempt, Means
from deployments.cluster.engine_request import Remainder
from deployments.cluster.pinning import pin_of, shown
from deployments.cluster.recovery import Again, Fail, Recovery
from deployments.cluster.refusal import internal
from deployments.cluster.session import State
from deployments.errors import HandoffFailed, RequestFault, SessionError, SessionTimeout
from deployments.host.waits import set_within
from deployments.logs import of_session
from deployments.manager.calls import Explain, Prefixes

logger = logging.getLogger("baton.core")


class OpenSession:
    """`now`: the attempt that runs, the one that can be cancelled and can fail. `timeout_s`: for the whole session."""

    def __init__(self, answer: Answer, means: Means, recovery: Recovery, timeout_s: float) -> None:
        self._answer, self._means, self._recovery, self._timeout_s = answer, means, recovery, timeout_s
        self._refusal: SessionError | None = None
        self.now = Attempt(answer, Remainder(1, answer.request), means)
        self._attempts = [self.now]

    async def serve(self) -> None:
        """See the session through. Every end of it reaches the client."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while await self._try():
                    pass
        except TimeoutError:
            self.now.fail(SessionTimeout(f"the session was not over within {self._timeout_s:g} s"))
        except SessionError as error:
            self.now.fail(error)
        except UnicodeEncodeError:  # a stop string, a salt or an id of the client's, on its way to an engine
            self.now.fail(RequestFault("the request holds half of a surrogate pair, which is not valid Unicode"))
        except OverflowError:  # such as a seed of 90 bits
            self.now.fail(RequestFault("the request holds a number that does not fit into 64 bits"))
        except Exception as error:
            self.now.fail(internal(error))
            raise

    def fail(self, error: SessionError) -> None:
        """End the session with an error, unless it is over."""
        self.now.fail(error)

    def refuse(self, error: SessionError) -> None:
        """Place the session no more: if it waits for a place it fails, and if it runs it goes on."""
        self._refusal = error
        if self.now.placement is None:
            self.now.fail(error)

    async def _try(self) -> bool:
        """See one attempt through. Returns whether it was lost and the next is to be tried. Raises SessionError."""
        attempt = self.now
        if self._refusal is not None and not attempt.over.is_set():
            raise self._refusal.with_traceback(None)  # all sessions share it
        if self._answer.context is not None and not self._answer.context.is_served:
            await self._explain(attempt, self._answer.context.pins)
            return False
        await attempt.run()
        if attempt.session.state is not State.LOST:
            return False
        match self._what_follows(attempt):
            case Again(moved_from, pause_s):
                assert attempt.session.error is not None
                self._answer.again("move" if moved_from else "loss", attempt.session.error, attempt.output_tokens)
                self._take_over(attempt, moved_from)
                await attempt.end()
                if pause_s:
                    await set_within(self.now.over, pause_s)
                return True
            case Fail(error):
                raise error

    async def _explain(self, attempt: Attempt, pins: bool) -> None:
        """Ask what would become of the request, or have its prompt pinned, and place nothing."""
        means, answer = self._means, self._answer
        call: Explain | Prefixes
        if pins:
            call = Prefixes(pin_of(answer.request, means.block_size))
        else:
            call = Explain(answer.asks(Remainder(1, answer.request), means.handoff, means.block_size))
        explanation = await attempt.over.unless_set(means.manager.ask(call))
        if explanation is not None:
            answer.explained(shown(call.pin, explanation) if isinstance(call, Prefixes) else explanation)
            attempt.cancel()

    def _what_follows(self, attempt: Attempt) -> Again | Fail:
        answer, error = self._answer, attempt.session.error
        assert error is not None
        assert attempt.placement is not None, "only what was placed can be lost"
        owner = attempt.placement.owner.replica_id
        follows = self._recovery.ended(
            error, attempt.progressed, bool(answer.sent), answer.continuation_rule, moved_from=owner
        )
        if not (isinstance(follows, Again) and follows.moved_from):
            about = of_session(answer.session_id)
            logger.warning("session %s, placement %d: %s", answer.session_id, attempt.number, error, extra=about)
        return follows

    def _take_over(self, lost: Attempt, moved_from: str) -> None:
        """The next attempt takes over before the lost one ends: from here on, it is cancelled and fails."""
        lost.session.followed()
        left = self._answer.remainder(lost.number + 1, moved_from, lost.progressed, self._failed_handoffs())
        self.now = Attempt(self._answer, left, self._means)
        self._attempts.append(self.now)

    def _failed_handoffs(self) -> tuple[str, ...]:
        """The prefill replica of each handoff that has failed since an attempt gave more than a first token."""
        since = takewhile(lambda attempt: not attempt.progressed, reversed(self._attempts))
        failed = [attempt.placement for attempt in since if isinstance(attempt.session.error, HandoffFailed)]
        return tuple(placement.prefiller.replica_id for placement in failed if placement is not None)

    def end(self) -> None:
        """End what is still open of the session on replicas, and release what is still reserved for it."""
        self.now.session.interrupted()  # changes nothing unless this process shuts down in the middle of the session
        session = self.now.session
        self._answer.ended(str(session.mode or ""), session.outcome, self.now.heard_s, self.now.output_tokens)
        for attempt in self._attempts:
            attempt.end_parts()
            if attempt.session.state is not State.CLOSED:
                attempt.release()
