"""The parts of sessions that run on a replica, and the log of parts that have ended."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from deployments.engine.protocol import EngineError
from deployments.link.replica_side import Ingress
from deployments.logs import of_session
from deployments.messages import MOVED, Finished, Reservation, SessionTask

logger = logging.getLogger("baton.replica")

FINISHED_KEPT = 64
"""Entries that the log of ended parts keeps; every report carries the whole log."""


@dataclass(slots=True)
class Part:
    """One session's part on this replica.

    `ingress`: what its outputs go to. `number`: what that ingress calls it.
    `done`: its outcome, or the error that ended it. `started`: it has had an output. `moves`: it goes to another
    replica as soon as it has had an output. `orphaned`: its ingress is gone.
    """

    task: SessionTask
    ingress: Ingress
    number: int
    done: asyncio.Future[str]
    output_tokens: int = 0
    started: bool = False
    moves: bool = False
    orphaned: bool = False

    @property
    def held_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far; 0 before the first output."""
        return self.task.prompt_tokens + self.output_tokens if self.started else 0

    @property
    def reservation(self) -> Reservation:
        """The memory that it may still take. Its prompt is computed once it has had an output."""
        reserved = self.task.reservation
        return reserved.prefilled() if self.started else reserved

    def fail(self, error: EngineError) -> None:
        """End it with an error, unless it is over."""
        if not self.done.done():
            self.done.set_exception(error)

    def log(self, outcome: str) -> None:
        """It is over. `outcome`: "" where an error or a cancellation has ended it."""
        if logger.isEnabledFor(logging.INFO):
            session_id, how = self.task.session_id, outcome or "broken off"
            about = of_session(session_id)
            text = "session %s, placement %d: %s here after %d tokens"
            logger.info(text, session_id, self.task.epoch, how, self.output_tokens, extra=about)

    def orphan(self, why: str) -> None:
        """End it because its ingress is gone: nothing reads its outputs, and nothing will close the session."""
        self.orphaned = True
        self.fail(EngineError(why))


class Parts:
    """The open parts by request id, and those that ended recently.

    `moved_out`: the number of parts that went to another replica. `ended_version`: the number of all parts that ever
    ended here.
    """

    def __init__(self) -> None:
        self.open: dict[str, Part] = {}
        self.moved_out = 0
        self.ended_version = 0
        self._ended: deque[Finished] = deque(maxlen=FINISHED_KEPT)
        self._told_version = 0

    def begin(self, task: SessionTask, ingress: Ingress, number: int) -> Part:
        """Begin a part."""
        part = self.open[task.request_id] = Part(task, ingress, number, asyncio.get_running_loop().create_future())
        return part

    def end(self, part: Part) -> None:
        """Log a part that is over, however it ended."""
        self.open.pop(part.task.request_id, None)
        if part.done.done() and not part.done.cancelled():
            part.done.exception()  # now asyncio does not warn of an error that was set before `run` waited for it
        self._ended.append(Finished(part.task.session_id, part.task.epoch, part.output_tokens, part.orphaned))
        self.ended_version += 1

    def tell(self) -> tuple[Finished, ...]:
        """The log for a report, the newest entry last. From now on its entries count as reported."""
        self._told_version = self.ended_version
        return tuple(self._ended)

    @property
    def is_log_filling(self) -> bool:
        """Whether the log must be reported soon, because otherwise entries drop out of it unreported."""
        return self.ended_version - self._told_version >= FINISHED_KEPT // 2

    def fail(self, error: EngineError) -> None:
        """End every open part with an error."""
        for part in self.open.values():
            part.fail(type(error)(*error.args))

    def orphan(self, ingress: Ingress) -> None:
        """End the parts of an ingress that is gone."""
        for part in self.open.values():
            if part.ingress is ingress:
                part.orphan("the ingress is gone")

    def move_out(self, session_ids: Collection[str] | None = None) -> int:
        """See `Replica.move_out`."""
        movable = [part for part in self.open.values() if part.task.movable and not part.done.done()]
        chosen = [part for part in movable if session_ids is None or part.task.session_id in session_ids]
        for part in chosen:
            part.moves = True
            self.move_if_started(part)
        return len(chosen)

    def let_go(self, session_ids: Collection[str]) -> list[str]:
        """Let these sessions go, as `move_out`. Returns the requests of those whose parts are over by that."""
        self.move_out(session_ids)
        return [
            request_id
            for request_id, part in self.open.items()
            if part.moves and part.done.done() and part.task.session_id in session_ids
        ]

    def move_if_started(self, part: Part) -> None:
        """End a part that is to move, if it has had an output."""
        if part.moves and part.started and not part.done.done():
            part.done.set_result(MOVED)
            self.moved_out += 1
