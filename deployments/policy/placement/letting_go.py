"""Which answers of classes that yield a replica lets go, so that another session has what it needs there. Pure.

Those that hold the fewest tokens go first: when they go on, fewer are loaded from the replica's host tier, moved, or
computed again. Those that turn out not to be needed stay, the largest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deployments.fleet.columns import ReplicaView
from deployments.messages import SessionRequest
from deployments.step_cost import Coefficients

MOST_TIMES = 4
"""How often a session is let go. After that it stays where it is until its end, so it comes to one."""

EASE = 0.4
"""How near to the objectives of the others a session that yields may bring their steps: as a share of how near they may
come before it is let go. So a session that has just been let go is not placed again at once. Chats go where steps are
short, so longer ones drive them together elsewhere. With less than this share chats are a little faster in the
simulator and the work that yields is slower; with more it is the other way round."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that may be let go. `blocks`: reserved for it. `held_tokens`: prompt and answer so far."""

    session_id: str
    blocks: int
    held_tokens: float


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a replica lacks for one more session; it lacks nothing where none of these is over 0.

    `blocks`: of memory. `places`: of the sessions that it runs at once. `step_s`: the seconds by which its steps are
    too long for the objectives of its answers. `takes`: what its steps take.
    """

    blocks: float
    places: int
    step_s: float
    takes: Coefficients

    @property
    def is_over(self) -> bool:
        """Whether nothing is lacked."""
        return self.blocks <= 0 and self.places <= 0 and self.step_s <= 0

    def without(self, answer: Answer, sign: int = 1) -> Shortage:
        """What is lacked once an answer is let go; with a `sign` of -1, when it stays after all."""
        step_s = self.takes.sequence_s + answer.held_tokens * self.takes.context_s
        return replace(
            self,
            blocks=self.blocks - sign * answer.blocks,
            places=self.places - sign,
            step_s=self.step_s - sign * step_s,
        )


def shortage(
    owner: ReplicaView, blocks: int, held_tokens: float, tpot_s: float, takes: Coefficients, slack: float
) -> Shortage:
    """What `owner` lacks for one more answer.

    `blocks`: reserved for it. `held_tokens`: what it holds halfway. `tpot_s`: its objective; 0: none. `slack`: how near
    to an objective a step may come. `takes`: what the steps of its pool take, all 0 where that is not known.
    """
    objective_s = min((each for each in (owner.tpot_s, tpot_s) if each), default=0.0)
    held = owner.held_tokens + held_tokens
    step_s = takes.step_s(0, 0, owner.sessions + 1, held)
    late_s = step_s - slack * objective_s if objective_s else 0.0
    return Shortage(blocks - owner.free_blocks, owner.sessions + 1 - owner.info.max_sessions, late_s, takes)


def let_go(answers: Iterable[Answer], lacking: Shortage) -> Sequence[Answer]:
    """The answers to let go; all of them where even that is not enough."""
    chosen = list[Answer]()
    for answer in sorted(answers, key=lambda each: (each.held_tokens, each.session_id)):
        if lacking.is_over:
            break
        chosen.append(answer)
        lacking = lacking.without(answer)
    for answer in reversed(chosen[:-1]):
        if (with_it := lacking.without(answer, -1)).is_over:
            chosen.remove(answer)
            lacking = with_it
    return chosen


def may_be_let_go(request: SessionRequest) -> bool:
    """Whether a session of a class that yields may be let go at this placement of it."""
    return request.attempt <= MOST_TIMES
