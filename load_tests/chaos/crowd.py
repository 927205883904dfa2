"""A crowd of clients of the control plane in one process, and the outcome of each of their sessions.

The mock reads its tokens from the KV in its blocks. So an answer equals the undisturbed one only if every handoff and
every continuation was right.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.errors import HandoffFailed, Overloaded, ReplicaLost, SessionTimeout, Unavailable
from load_tests.harness.control_plane import Answer, InProcess

STAYING, LEAVING = 0.15, 0.1
"""The share of requests that cannot continue on another replica, and the share of clients that leave."""
AT_ONCE = 32
EXPECTED_ERRORS = (ReplicaLost, HandoffFailed, Overloaded, Unavailable, SessionTimeout)


@dataclass(frozen=True)
class Question:
    """What a client asks. `whole`: the answer of an undisturbed cluster."""

    prompt: list[int]
    max_tokens: int
    whole: list[int]


async def questions(cluster: InProcess, draw: random.Random, count: int) -> list[Question]:
    """Prompts of 1 to 120 tokens, answers of 2 to 80. The cluster gives the answers: do not disturb it yet."""
    prompts = [[draw.randint(100, 40_000) for _ in range(draw.randint(1, 120))] for _ in range(count)]
    limits = [draw.randint(2, 80) for _ in range(count)]
    made = list[Question]()
    pairs = list(zip(prompts, limits, strict=True))
    for some in (pairs[begin : begin + AT_ONCE] for begin in range(0, count, AT_ONCE)):
        wholes = await asyncio.gather(*(cluster.local(prompt, max_tokens=limit) for prompt, limit in some))
        made += [Question(prompt, limit, whole) for (prompt, limit), whole in zip(some, wholes, strict=True)]
    return made


@dataclass
class Asked:
    """One request. `goes_on`: it may continue on another replica. `left`: its client left before the end."""

    question: Question
    goes_on: bool
    answer: Answer
    left: bool = False
    hung: bool = False

    def verdict(self) -> str:
        """The outcome of the request.

        `whole`: the answer is complete. `left`: its client left. `cut`: its ingress died. `refused`: an error that the
        request's parameters explain. `failed`: any other error of ours. `hung`, `wrong`, `truncated` (a clean end, too
        early) and `duplicated` must not happen.
        """
        answer, whole = self.answer, self.question.whole
        if answer.surplus or len(answer.tokens) > len(whole):
            return "duplicated"
        if answer.tokens != whole[: len(answer.tokens)]:
            return "wrong"
        if self.left or self.hung:
            return "left" if self.left else "hung"
        if answer.reason is None:
            return "cut"
        if answer.has_failed:
            if not isinstance(answer.context.error, EXPECTED_ERRORS):
                return "wrong"
            return "failed" if self.goes_on or not answer.tokens else "refused"
        return "whole" if answer.tokens == whole else "truncated"


@dataclass
class Crowd:
    """Clients that ask one question after the other. Some leave in the middle.

    `deadline_s`: a session that takes longer counts as hung. `forgets`: of each session only its verdict is kept, in
    `verdicts`.
    """

    cluster: InProcess
    questions: Sequence[Question]
    draw: random.Random
    deadline_s: float = 90.0
    forgets: bool = False
    asked: list[Asked] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)

    async def run(self, clients: int, is_over: Callable[[], bool]) -> None:
        """Asks until `is_over()` is true."""

        async def client() -> None:
            while not is_over():
                await self._ask()

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())

    def why_failed(self) -> dict[str, int]:
        """The errors of the sessions that failed, the most frequent first."""
        failed = (each.answer.context.error for each in self.asked if each.verdict() == "failed")
        return dict(Counter(f"{type(error).__name__}: {error}" for error in failed).most_common(8))

    async def _ask(self) -> None:
        draw, question = self.draw, self.draw.choice(self.questions)
        goes_on = draw.random() >= STAYING
        sampling: dict[str, Any] = {} if goes_on else {"thinking_token_budget": 9}
        answer = await self.cluster.ask(question.prompt, max_tokens=question.max_tokens, **sampling)
        asked = Asked(question, goes_on, answer)
        if not self.forgets:
            self.asked.append(asked)
        leaves = draw.random() < LEAVING
        try:
            await answer.over(draw.random() * 0.1 if leaves else self.deadline_s)
        except TimeoutError:
            asked.left, asked.hung = leaves, not leaves
            await self.cluster.abort(answer)
        self.verdicts[asked.verdict()] += 1
        if self.forgets:
            self.cluster.forget(answer)
