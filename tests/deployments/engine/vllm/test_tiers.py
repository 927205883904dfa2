"""KV tiers under real engines: what comes from them gives the answers that computing gives."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import MEDIUM_STORAGE

from configs.schema import ClassConfig, DiskKVConfig, PoolConfig
from deployments.engine.kv_events import BlockName
from deployments.host.processes import descendants, stat
from deployments.manager.calls import Drain, Status
from deployments.messages import Mode
from load_tests.harness.control_plane import PREFILL, SMALL, Answer, until
from tests.deployments.engine.vllm.test_channel import (
    FLOAT32,
    HEAD_DIM,
    HEADS,
    LAYERS,
    VOCABULARY,
    cluster,
    model,
    pool,
    prompt,
)
from tests.deployments.real_engines import RealEngines
from transfer.memory.blocks import chained_hashes

__all__ = ["model"]  # the fixture

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK = 32
TIER_BYTES = 64 << 20
BLOCK_BYTES = BLOCK * LAYERS * HEADS * 2 * HEAD_DIM * FLOAT32


def tiered(tier: str, path: Path, workers: int = 1) -> PoolConfig:
    if tier == "host":
        return pool(workers, host_kv_bytes=TIER_BYTES)
    return pool(workers, disk_kv=DiskKVConfig(path=str(path), bytes=TIER_BYTES))


async def forget(engines: RealEngines, replica_id: str) -> None:
    """Empty the prefix cache of an engine, once its tiers have taken what they get."""
    engine: Any = engines.replicas[replica_id]._engine
    await are_stored(engines, replica_id)
    assert await engine.forget()


async def are_stored(engines: RealEngines, replica_id: str) -> None:
    """Wait until an engine's tiers have taken what they get."""

    async def is_so() -> bool:
        return bool((await engines.replicas[replica_id].counters())["tier_open_jobs"] == 0)

    await engines.all_is_free()
    await until(is_so)


async def loaded(engines: RealEngines, replica_id: str, tier: str) -> float:
    return (await engines.replicas[replica_id].counters())[f"tier_{tier}_hits"]


async def whole(engines: RealEngines, tokens: list[int]) -> list[int]:
    """The answer of an engine that computes all of the prompt."""
    return (await engines.answer(tokens, max_tokens=6, prompt_logprobs=0)).tokens


async def split(engines: RealEngines, tokens: list[int]) -> Answer:
    answer = await (await engines.ask(tokens, max_tokens=6)).over()
    assert answer.context.modes == {Mode.DISAGGREGATED}
    return answer


async def hits(engines: RealEngines, tokens: list[int]) -> int:
    """How many of a prompt's blocks the session manager takes prefill to have."""
    await engines.all_is_free()  # and so all is reported
    return engines.manager._allocator.predictors.index.hits(chained_hashes(tokens, BLOCK)).get(PREFILL, 0)


async def are_known(engines: RealEngines, tokens: list[int], blocks: int) -> None:
    """Wait until placement knows what the tiers have of a prompt."""

    async def is_so() -> bool:
        return await hits(engines, tokens) == blocks

    await until(is_so)


def names(engines: RealEngines, tokens: list[int]) -> set[BlockName]:
    """Those of a prompt's blocks in the events of prefill's engine. Another engine gives them the same names."""
    engine: Any = engines.replicas[PREFILL]._engine
    hashes = set(chained_hashes(tokens, BLOCK))
    named = {name for name, chained in engine._events._translator._hashes.items() if chained in hashes}
    assert len(named) == len(hashes)
    return named


