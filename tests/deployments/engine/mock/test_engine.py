"""What is particular to the double: its KV is real, its blocks run out, and it dies like an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from configs.schema import MockEngineConfig
from deployments.engine.mock.engine import IDLE_TOKEN
from deployments.engine.mock.memory import FIRST_TOKEN, LAST_TOKEN, MockMemory
from deployments.engine.protocol import EngineError
from deployments.messages import Role
from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.plane import WriteState

pytestmark = pytest.mark.usefixtures("no_leaks")
SMALL = MockEngineConfig(block_size=4, num_blocks=24, max_num_seqs=8, max_num_batched_tokens=16, step_s=0.0)


class LossyPlane(InProcessPlane):
    """Says that it wrote a block of one layer, and did not."""

    def write(self, agent: str, layer: int, local: Sequence[int], remote: Sequence[int]) -> WriteState:
        kept = slice(1, None) if layer == 1 else slice(None)
        return super().write(agent, layer, local[kept], remote[kept])


class SwappingPlane(InProcessPlane):
    """Writes every block, into the wrong places."""

    def write(self, agent: str, layer: int, local: Sequence[int], remote: Sequence[int]) -> WriteState:
        return super().write(agent, layer, local, remote[::-1])


@pytest.mark.parametrize("plane", [InProcessPlane, LossyPlane, SwappingPlane])
async def test_the_answer_depends_on_every_block_that_was_moved(
    plane: type[InProcessPlane], make_mock: Callable[..., Any], make_pair: Callable[..., Any], start: Any
) -> None:
    async with make_pair() as pair:
        prompt = pair.prompt(12)
        local = await pair.decode.generate("local", prompt, max_tokens=6)
        prefill = await start(make_mock(Role.PREFILL, plane=plane("another")))
        pair.prefill, healthy = prefill, pair.prefill
        split = await pair.disaggregated(prompt, 6)
        await prefill.close()
        pair.prefill = healthy
        assert (split == local.tokens) == (plane is InProcessPlane)
        assert split[0] == local.tokens[0], "the first token comes from the prefill engine's own KV"


async def test_an_engine_that_computes_nothing_still_hands_over_and_frees(make_pair: Callable[..., Any]) -> None:
    """Its tokens are all alike, its blocks and handoffs are real."""
    idle = SMALL.model_copy(update={"computes": False})
    async with make_pair(idle, max_model_len=64) as pair:
        split = await asyncio.gather(*(pair.disaggregated(pair.prompt(9 + n), 5) for n in range(6)))
        whole = await pair.decode.generate("whole", pair.prompt(9), max_tokens=5)
        assert {tuple(tokens) for tokens in [*split, whole.tokens]} == {(IDLE_TOKEN,) * 5}
        await pair.prefill.until_counter(lambda counts: counts["bytes_written"] > 0)
        for side in (pair.prefill, pair.decode):
            await side.settle()


def test_tokens_depend_on_every_token_its_place_the_seed_and_the_layer() -> None:
    def answer(tokens: list[int], seed: int = 0, blocks: Sequence[int] = (1, 0), skip: int = -1) -> int:
        memory = MockMemory(num_layers=3, num_blocks=2, block_size=4, seed=seed)
        slots = memory.slots(blocks, 0, len(tokens))
        for layer in range(3):
            if layer != skip:
                memory.write(layer, slots, memory.prefix_hashes(0, tokens, 0))
        return memory.next_token(blocks, len(tokens), 0)

    tokens = [11, 12, 13, 14, 15]
    same = answer(tokens)
    assert FIRST_TOKEN <= same < LAST_TOKEN
    assert answer(tokens, blocks=(0, 1)) == same
    others = [answer([*tokens[:n], 99, *tokens[n + 1 :]]) for n in range(5)]
    others += [answer([12, 11, 13, 14, 15]), answer(tokens[:4]), answer(tokens, seed=1)]
    others += [answer(tokens, skip=layer) for layer in range(3)]
    assert same not in others
    assert len(set(others)) == len(others)


def test_prefix_hashes_go_on_where_a_chunk_ended() -> None:
    memory = MockMemory(1, 4, 4, 0)
    whole = memory.prefix_hashes(0, [5, 6, 7, 8], 0)
    first = memory.prefix_hashes(0, [5, 6], 0)
    second = memory.prefix_hashes(int(first[-1]), [7, 8], 2)
    assert [*first, *second] == list(whole)


async def test_a_step_takes_what_the_configured_pace_says(make_mock: Callable[..., Any], start: Any) -> None:
    pace = SMALL.model_copy(update={"step_s": 0.01, "sequence_s": 0.02, "prefill_tokens_per_s": 500.0})
    engine = await start(make_mock(Role.DECODE, pace, max_model_len=64))
    await engine.generate("a", list(range(100, 140)), max_tokens=3)
    steps = [sample for step in engine.steps for sample in step.steps]
    assert [(step.prefill_tokens, step.decode_sequences) for step in steps] == [
        (16, 0),
        (16, 0),
        (8, 0),
        (0, 1),
        (0, 1),
    ]
    for step in steps:
        assert step.seconds >= 0.99 * (0.01 + step.prefill_tokens / 500.0 + 0.02 * step.decode_sequences)
    await engine.close()


async def test_what_was_preempted_is_prefill_again(make_mock: Callable[..., Any], start: Any) -> None:
    engine = await start(make_mock(Role.DECODE, SMALL, max_model_len=64))
    answers = [await engine.send(f"r{n}", list(range(100, 140)), max_tokens=20) for n in range(2)]
    await asyncio.gather(*(answer.done.wait() for answer in answers))
    preemptions = (await engine.engine.counters())["preemptions"]
    steps = [sample for step in engine.steps for sample in step.steps]
    assert preemptions > 0
    assert sum(step.prefill_tokens for step in steps) > 2 * 40
    await engine.close()


async def test_preemption_recomputes_and_changes_no_answer(make_mock: Callable[..., Any], start: Any) -> None:
    small = await start(make_mock(Role.DECODE, SMALL, max_model_len=64))
    large = await start(make_mock(Role.DECODE, SMALL.model_copy(update={"num_blocks": 256})))
    prompts = [[100 + n] * (5 + n) for n in range(6)]
    answers = [await small.send(f"r{n}", prompt, max_tokens=30) for n, prompt in enumerate(prompts)]
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        await asyncio.wait_for(answer.done.wait(), 30)
        expected = await large.generate(f"r{number}", prompt, max_tokens=30)
        assert answer.tokens == expected.tokens
    counters = await small.engine.counters()
    assert counters["preemptions"] > 0
    assert counters["computed_tokens"] > sum(map(len, prompts))
    await small.settle()
    for engine in (small, large):
        await engine.close()


async def test_a_preempted_decode_computes_what_it_had_received(make_pair: Callable[..., Any]) -> None:
    async with make_pair(SMALL, max_model_len=64) as pair:
        prompts = [pair.prompt(6 + n) for n in range(8)]
        split = await asyncio.gather(*(pair.disaggregated(prompt, 40) for prompt in prompts))
        assert (await pair.decode.engine.counters())["preemptions"] > 0
        for number, prompt in enumerate(prompts):
            local = await pair.decode.generate(f"l{number}", prompt, max_tokens=40)
            assert local.tokens == split[number]
        await pair.prefill.settle()
        await pair.decode.settle()


async def test_a_preempted_prefill_hands_over_the_right_bytes(make_pair: Callable[..., Any]) -> None:
    """Older requests grow until the prompt that is being sent, one token a step, loses its blocks."""
    config = SMALL.model_copy(update={"max_num_batched_tokens": 3, "step_s": 0.002})
    async with make_pair(config, max_model_len=64) as pair:
        crowd = [await pair.prefill.send(f"c{n}", pair.prompt(4), max_tokens=40) for n in range(2)]
        await asyncio.gather(*(asyncio.wait_for(answer.grew.wait(), 30) for answer in crowd))
        prompt = pair.prompt(40)
        split = await pair.disaggregated(prompt, 6)
        assert (await pair.prefill.engine.counters())["preemptions"] > 0
        await asyncio.gather(*(asyncio.wait_for(answer.done.wait(), 30) for answer in crowd))
        local = await pair.decode.generate("local", prompt, max_tokens=6)
        assert split == local.tokens
        await pair.prefill.settle()
        await pair.decode.settle()


async def test_no_more_than_max_num_seqs_run_and_all_are_served(make_mock: Any, start: Any) -> None:
    config = SMALL.model_copy(update={"max_num_seqs": 2, "num_blocks": 64})
    engine = await start(make_mock(Role.DECODE, config, max_model_len=64))
    answers = [await engine.send(f"r{n}", [50 + n] * 5, max_tokens=6) for n in range(7)]
    for answer in answers:
        await asyncio.wait_for(answer.done.wait(), 30)
    assert engine.most_running == 2
    ends = [engine.answers[f"r{n}"] for n in range(7)]
    assert all(len(answer.tokens) == 6 for answer in ends)
    await engine.close()


async def test_long_prompts_are_prefilled_in_chunks(make_mock: Any, start: Any) -> None:
    engine = await start(make_mock(Role.PREFILL, SMALL, max_model_len=64))
    await engine.generate("long", [7] * 50, max_tokens=1)
    assert len([step for step in engine.steps if step.load.running or step.outputs]) == 4
    await engine.close()


async def test_prompts_alone_take_whole_steps_one_after_the_other(make_mock: Any, start: Any) -> None:
    engine = await start(make_mock(Role.DECODE, SMALL, max_model_len=64))
    sizes = ("first", 14), ("next", 20), ("short", 4)
    answers = [await engine.send(name, [7] * count, max_tokens=1) for name, count in sizes[:2]]
    await asyncio.gather(*(asyncio.wait_for(answer.done.wait(), 30) for answer in answers))
    assert [output.request_id for step in engine.steps for output in step.outputs] == ["first", "next"]
    assert [sample.prefill_tokens for step in engine.steps for sample in step.steps] == [16, 16, 2]
    await engine.close()


async def test_a_short_prompt_has_its_tokens_beside_a_long_one(make_mock: Any, start: Any) -> None:
    engine = await start(make_mock(Role.DECODE, SMALL, max_model_len=64))
    answers = [await engine.send(name, [7] * count, max_tokens=1) for name, count in (("long", 30), ("short", 4))]
    await asyncio.gather(*(asyncio.wait_for(answer.done.wait(), 30) for answer in answers))
    assert [output.request_id for step in engine.steps for output in step.outputs] == ["short", "long"]
    await engine.close()


async def test_beside_an_answer_a_step_is_no_longer_than_it_allows(make_mock: Any, start: Any) -> None:
    """A step takes 1 ms, and a prompt token as long: three quarters of a step are three of them."""
    slow = SMALL.model_copy(update={"prefill_tokens_per_s": 1000.0, "step_s": 0.001})
    engine = await start(make_mock(Role.DECODE, slow, max_model_len=64, prompt_share=0.75))
    answer = await engine.send("answer", [7] * 4, max_tokens=48)
    await engine.until(lambda load: load.running == 1)
    await engine.generate("prompt", [7] * 30, max_tokens=1)
    beside = [sample for step in engine.steps for sample in step.steps if sample.decode_sequences]
    assert max(sample.prefill_tokens for sample in beside) == 3
    assert not answer.done.is_set(), "it ran all the time"
    await asyncio.wait_for(answer.done.wait(), 30)
    await engine.close()


async def test_an_idle_engine_sleeps(make_pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_pair(SMALL, max_model_len=64) as pair:
        await pair.disaggregated(pair.prompt(9), 4)
        await pair.prefill.settle()
        await pair.decode.settle()
        await asyncio.sleep(0.05)  # the last step's end
        planned: list[Any] = []
        for running in (pair.decode, pair.prefill):
            monkeypatch.setattr(running.engine._scheduler, "plan", lambda: planned.append(1))
        await asyncio.sleep(0.2)
        monkeypatch.undo()
        assert not planned


async def test_limits_and_stops(make_mock: Any, start: Any) -> None:
    engine = await start(make_mock(Role.DECODE, max_model_len=20))
    full = await engine.generate("full", [3] * 8, max_tokens=None)
    assert (len(full.tokens), full.reason) == (12, 1)
    eos = full.tokens[3]
    ended = await engine.generate("eos", [3] * 8, ignore_eos=False, _eos_token_id=eos)
    assert (ended.tokens, ended.reason) == (full.tokens[:4], 0)
    longer = await engine.generate("min", [3] * 8, max_tokens=6, stop_token_ids=[eos], min_tokens=6)
    assert len(longer.tokens) == 6
    assert longer.tokens[3] == eos + 1
    seeded = await engine.generate("seed", [3] * 8, max_tokens=12, seed=5)
    assert seeded.tokens != full.tokens
    await engine.close()


async def test_what_cannot_be_served_is_refused(make_mock: Any, make_pair: Any) -> None:
    async with make_pair() as pair:
        for prompt in ([], [5] * 512):
            with pytest.raises(EngineError, match="a prompt of"):
                await pair.decode.send("wrong", prompt)
        with pytest.raises(EngineError, match="not a request"):
            await pair.decode.engine.add((b"\x00nonsense",))
    with pytest.raises(EngineError, match="24 blocks do not hold 97 tokens"):
        await make_mock(Role.DECODE, SMALL, max_model_len=97).start()


async def test_after_shutdown_every_call_says_so(make_mock: Any) -> None:
    engine = make_mock(Role.DECODE)
    with pytest.raises(EngineError, match="not started"):
        await engine.add((b"",))
    await engine.start()
    await engine.shutdown()
    await engine.shutdown()
    for _ in range(2):
        with pytest.raises(EngineError):
            await asyncio.wait_for(engine.step(), 10)
    with pytest.raises(EngineError, match="dead"):
        await engine.add((b"",))
    assert await engine.counters()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_channel_is_a_dead_engine(make_pair: Callable[..., Any]) -> None:
    async with make_pair() as pair:
        engine = pair.decode.engine
        await engine.add(pair.decode._encode("r", pair.prompt(9), pair.part(Role.DECODE, "s")))
        await pair.prefill.until_counter(lambda c: c["open_writing"] == 1)
        engine._connections.channel._do(lambda: 1 / 0)
        await asyncio.wait_for(pair.decode._pump, 60)
        with pytest.raises(EngineError) as caught:
            await engine.step()
        assert caught.value.__cause__ is not None
        assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)
