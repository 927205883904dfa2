"""Fetches at random between real engines whose sources are killed, stopped or slow, beside tiers whose files break.

Every answer is the one that an engine computes, no request waits for long, and nothing is left. `--fetches 2000` asks
for more than `make test` does by default.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deployments.engine.protocol import EngineError
from tests.deployments.engine.conftest import Answer
from tests.deployments.engine.vllm.fetching_engines import (
    BLOCK,
    BLOCKS,
    HOST_BLOCKS,
    LOST,
    NAMES,
    SLOW,
    TIERED,
    Engines,
)
from tests.deployments.engine.vllm.test_channel import FLOAT32, HEAD_DIM, HEADS, LAYERS, VOCABULARY, model
from transfer.memory.blocks import blocks_for

__all__ = ["model"]  # the fixture

FAMILIES, MEMBERS, TOKENS, OPEN, ROOM = 16, 3, 4, 6, 64
EACH_KILL = 400
"""One engine is killed in so many fetches, and at least one."""
LATEST_S = 45.0
"""The longest that a request may take: to compute its prompt on a busy machine, and a bound. It is less than
`HANDOFF_S`, so that a request that waits for its source as for a handoff is too late."""
LENGTH = 1
TURNS = 20
"""After so many turns of prompts for more than the memory, no tier will be hit any more."""

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def prompts(draw: random.Random) -> list[list[int]]:
    """Families of prompts that begin alike, and part inside blocks and at their ends."""
    made = []
    for _ in range(FAMILIES):
        common = [draw.randrange(10, VOCABULARY) for _ in range(draw.randrange(2 * BLOCK, 11 * BLOCK))]
        for _ in range(MEMBERS):
            alike = draw.choice((len(common), len(common) // BLOCK * BLOCK, draw.randrange(BLOCK, len(common))))
            made.append(common[:alike] + [draw.randrange(10, VOCABULARY) for _ in range(draw.randrange(5, 150))])
    return made


@dataclass(frozen=True, slots=True)
class Way:
    """`target` computes a prompt, and fetches from `source` first. `writer`: has the answer written; None: `target`."""

    target: str
    source: str
    writer: str | None

    @property
    def engines(self) -> list[str]:
        return [self.target] if self.writer is None else [self.target, self.writer]


class Crowd:
    """Asks for prompts along random ways. `longest_s`: the longest that any request took."""

    def __init__(self, engines: Engines, draw: random.Random) -> None:
        self.engines, self.draw, self.prompts = engines, draw, prompts(draw)
        self.whole: list[list[int]] = []
        self.served = dict[int, str]()
        self.held = dict.fromkeys(NAMES, 0)
        self.room = asyncio.Condition()
        self.outcomes = Counter[str]()
        self.longest_s = 0.0
        self.asked, self.begun, self.last_source, self.is_over = asyncio.Condition(), 0, "", False

    async def learn(self) -> None:
        """What an engine answers that computes all of a prompt."""
        for number, prompt in enumerate(self.prompts):
            one = self.engines.running["a"]
            answer = await one.generate(f"learn-{number}", prompt, max_tokens=TOKENS, prompt_logprobs=0)
            self.whole.append(answer.tokens)

    async def run(self, fetches: int) -> None:
        todo = iter(range(fetches))

        async def client() -> None:
            for number in todo:
                await self.ask(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(OPEN):
                group.create_task(client())
        async with self.asked:
            self.is_over = True
            self.asked.notify_all()

    async def until_fetched_from(self, source: str, begun: int) -> None:
        """Wait until a fetch from an engine begins, after `begun` fetches, or until all are over."""
        async with self.asked:
            await self.asked.wait_for(lambda: self.is_over or (self.begun >= begun and self.last_source == source))

    async def ask(self, number: int) -> None:
        known = self.draw.randrange(len(self.prompts))
        way = self._way(known)
        blocks = blocks_for(len(self.prompts[known]) + TOKENS, BLOCK)
        async with self.room:
            await self.room.wait_for(lambda: self._fits(way, blocks))
            for name in way.engines:
                self.held[name] += blocks
        lives = [self.engines.lives[name] for name in way.engines]
        try:
            await self._ask(number, known, way, lives)
        finally:
            async with self.room:
                for name in way.engines:
                    self.held[name] -= blocks
                self.room.notify_all()

    def _way(self, known: int) -> Way:
        up = list(self.engines.running)
        target = self.draw.choice(up)
        others = [name for name in NAMES if name != target]
        source = self.served.get(known, target)
        if source == target or self.draw.random() < 0.2:
            source = self.draw.choice(others)
        writers = [name for name in up if name != target]
        return Way(target, source, self.draw.choice(writers) if writers and self.draw.random() < 0.3 else None)

    def _fits(self, way: Way, blocks: int) -> bool:
        """Also once an engine of this way is dead: then it is asked for nothing."""
        return all(self.held[name] + blocks <= ROOM or name not in self.engines.running for name in way.engines)

    async def _ask(self, number: int, known: int, way: Way, lives: list[int]) -> None:
        begun_s, answers = time.monotonic(), list[Answer]()
        cancel_s = self.draw.random() * 0.1 if self.draw.random() < 0.1 else None
        for name, sampling in self._parts(number, known, way):
            if name in self.engines.running:
                with suppress(EngineError):  # it is dead in this moment
                    answers.append(await self.engines.running[name].send(f"r{number}", self.prompts[known], **sampling))
        async with self.asked:
            self.begun, self.last_source = number, way.source
            self.asked.notify_all()
        ended = asyncio.gather(*(answer.done.wait() for answer in answers))
        try:
            await asyncio.wait_for(ended, LATEST_S if cancel_s is None else cancel_s)
        except TimeoutError:
            assert cancel_s is not None, f"fetch {number} of {way} is not over after {LATEST_S:g} s"
        self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
        await self._over(number, known, way, answers, self._is_dead(way, lives))

    def _is_dead(self, way: Way, lives: list[int]) -> bool:
        return any(
            name not in self.engines.running or self.engines.lives[name] != life
            for name, life in zip(way.engines, lives, strict=True)
        )

    async def _over(self, number: int, known: int, way: Way, answers: list[Answer], is_dead: bool) -> None:
        reasons = {answer.reason for answer in answers}
        tokens = [token for answer in answers for token in answer.tokens]
        is_dead = is_dead or LOST in reasons
        if is_dead or None in reasons:
            self.outcomes["lost" if is_dead else "cancelled"] += 1
            for name in way.engines:
                if name in self.engines.running:
                    await self.engines.running[name].engine.abort([f"r{number}"])
            return
        assert (tokens, reasons) == (self.whole[known], {LENGTH}), f"fetch {number} of {way}"
        self.outcomes["split" if way.writer else "whole"] += 1
        self.served[known] = self.draw.choice(way.engines)

    def _parts(self, number: int, known: int, way: Way) -> list[tuple[str, dict[str, Any]]]:
        """What each engine is asked, the one that computes first. vLLM takes decode's part at any time."""
        prompt, session = self.prompts[known], f"s{number}"
        fetch = {
            "session": session,
            "epoch": 1,
            "peers": self.engines.peers[way.source],
            "tokens": self.draw.choice((len(prompt), len(prompt), self.draw.randrange(1, 2 * len(prompt)))),
            "timeout_s": self.draw.choice((0.002, 0.05, 0.5, 5.0)),
        }
        if way.writer is None:
            return [(way.target, _told({"baton_fetch": fetch}, TOKENS))]
        prefill = {"role": "prefill", "session": session, "epoch": 1, "peers": self.engines.peers[way.writer]}
        decode = {**prefill, "role": "decode", "peers": self.engines.peers[way.target]}
        return [
            (way.target, _told({"baton": prefill, "baton_fetch": fetch}, 1)),
            (way.writer, _told({"baton": decode}, TOKENS)),
        ]