def on_disk(engines: RealEngines) -> set[BlockName]:
    """The names of the blocks that every worker of prefill's engine has on disk, as its scheduler has told."""
    engine: Any = engines.replicas[PREFILL]._engine
    return {name for name, tiers in engine._events._translator._tiers.items() if MEDIUM_STORAGE in tiers}


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_prompts_that_left_prefills_memory_come_back_from_its_tiers(
    model: Path, tmp_path: Path, tier: str
) -> None:
    """They end at the end of a block, before it and behind it; a part of the prompt may be in the engine's memory."""
    async with cluster(model, tiered(tier, tmp_path), pool()) as engines:
        for kept, again, here in ((512, 512, 0), (512, 700, 0), (300, 301, 0), (640, 900, 100)):
            known = prompt(again)
            await split(engines, known[:kept])
            await forget(engines, PREFILL)
            if here:
                await split(engines, known[:here])
            await are_known(engines, known, kept // BLOCK)
            before = await loaded(engines, PREFILL, tier)
            answer = await split(engines, known)
            assert await loaded(engines, PREFILL, tier) - before == min(kept, again - 1) // BLOCK - here // BLOCK
            before = await loaded(engines, PREFILL, tier)
            assert answer.tokens == await whole(engines, known)
            assert await loaded(engines, PREFILL, tier) == before, "what is compared with was computed"
        known = prompt(700)
        await split(engines, known)
        for turn in range(10):
            await forget(engines, PREFILL)
            cancelled = await engines.ask(known, max_tokens=6)
            await asyncio.sleep(0.01 * turn)
            await engines.core.abort_requests_async([cancelled.request_id])
        await engines.all_is_free()
        assert (await split(engines, known)).tokens == await whole(engines, known)


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
async def test_each_of_several_workers_has_its_part_in_tiers_of_its_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    """What comes back from host and disk gives the answers that computing gives, also after the engine's end."""
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "60")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))  # engines are forks of this process
    several: dict[str, Any] = {size: 2}
    shape = pool(host_kv_bytes=TIER_BYTES, disk_kv=DiskKVConfig(path=str(tmp_path), bytes=TIER_BYTES), **several)
    async with cluster(model, shape, pool()) as engines:
        assert not list(temporary.rglob("*")), "what workers met at is gone"
        for kept, again in ((512, 700), (300, 301)):
            known = prompt(again)
            await split(engines, known[:kept])
            await forget(engines, PREFILL)
            await are_known(engines, known, kept // BLOCK)
            before = await loaded(engines, PREFILL, "host")
            answer = await split(engines, known)
            assert await loaded(engines, PREFILL, "host") - before == kept // BLOCK
            assert answer.tokens == await whole(engines, known)
        await forget(engines, PREFILL)
        named = names(engines, known[:300])
    async with cluster(model, shape, pool()) as engines:

        async def is_heard_of() -> bool:
            """By the scheduler, which tells it with its steps."""
            await split(engines, prompt(40))
            return named <= on_disk(engines)

        await until(is_heard_of)
        assert (await split(engines, known)).tokens == answer.tokens
        assert await loaded(engines, PREFILL, "disk") == 300 // BLOCK
        await engines.all_is_free()
    assert not list(temporary.glob("vllm_dist_*")), "it did not come back at the end"


async def test_the_next_turn_finds_the_answer_in_decodes_tier(model: Path, tmp_path: Path) -> None:
    async with cluster(model, pool(), tiered("host", tmp_path)) as engines:
        first = prompt(200)
        answer = await (await engines.ask(first, max_tokens=100)).over()
        assert answer.context.modes == {Mode.DISAGGREGATED}
        await forget(engines, SMALL)
        await engines.manager.ask(Drain(PREFILL))
        turn = [*first, *answer.tokens, *prompt(50)]
        second = await engines.answer(turn, max_tokens=6)
        assert second.context.modes == {Mode.DECODE_LOCAL}
        assert await loaded(engines, SMALL, "host") == 299 // BLOCK, "the last token was never computed"
        assert second.tokens == await engines.alone(turn, max_tokens=6)
        await engines.all_is_free()


async def test_what_gives_way_is_loaded_from_the_host_tier_when_it_goes_on(model: Path) -> None:
    """Beside it there is no room for another session, and what it had is overwritten before it goes on."""
    classes = {"chat": ClassConfig(), "night": ClassConfig(rank=1, yields=True)}
    small = pool(host_kv_bytes=TIER_BYTES, kv_cache_memory_bytes=40 * BLOCK_BYTES)
    async with cluster(model, pool(), small, classes=classes, default_class="chat") as engines:
        await engines.manager.ask(Drain(PREFILL))
        line, question = prompt(400), prompt(940)
        yielding = await (await engines.ask(line, max_tokens=600, priority="night")).has(50)
        before = await loaded(engines, SMALL, "host")
        chat = await (await engines.ask(question, max_tokens=60)).has(1)
        await engines.queued(1)
        had = len(yielding.tokens)
        assert had < 600, "it had not ended by itself"
        await chat.over()
        assert len(yielding.tokens) == had, "it has stopped"
        await yielding.over()
        assert (chat.context.error, yielding.context.error) == (None, None)
        assert yielding.context.modes == chat.context.modes == {Mode.DECODE_LOCAL}
        assert await loaded(engines, SMALL, "host") - before >= (400 + had) // BLOCK - (40 - 1000 // BLOCK)
        assert yielding.tokens == await engines.alone(line, max_tokens=600)
        assert chat.tokens == await engines.alone(question, max_tokens=60)
        assert (await engines.manager.ask(Status()))["sessions"]["closed"]["moved"] == 1
        await engines.all_is_free()


def terminate_beside(pid: int) -> None:
    """SIGTERM to another thread than the main one. It interrupts no sleep of that: see `transfer/vllm/signals.py`."""

    def takes_it(thread: Path) -> bool:
        blocked = next(line for line in (thread / "status").read_text().splitlines() if line.startswith("SigBlk:"))
        return int(thread.name) != pid and not int(blocked.split()[1], 16) >> (signal.SIGTERM - 1) & 1

    other = next(thread for thread in Path(f"/proc/{pid}/task").iterdir() if takes_it(thread))
    assert ctypes.CDLL(None).tgkill(pid, int(other.name), signal.SIGTERM) == 0


async def test_what_the_host_tier_has_is_on_disk_when_the_engine_starts_again(model: Path, tmp_path: Path) -> None:
    shape = pool(host_kv_bytes=TIER_BYTES, disk_kv=DiskKVConfig(path=str(tmp_path), bytes=TIER_BYTES))
    async with cluster(model, shape, pool()) as engines:
        known = prompt(300)
        answer = await split(engines, known)
        await forget(engines, PREFILL)
        engine: Any = engines.replicas[PREFILL]._engine
        (process,) = engine._client.resources.engine_manager.processes
        terminate_beside(process.pid)
        await until(lambda: none_lives([process.pid]))
    async with cluster(model, shape, pool()) as engines:
        assert (await split(engines, known)).tokens == answer.tokens
        assert await loaded(engines, PREFILL, "disk") == 299 // BLOCK


async def test_a_tier_on_disk_outlives_an_engine_that_is_killed_and_what_broke_in_it_is_computed(
    model: Path, tmp_path: Path
) -> None:
    """The first of two prompts comes back whole. A byte of every block of the other one is another one."""
    shape = tiered("disk", tmp_path)
    async with cluster(model, shape, pool()) as engines:
        known = [prompt(300), prompt(500)]
        answers = [(await split(engines, each)).tokens for each in known]
        await forget(engines, PREFILL)
        engine: Any = engines.replicas[PREFILL]._engine
        (process,) = engine._client.resources.engine_manager.processes
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.join, 60)
    async with cluster(model, shape, pool()) as engines:
        assert (await split(engines, known[0])).tokens == answers[0]
        assert await loaded(engines, PREFILL, "disk") == 299 // BLOCK
        (blocks,) = (tmp_path / "baton-kv").glob("*.blocks")
        with blocks.open("r+b") as file:
            for place in range(0, blocks.stat().st_size, 4096):
                file.seek(place)
                file.write(b"?")
        assert (await split(engines, known[1])).tokens == answers[1]
        counted = await engines.replicas[PREFILL].counters()
        assert counted["tier_disk_hits"] == 299 // BLOCK
        assert counted["tier_digest_failures"] > 0
        await engines.all_is_free()


