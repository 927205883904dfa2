"""Random faults under a crowd of clients, in one process: for a test, and for the benchmark `chaos`.

The mock's tokens are read from the KV in its blocks: an answer equals the undisturbed one only if every handoff and
every continuation was right.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import FinishReason

from deployments.errors import HandoffFailed, Overloaded, ReplicaLost, SessionTimeout, Unavailable
from load_tests.control_plane import REPLICAS, Answer, InProcess

SEEDED, LEAVING = 0.15, 0.1
"""The share of requests that cannot go on elsewhere, and of clients that leave."""
EXPECTED_ERRORS = (ReplicaLost, HandoffFailed, Overloaded, Unavailable, SessionTimeout)


@dataclass(frozen=True)
class Question:
    """`whole`: the answer of an undisturbed cluster, also to the seed that the mock takes for none."""

    prompt: list[int]
    max_tokens: int
    whole: list[int]


async def questions(cluster: InProcess, draw: random.Random, count: int) -> list[Question]:
    """Prompts of 1 to 120 tokens, answers of 2 to 80. The cluster is asked for the answers: do not disturb it yet."""
    prompts = [[draw.randint(100, 40_000) for _ in range(draw.randint(1, 120))] for _ in range(count)]
    limits = [draw.randint(2, 80) for _ in range(count)]
    answers = (cluster.local(prompt, max_tokens=limit) for prompt, limit in zip(prompts, limits, strict=True))
    return [Question(*each) for each in zip(prompts, limits, await asyncio.gather(*answers), strict=True)]


@dataclass
class Asked:
    """One request. `goes_on`: it may be continued elsewhere. `left`: its client went away before the end."""

    question: Question
    goes_on: bool
    answer: Answer
    left: bool = False
    hung: bool = False

    def verdict(self) -> str:
        """What became of it.

        `whole`, `left`; `refused`: an error that its parameters explain; `failed`: an error that they do not;
        `hung`, `wrong`, `truncated` (a clean end, too early) and `duplicated` must not be.
        """
        answer, whole = self.answer, self.question.whole
        if answer.surplus or len(answer.tokens) > len(whole):
            return "duplicated"
        if answer.tokens != whole[: len(answer.tokens)]:
            return "wrong"
        if self.left or self.hung:
            return "left" if self.left else "hung"
        if answer.reason is FinishReason.ERROR:
            if not isinstance(answer.context.error, EXPECTED_ERRORS):
                return "wrong"
            return "failed" if self.goes_on or not answer.tokens else "refused"
        return "whole" if answer.tokens == whole else "truncated"


@dataclass
class Crowd:
    """Clients that ask one question after the other; some leave in the middle. A session hangs after `deadline_s`."""

    cluster: InProcess
    questions: Sequence[Question]
    draw: random.Random
    deadline_s: float = 90.0
    asked: list[Asked] = field(default_factory=list)

    async def run(self, clients: int, is_over: Callable[[], bool]) -> None:
        """Ask until it is over."""

        async def client() -> None:
            while not is_over():
                await self._ask()

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())

    async def _ask(self) -> None:
        draw, question = self.draw, self.draw.choice(self.questions)
        goes_on = draw.random() >= SEEDED
        sampling: dict[str, Any] = {} if goes_on else {"seed": 0, "temperature": 1.0}
        answer = await self.cluster.ask(question.prompt, max_tokens=question.max_tokens, **sampling)
        asked = Asked(question, goes_on, answer)
        self.asked.append(asked)
        leaves = draw.random() < LEAVING
        try:
            await answer.over(draw.random() * 0.1 if leaves else self.deadline_s)
        except TimeoutError:
            asked.left, asked.hung = leaves, not leaves
            await self.cluster.core.abort_requests_async([answer.request_id])


class Faults:
    """What goes wrong, one fault after the other; each is mended after a while.

    `deaths`: when a decode engine was killed, and the sessions that it had then.
    """

    def __init__(self, cluster: InProcess, draw: random.Random, pause_s: float) -> None:
        self.cluster, self.draw, self._pause_s = cluster, draw, pause_s
        self.counts = Counter[str]()
        self.deaths: list[tuple[float, list[str]]] = []
        self._lives = Counter[str]()
        self._dying: set[str] = set()

    async def run(self, faults: int, streams: int = 1) -> None:
        """So many, `streams` at a time."""
        await asyncio.gather(*(self._run(faults // streams) for _ in range(streams)))

    async def _run(self, faults: int) -> None:
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": self._kill,
            "break": self._break,
            "hang": self._hang,
            "deafen": self._deafen,
        }
        for _ in range(faults):
            kind = self.draw.choice(list(kinds))
            self.counts[kind] += 1
            await kinds[kind]()
            await asyncio.sleep(self.draw.random() * self._pause_s)

    async def _kill(self) -> None:
        """An engine dies; after a moment another replica takes its place, as Serve has it."""
        replica_id = self.draw.choice([each for each in self.cluster.replicas if each not in self._dying])
        self._dying.add(replica_id)
        pool = replica_id.rpartition("-")[0]
        if pool != "prefill":
            placed = await self.cluster.placements()
            sessions = [name for name, promise in placed.items() if promise["decode"] == replica_id]
            self.deaths.append((asyncio.get_running_loop().time(), sessions))
        await self.cluster.kill(replica_id)
        await asyncio.sleep(self.draw.random() * 0.05)
        await self.cluster.bury(replica_id)
        self._lives[pool] += 1
        another = f"{pool}-life{self._lives[pool]}"
        self._dying.add(another)  # it cannot be killed before it lives
        await self.cluster.start(another)
        self._dying.remove(another)

    async def _break(self) -> None:
        """For a while no KV arrives."""
        plane = self.draw.choice(list(self.cluster.planes.values()))
        plane.broken = True
        await asyncio.sleep(self.draw.random() * 0.05)
        plane.broken = False

    async def _hang(self) -> None:
        """For a while an engine does nothing."""
        engine = self.draw.choice(list(self.cluster.engines.values()))
        engine.go.clear()
        await asyncio.sleep(self.draw.random() * 0.1)
        engine.go.set()

    async def _deafen(self) -> None:
        """For a while a pool's calls fail at once."""
        pool = self.cluster.pools[self.draw.choice(list(REPLICAS.values()))]
        pool.error = ReplicaLost("it refuses")
        await asyncio.sleep(self.draw.random() * 0.05)
        pool.error = None

    def pauses_s(self) -> list[float]:
        """From each death to the next token of each session that was decoding there."""
        pauses = []
        for at_s, sessions in self.deaths:
            for request_id in sessions:
                times_s = self.cluster.answers[request_id].times_s
                if times_s and times_s[0] <= at_s and (after := [each for each in times_s if each > at_s]):
                    pauses.append(after[0] - at_s)
        return pauses