def _told(transfer: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "extra_args": {"kv_transfer_params": transfer}}


async def disturb(crowd: Crowd) -> None:
    """Stop an engine, break the disk tier's files, or fill the disk, again and again."""
    engines, draw = crowd.engines, crowd.draw
    while True:
        await asyncio.sleep(draw.random() * 0.4)
        kind = draw.choice(("stop", "stop", "stop", "damage", "full"))
        if kind == "stop":
            with engines.stopped(draw.choice(list(engines.running))):
                await asyncio.sleep(draw.random() * 0.5)
        elif TIERED in engines.running:
            if kind == "damage":
                engines.damage(draw)
            else:
                with engines.full_disk():
                    await asyncio.sleep(draw.random() * 0.3)


async def kill(crowd: Crowd, fetches: int) -> None:
    """Kill an engine soon after a request has asked it for blocks, and start another in its place; several times."""
    times = max(1, fetches // EACH_KILL)
    for turn in range(times):
        victim = (SLOW, TIERED, "a")[turn % 3]
        await crowd.until_fetched_from(victim, (turn + 1) * fetches // (times + 2))
        await asyncio.sleep(crowd.draw.random() * 0.03)
        await crowd.engines.kill(victim)
        async with crowd.room:
            crowd.room.notify_all()
        await crowd.engines.start(victim)


async def until_tiers_are_hit(crowd: Crowd) -> None:
    """Ask the tiered engine for more than its memory holds, in turns, until it has loaded a block.

    Only full blocks count: a block that is not full is not kept, and takes no room from one that is.
    """
    made, some, blocks = crowd.engines.running[TIERED], list[int](), 0
    for number in range(0, len(crowd.prompts), MEMBERS):
        if blocks <= BLOCKS + HOST_BLOCKS:
            some.append(number)
            blocks += len(crowd.prompts[number]) // BLOCK
    assert blocks > BLOCKS, "else all stay in the engine's memory"
    before = await made.engine.counters()
    for turn in range(TURNS):
        for number in some:
            answer = await made.generate(f"turn-{turn}-{number}", crowd.prompts[number], max_tokens=TOKENS)
            assert answer.tokens == crowd.whole[number]
            now = await made.until_counter(lambda counters: not counters["tier_open_jobs"])
            if any(now[name] > before[name] for name in ("tier_host_hits", "tier_disk_hits")):
                return
    pytest.fail(f"no block was loaded in {TURNS} turns of prompts {some}: {now}")


@pytest.fixture
async def engines(model: Path, tmp_path: Path) -> AsyncIterator[Engines]:
    made = Engines(model, tmp_path, LAYERS * HEADS * BLOCK * 2 * HEAD_DIM * FLOAT32)
    try:
        await made.start(*NAMES)
        yield made
    finally:
        await made.close()


async def test_random_fetches_with_everything_that_goes_wrong(engines: Engines, pytestconfig: pytest.Config) -> None:
    fetches = int(pytestconfig.getoption("fetches"))
    crowd = Crowd(engines, random.Random(fetches))
    await crowd.learn()
    disturbing = asyncio.create_task(disturb(crowd))
    async with asyncio.TaskGroup() as group:
        group.create_task(kill(crowd, fetches))
        group.create_task(crowd.run(fetches))
    disturbing.cancel()
    await asyncio.wait([disturbing])
    await engines.settle()
    counted = engines.totals
    print(dict(crowd.outcomes), f"longest {crowd.longest_s:.1f} s", counted)
    assert crowd.outcomes["whole"] + crowd.outcomes["split"] > fetches / 2
    assert crowd.outcomes["cancelled"] > 0
    assert counted["blocks_fetched"] > fetches / 10
    assert counted["fetches_broken"] > fetches / 20
    assert counted["tier_disk_errors"] + counted["tier_digest_failures"] > 0
    await until_tiers_are_hit(crowd)
    for number, (prompt, whole) in enumerate(zip(crowd.prompts, crowd.whole, strict=True)):
        for name, made in engines.running.items():
            answer = await made.generate(f"end-{number}", prompt, max_tokens=TOKENS)
            assert answer.tokens == whole, f"what {name} has cached of prompt {number} is wrong"
    assert BLOCKS > ROOM, "else engines preempt"
