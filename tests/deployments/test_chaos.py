"""Random faults under a crowd: every answer is whole and right, or ends with an error that says why; nothing is left.

The mock's tokens are read from the KV in its blocks: an answer equals the undisturbed one only if every handoff and
every continuation was right.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from deployments.errors import HandoffFailed, Overloaded, ReplicaLost, Unavailable
from tests.deployments.in_process import REPLICAS, Answer, InProcess, config, in_process, until

SESSIONS, FAULTS, IN_FLIGHT = 120, 40, 24
DEADLINE_S = 60.0


@pytest.fixture
async def cluster(no_leaks: None) -> AsyncIterator[InProcess]:
    async with in_process(config(max_attempts=8, queue_timeout_s=20.0)) as made:
        yield made

    async def alone() -> bool:
        return asyncio.all_tasks() == {asyncio.current_task()}

    await until(alone)


@dataclass
class Asked:
    """One request, and whether its parameters let a begun answer go on elsewhere."""

    prompt: list[int]
    sampling: dict[str, Any]
    answer: Answer
    left: bool = False

    @property
    def can_go_on(self) -> bool:
        return "seed" not in self.sampling


class Crowd:
    """Clients that ask one after the other; some leave in the middle."""

    def __init__(self, cluster: InProcess, draw: random.Random) -> None:
        self.cluster, self.draw = cluster, draw
        self.asked: list[Asked] = []

    async def run(self, sessions: int) -> None:
        """Ask so many, `IN_FLIGHT` at a time. Raises TimeoutError when one hangs."""
        seats = asyncio.Semaphore(IN_FLIGHT)

        async def one() -> None:
            async with seats, asyncio.timeout(DEADLINE_S):
                await self._one()

        async with asyncio.TaskGroup() as group:
            for _ in range(sessions):
                group.create_task(one())

    async def _one(self) -> None:
        draw = self.draw
        prompt = [draw.randint(100, 40_000) for _ in range(draw.randint(1, 120))]
        sampling: dict[str, Any] = {"max_tokens": draw.randint(2, 80)}
        if draw.random() < 0.15:
            sampling |= {"seed": 0, "temperature": 1.0}
        asked = Asked(prompt, sampling, await self.cluster.ask(prompt, **sampling))
        self.asked.append(asked)
        if draw.random() < 0.1:
            await asyncio.sleep(draw.random() * 0.1)
            asked.left = asked.answer.reason is None
            await self.cluster.core.abort_requests_async([asked.answer.request_id])
            return
        await asked.answer.over()


class Faults:
    """What goes wrong, one fault after the other; each is mended after a while."""

    def __init__(self, cluster: InProcess, draw: random.Random) -> None:
        self.cluster, self.draw = cluster, draw
        self.counts: Counter[str] = Counter()
        self._lives = Counter(dict.fromkeys(REPLICAS.values(), 1))

    async def run(self, faults: int) -> None:
        kinds = {"kill": self._kill, "break": self._break, "hang": self._hang, "deafen": self._deafen}
        for _ in range(faults):
            kind = self.draw.choice(list(kinds))
            self.counts[kind] += 1
            await kinds[kind]()
            await asyncio.sleep(self.draw.random() * 0.05)

    async def _kill(self) -> None:
        """An engine dies; after a moment another replica takes its place, as Serve has it."""
        replica_id = self.draw.choice(list(self.cluster.replicas))
        pool = replica_id.rpartition("-")[0]
        await self.cluster.kill(replica_id)
        await asyncio.sleep(self.draw.random() * 0.05)
        await self.cluster.bury(replica_id)
        number, self._lives[pool] = self._lives[pool], self._lives[pool] + 1
        await self.cluster.start(f"{pool}-{number}")

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
        pool = self.draw.choice(list(self.cluster.pools.values()))
        pool.error = ReplicaLost("it refuses")
        await asyncio.sleep(self.draw.random() * 0.05)
        pool.error = None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
async def test_answers_are_right_whatever_happens(cluster: InProcess, seed: int) -> None:
    crowd, faults = Crowd(cluster, random.Random(seed)), Faults(cluster, random.Random(1000 + seed))
    asking = asyncio.create_task(crowd.run(SESSIONS))
    await faults.run(FAULTS)
    await asking
    await cluster.settle()
    assert len(faults.counts) == 4
    failed = 0
    limits = [asked.sampling["max_tokens"] for asked in crowd.asked]
    locally = (cluster.local(asked.prompt, max_tokens=limit) for asked, limit in zip(crowd.asked, limits, strict=True))
    for asked, whole in zip(crowd.asked, await asyncio.gather(*locally), strict=True):
        answer = asked.answer
        if asked.left:
            assert answer.tokens == whole[: len(answer.tokens)]
        elif answer.reason is FinishReason.ERROR:
            assert isinstance(answer.context.error, (ReplicaLost, HandoffFailed, Overloaded, Unavailable))
            assert answer.tokens == whole[: len(answer.tokens)], "what came was right"
            failed += asked.can_go_on
        else:
            assert answer.tokens == whole
            assert answer.reason is FinishReason.LENGTH
    assert failed <= 0.02 * SESSIONS, f"{failed} answers that could have gone on did not"
    await cluster.settle()