FIRST = 4
ANSWER, STORED = "answer", "stored"
"""What `tier_child.py` prints: `answer NUMBER TOKENS` for each prompt; `stored` once the `FIRST` ones are on disk."""


def prompt_of(number: int) -> list[int]:
    """The prompts are the same in every process."""
    draw = random.Random(number)
    return [draw.randrange(10, VOCABULARY) for _ in range(draw.randrange(150, 500))]


async def test_tiers_on_disk_outlive_kill_9_of_everything(model: Path, tmp_path: Path) -> None:
    """Replicas, session manager and engines are killed at once while they store. Each new engine finds a tier."""
    answers, processes = await asyncio.to_thread(asked_and_killed, model, tmp_path)
    await until(lambda: none_lives(processes))
    shape = tiered("disk", tmp_path)
    async with cluster(model, shape, shape) as engines:
        await engines.manager.ask(Drain(PREFILL))
        for number in range(FIRST):
            assert (await engines.answer(prompt_of(number), max_tokens=6)).tokens == answers[number]
        await engines.manager.ask(Drain(PREFILL, resume=True))
        await until(lambda: engines._are_ready((PREFILL,)))
        for number, tokens in answers.items():
            known = prompt_of(number)
            before = await loaded(engines, PREFILL, "disk")
            assert (await split(engines, known)).tokens == tokens
            if number < FIRST:
                assert await loaded(engines, PREFILL, "disk") - before == (len(known) - 1) // BLOCK
            assert tokens == await whole(engines, known)
        counted = [await engines.replicas[each].counters() for each in (PREFILL, SMALL)]
        assert all(each["tier_disk_hits"] > 0 for each in counted)
        assert not any(each["tier_digest_failures"] for each in counted)
        await engines.all_is_free()


def asked_and_killed(model: Path, directory: Path) -> tuple[dict[int, list[int]], list[int]]:
    """What a cluster has answered when all of its processes are killed, and these processes."""
    command = [sys.executable, str(Path(__file__).with_name("tier_child.py")), str(model), str(directory)]
    answers, is_stored, draw = dict[int, list[int]](), False, random.Random(3)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                kind, _, told = line.partition(" ")
                if kind == ANSWER:
                    number, *tokens = map(int, told.split())
                    answers[number] = tokens
                is_stored = is_stored or line.strip() == STORED
                if is_stored and len(answers) > FIRST + 1:
                    break
            time.sleep(draw.random() / 5)  # any moment will do
            processes = [child.pid, *descendants(child.pid)]
        finally:
            os.killpg(child.pid, signal.SIGKILL)
    assert is_stored, "it ended by itself"
    return answers, processes


async def none_lives(processes: list[int]) -> bool:
    """One that has ended may wait for its parent, which is gone."""
    return all((found := stat(pid)) is None or found[0] == "Z" for pid in processes)
