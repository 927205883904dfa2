"""Our channel between real engines of unlike shape: tensor parallelism, block sizes, fp8 KV, a small prefill memory.

The model is tiny and random, with heads enough to be split four ways.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.platforms import current_platform
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.engine import FinishReason

from configs.schema import BatonConfig, ModelConfig, PlacementConfig, PoolConfig, VllmEngineConfig
from deployments.engine.build import environment
from deployments.engine.protocol import Step
from deployments.host.processes import descendants
from deployments.host.shared_memory import PREFIXES, shared_memory_of
from deployments.manager.calls import Drain, Prefixes, Status
from deployments.messages import Mode
from deployments.policy import spread
from deployments.policy.placement import fetch
from load_tests.harness.control_plane import LARGE, PREFILL, SMALL, WAIT_S, Answer, until
from tests.deployments.real_engines import RealEngines
from transfer.memory.blocks import chained_hashes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LAYERS, HEADS, HEAD_DIM, VOCABULARY, MAX_MODEL_LEN = 3, 4, 64, 1024, 1024
FLOAT32 = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2 * HEADS * HEAD_DIM,
        num_attention_heads=2 * HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        num_hidden_layers=LAYERS,
        intermediate_size=512,
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def pool(tensor_parallel_size: int = 1, engine_args: dict[str, Any] | None = None, **engine: Any) -> PoolConfig:
    settings = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 64, "block_size": 32, **engine}
    return PoolConfig(
        engine=VllmEngineConfig(
            tensor_parallel_size=tensor_parallel_size,
            engine_args={"skip_tokenizer_init": True, **(engine_args or {})},
            **settings,
        )
    )


@asynccontextmanager
async def cluster(
    model: Path,
    prefill: PoolConfig,
    decode: PoolConfig,
    *large: PoolConfig,
    max_model_len: int = MAX_MODEL_LEN,
    **placement: Any,
) -> AsyncIterator[RealEngines]:
    config = BatonConfig(
        model=ModelConfig(source=str(model), dtype="float32", max_model_len=max_model_len),
        prefill=prefill,
        decode=dict(zip(("small", "large"), (decode, *large), strict=False)),
        placement=PlacementConfig.model_validate(
            {"split": "always", "snapshot_interval_s": 0.01, "snapshot_stale_s": WAIT_S, **placement}
        ),
    )
    os.environ.update(environment(config, "prefill"))
    made = RealEngines(config)
    try:
        replicas = [PREFILL, SMALL, *[LARGE for _ in large]]
        eager = isinstance(prefill.engine, VllmEngineConfig) and prefill.engine.enforce_eager
        together = [replicas] if eager else [[each] for each in replicas]
        for each in together:  # of compiled ones the second finds what the first has compiled
            await made.start(*each)
        yield made
    finally:
        await made.close()


_random = random.Random(5)


def prompt(tokens: int) -> list[int]:
    return [_random.randrange(10, VOCABULARY) for _ in range(tokens)]


async def check(engines: RealEngines, lengths: list[int], block_size: int, itemsize: int = FLOAT32) -> None:
    """Split answers equal those of decode alone, and every block moved once, heads and all."""
    before = await engines.replicas[PREFILL].counters()
    prompts = [prompt(tokens) for tokens in lengths]
    asked = [await engines.ask(each, max_tokens=6) for each in prompts]
    for each, answer in zip(prompts, asked, strict=True):
        tokens = (await answer.over()).tokens
        assert answer.context.modes == {Mode.DISAGGREGATED}
        assert len(tokens) == 6
        assert tokens == await engines.alone(each, max_tokens=6)
    after = await engines.replicas[PREFILL].counters()
    blocks = sum(-(-tokens // block_size) for tokens in lengths)
    expected = blocks * block_size * LAYERS * HEADS * 2 * HEAD_DIM * itemsize
    assert after["bytes_written"] - before["bytes_written"] == expected
    cancelled = await engines.ask(prompt(500), max_tokens=300)
    await cancelled.has(2)
    await engines.core.abort_requests_async([cancelled.request_id])
    await engines.all_is_free()


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (2, 4)], ids=["2 to 1", "2 to 4"])
async def test_heads_are_split_on_the_way(model: Path, prefill: int, decode: int) -> None:
    async with cluster(model, pool(prefill), pool(decode)) as engines:
        assert mapped_without_a_name() == used_by_several_workers()
        await check(engines, [2, 33, 64, 200], block_size=32)


def used_by_several_workers() -> set[str]:
    """The prefixes that engines of several workers use here: vLLM's communicator exists in its AVX-512 build alone."""
    current_platform.import_kernels()
    return set(PREFIXES) if hasattr(torch.ops._C, "init_shm_manager") else {"psm_"}


def mapped_without_a_name() -> set[str]:
    """How the shared memory of our engines is called that has lost its name. It fails where any has one."""
    engines = descendants(os.getpid())
    assert not shared_memory_of(engines, ("",)), "a process that is killed would leave it behind"
    lines = [line for pid in engines for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    names = [line.rpartition("/dev/shm/")[2] for line in lines if line.endswith("(deleted)")]
    return {prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in names)}


@pytest.mark.parametrize(("block_size", "chunk"), [(32, 48), (256, 100)])
async def test_any_block_size_and_chunk(model: Path, block_size: int, chunk: int) -> None:
    shape = pool(block_size=block_size, max_num_batched_tokens=chunk)
    async with cluster(model, shape, shape) as engines:
        await check(engines, [1, 15, 16, 17, 255, 256, 300], block_size)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPU with a C++ compiler")
async def test_compiled_engines_write_layers_as_eager_ones_do(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    # Read from the variable when torch was imported; what is set as usual holds in this thread only.
    monkeypatch.setattr(torch._dynamo.config._config["disable"], "default", False)
    compiled = pool(enforce_eager=False)
    async with cluster(model, compiled, compiled) as engines:
        await check(engines, [1, 33, 64, 200, 300], block_size=32)


async def test_a_long_prompt_on_decode_leaves_room_for_others(model: Path) -> None:
    """A short request, whose KV cache arrives meanwhile, is answered first."""
    over = list[str]()

    async def note(name: str, answer: Awaitable[object]) -> None:
        await answer
        over.append(name)

    async with cluster(model, pool(), pool()) as engines:
        for _ in range(5):  # a busy machine may hold up the short ones for reasons of its own
            over.clear()
            long = asyncio.create_task(note("long", engines.alone(prompt(960), max_tokens=2)))  # 15 whole steps
            split = await engines.ask(prompt(20), max_tokens=2)
            await asyncio.gather(
                long, note("short", engines.alone(prompt(20), max_tokens=2)), note("split", split.over())
            )
            if over[-1] == "long":
                break
        assert over[-1] == "long"
        infos = {name: replica._reporter.info for name, replica in engines.replicas.items()}
        chunks = {name: info and info.chunk_tokens for name, info in infos.items()}
        assert chunks == {PREFILL: 64, SMALL: 64}, "and placement predicts with it"


@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's fp8 KV on CPU needs AVX-512")
async def test_fp8_kv_when_both_sides_have_it(model: Path) -> None:
    shape = pool(engine_args={"kv_cache_dtype": "fp8"})
    async with cluster(model, shape, shape) as engines:
        await check(engines, [33, 200], block_size=32, itemsize=1)


SAMPLING: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"min_tokens": 6, "stop_token_ids": list(range(VOCABULARY // 2))},
    {"min_tokens": 2, "stop_token_ids": list(range(0, VOCABULARY, 3))},
    {"logit_bias": {100: 50.0, 101: 49.5}},
    {"repetition_penalty": 1.8},
    {"top_k": 1, "temperature": 0.9},
    {"allowed_token_ids": [7, 8, 9, 10]},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"allowed_token_ids": [7, 8], "_bad_words_token_ids": [[7, 7], [8, 8]]},
    {"seed": 7, "temperature": 1.0, "top_p": 0.9},
    {"allowed_token_ids": [7], "repetition_detection": RepetitionDetectionParams(1, 1, min_count=9)},
]


async def test_every_kind_of_request_that_is_split_is_exact_and_goes_on_elsewhere(model: Path) -> None:
    """Tokens, log probabilities and the reason of the end: those of one engine, also when it dies in the middle."""
    async with cluster(model, pool(), pool()) as engines:
        for sampling in SAMPLING:
            asked = prompt(70)
            split, alone = [
                await engines.answer(asked, max_tokens=12, **{**sampling, **mode})
                for mode in ({}, {"prompt_logprobs": 0})
            ]
            assert split.context.modes == {Mode.DISAGGREGATED}, sampling
            assert alone.context.modes == {Mode.DECODE_LOCAL}
            assert (split.tokens, split.reason, split.stop_reason) == (alone.tokens, alone.reason, alone.stop_reason)
            assert len(split.tokens) > 1, sampling
            for one, other in zip(logprobs(split), logprobs(alone), strict=True):
                assert one == pytest.approx(other, abs=1e-4)
        await check_going_on(engines)


async def check_going_on(engines: RealEngines) -> None:
    """Decode dies; prefill has no other place for the answers, and ends them by itself."""
    asked = [(prompt(150), {**sampling, "max_tokens": 500}) for sampling in SAMPLING]
    whole = await undisturbed_answers(engines, asked)
    answers = [await engines.ask(each, **sampling) for each, sampling in asked]
    for answer in answers:
        await answer.has(2)
    await engines.replicas[SMALL]._engine.shutdown()
    await are_as_undisturbed(answers, whole)
    gone_on = [answer for answer in answers if Mode.PREFILL_LOCAL in answer.context.modes]
    assert gone_on, "some may have been over"


async def test_a_crowd_is_moved_about_and_nothing_is_computed_again(model: Path) -> None:
    """Prompts and answers end in the midst of blocks, and how an answer goes on depends on all of it."""
    async with cluster(model, pool(), pool(), pool()) as engines:
        asked = [(prompt(40 + 9 * n), {**sampling, "max_tokens": 300}) for n, sampling in enumerate(SAMPLING)]
        whole = await undisturbed_answers(engines, asked)
        answers = [await engines.ask(each, **sampling) for each, sampling in asked]
        for answer in answers:
            await until_more(answer, 2)
        computed = count_computed(engines)
        moved = 0
        for _ in range(4):
            moved += sum([engines.replicas[each].move_out() for each in (SMALL, LARGE)])
            for answer in answers:
                await until_more(answer, 5)
        await are_as_undisturbed(answers, whole)
        assert moved > len(asked) // 2, "on a busy machine some end before the second round"
        assert sum(computed) == 0
        await engines.all_is_free()
        assert (await engines.manager.ask(Status()))["sessions"]["closed"].get("lost", 0) == 0


async def test_an_answer_that_moves_before_its_last_token_ends_where_it_would_have_ended(model: Path) -> None:
    """The replica that it leaves samples that token, the ninth of one kind, for the one that it goes to."""
    sampling = {"allowed_token_ids": [7], "repetition_detection": RepetitionDetectionParams(1, 1, min_count=9)}
    async with cluster(model, pool(), pool(), pool()) as engines:
        for _ in range(50):
            answer = await (await engines.ask(prompt(100), max_tokens=50, **sampling)).has(8)
            in_time = len(answer.tokens) == 8 and answer.reason is None
            moved = sum([engines.replicas[each].move_out() for each in (SMALL, LARGE)])
            await answer.over()
            assert (answer.tokens, answer.reason) == ([7] * 9, FinishReason.REPETITION)
            if in_time and moved:
                break
        else:
            raise AssertionError("no answer moved before its last token")
        await engines.all_is_free()


async def test_without_a_block_to_spare_a_moved_session_computes_again(model: Path) -> None:
    """Two decode engines that hold one session each, which takes all blocks."""
    tokens, size = 384, 128
    one = pool(
        block_size=size, kv_cache_memory_bytes=(tokens // size + 1) * size * LAYERS * HEADS * 2 * HEAD_DIM * FLOAT32
    )
    async with cluster(model, pool(block_size=size), one, one, max_model_len=tokens) as engines:
        for known, again in ((2, False), (140, True)):  # far from the ends of blocks: the engines go on meanwhile
            asked = prompt(130)
            whole = await engines.alone(asked, max_tokens=tokens - 130)
            for _ in range(20):  # it may be further than that, or over, when it is told to move
                answer = await (await engines.ask(asked, max_tokens=tokens - 130)).has(known)
                computed = count_computed(engines)
                moved = sum([engines.replicas[each].move_out() for each in (SMALL, LARGE)])
                assert (await answer.over()).tokens == whole
                if moved == 1 and bool(sum(computed)) is again:
                    break
            else:
                raise AssertionError(f"no answer of {known} tokens was computed {'again' if again else 'once'}")
        assert not sum([(await engines.replicas[each].counters())["preemptions"] for each in (SMALL, LARGE)])


async def until_more(answer: Answer, tokens: int) -> None:
    """Wait for so many more tokens, or the end."""
    enough = len(answer.tokens) + tokens
    await answer._until(lambda: answer.reason is not None or len(answer.tokens) >= enough, WAIT_S)


def count_computed(engines: RealEngines) -> list[int]:
    """Tokens that the decode engines compute from now on, by step, without those of steps of one."""
    computed: list[int] = []
    for replica_id in (SMALL, LARGE):
        engine: Any = engines.replicas[replica_id]._engine
        engine.step = counting(engine.step, computed)
    return computed


def counting(step: Callable[[], Awaitable[Step]], computed: list[int]) -> Callable[[], Awaitable[Step]]:
    async def counted() -> Step:
        taken = await step()
        computed.extend(each.prefill_tokens for each in taken.steps)
        return taken

    return counted


async def undisturbed_answers(engines: RealEngines, asked: list[tuple[list[int], dict[str, Any]]]) -> list[Answer]:
    """Of decode alone, all at once."""
    return await asyncio.gather(
        *(engines.answer(each, **{**sampling, "prompt_logprobs": 0}) for each, sampling in asked)
    )


async def are_as_undisturbed(answers: list[Answer], whole: list[Answer]) -> None:
    """To the end: tokens, the reason of the end, log probabilities."""
    for answer, undisturbed in zip(answers, whole, strict=True):
        await answer.over()
        assert answer.context.error is None
        assert (answer.tokens, answer.reason) == (undisturbed.tokens, undisturbed.reason)
        for one, other in zip(logprobs(answer), logprobs(undisturbed), strict=True):
            assert one == pytest.approx(other, abs=1e-3), "of other batches"


def logprobs(answer: Any) -> list[list[float]]:
    """Of each token of an answer: those of the token itself and of the likeliest."""
    rows = [output.new_logprobs for output in answer.outputs if output.new_logprobs is not None]
    return [list(row) for each in rows for row in each.logprobs]


@pytest.fixture
def fetches_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch is expected to beat computing, also where a fast machine computes these short prompts at once.

    It is so also after slow fetches or where computing seems to take no time, and a fetch gets the time that it takes:
    the machine may be busy.
    """
    monkeypatch.setattr(fetch, "FETCH_S", -1.0)
    monkeypatch.setattr(fetch, "DISPLACED", 0.0)
    monkeypatch.setattr(fetch, "LINK_BYTES_PER_S", 1e15)
    monkeypatch.setattr(fetch, "PRIOR_S", 1e6)
    monkeypatch.setattr(fetch, "LEAST_TIMEOUT_S", WAIT_S)


@pytest.mark.usefixtures("fetches_pay")
@pytest.mark.parametrize(("workers", "lenders"), [(1, 1), (2, 1), (1, 2)])
async def test_prefill_fetches_what_decode_has_in_its_cache(model: Path, workers: int, lenders: int) -> None:
    """Answers are those of one engine, wherever in the prompt the part that is fetched ends. Prefill is strict."""
    strict = pool(workers).model_copy(update={"strict": True})
    async with cluster(model, strict, pool(lenders), fetch=True) as engines:
        for cached, asked in ((512, 512), (512, 700), (300, 301), (640, 900)):
            known = prompt(asked)
            await engines.manager.ask(Drain(PREFILL))
            await engines.alone(known[:cached], max_tokens=1)
            await engines.manager.ask(Drain(PREFILL, resume=True))
            whole_blocks = min(cached, asked - 1) // 32
            await is_back(engines, known, whole_blocks)
            before = await engines.replicas[PREFILL].counters()
            answer = await (await engines.ask(known, max_tokens=6)).over()
            after = await engines.replicas[PREFILL].counters()
            assert answer.context.modes == {Mode.DISAGGREGATED}
            assert after["blocks_fetched"] - before["blocks_fetched"] == workers * whole_blocks
            assert after["fetches_broken"] == 0
            assert answer.tokens == (await engines.answer(known, max_tokens=6, prompt_logprobs=0)).tokens
        await engines.all_is_free()


@pytest.mark.usefixtures("fetches_pay")
async def test_decode_fetches_what_another_decode_replica_has_in_its_cache(model: Path) -> None:
    """The one that has it takes no prompt that is as long, and there is no prefill replica."""
    has = pool().model_copy(update={"max_prompt_tokens": 600})
    async with cluster(model, pool(), pool(), has, fetch=True) as engines:
        await engines.manager.ask(Drain(PREFILL))
        for cached in (512, 600):
            known = prompt(700)
            await engines.manager.ask(Drain(SMALL))
            await engines.answer(known[:cached], max_tokens=2)
            await engines.manager.ask(Drain(SMALL, resume=True))
            await is_back(engines, known, cached // 32, by=LARGE, waits_for=SMALL)
            before = await engines.replicas[SMALL].counters()
            answer = await engines.answer(known, max_tokens=6)
            after = await engines.replicas[SMALL].counters()
            assert answer.context.modes == {Mode.DECODE_LOCAL}
            assert after["blocks_fetched"] - before["blocks_fetched"] == cached // 32
            assert answer.tokens == (await engines.answer(known, max_tokens=6, prompt_logprobs=0)).tokens
        await engines.manager.ask(Drain(PREFILL, resume=True))
        await engines.all_is_free()


async def is_back(
    engines: RealEngines, prompt: list[int], blocks: int, by: str = SMALL, waits_for: str = PREFILL
) -> None:
    """Wait until a replica takes prompts again, and the session manager knows which blocks of this one `by` caches."""
    allocator, hashes = engines.manager._allocator, chained_hashes(prompt, 32)

    async def is_so() -> bool:
        ready = [view.info.replica_id for view in allocator.fleet.view(time.monotonic()).ready]
        return waits_for in ready and allocator.predictors.index.hits(hashes).get(by, 0) >= blocks

    await until(is_so)


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_pinned_prefix_is_computed_by_one_and_fetched_by_the_other_and_outlives_other_prompts(
    model: Path, workers: int
) -> None:
    """Answers with it are those of one engine without it, and it is found after more prompts than there is room for."""
    async with cluster(model, pool(workers), pool(), fetch=True) as engines:
        prefix, blocks = prompt(500), 15
        asked = await engines.answer(prefix, max_tokens=1, pins=True)
        shown = asked.context.explanation
        assert shown is not None
        assert (shown["blocks"], asked.tokens) == (blocks, [])

        async def stands() -> bool:
            (listed,) = (await engines.manager.ask(Prefixes()))["prefixes"]
            return bool(listed["replicas"] == sorted([PREFILL, SMALL]))

        await until(stands)
        counters = [await each.counters() for each in engines.replicas.values()]
        assert sum(each["blocks_fetched"] for each in counters) in (blocks, workers * blocks)
        assert sum(each["fetches_broken"] for each in counters) == 0
        fillers = [await engines.ask(prompt(900), max_tokens=2) for _ in range(14)]
        for each in fillers:
            await each.over()
        known = [*prefix, *prompt(200)]
        before = [await each.counters() for each in engines.replicas.values()]
        answer = await engines.answer(known, max_tokens=6)
        after = [await each.counters() for each in engines.replicas.values()]
        computed = sum(
            late["computed_tokens"] - early["computed_tokens"] for late, early in zip(after, before, strict=True)
        )
        assert computed == len(known) - 32 * blocks
        assert answer.tokens == (await engines.answer(known, max_tokens=6, prompt_logprobs=0)).tokens
        await engines.manager.ask(Prefixes(unpin=shown["id"]))
        await engines.all_is_free()


async def test_a_hot_prefix_comes_to_a_replica_that_no_request_goes_to(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One takes no prompt as long as these. Afterwards it answers a shorter one as if it had computed all of it."""
    monkeypatch.setattr(spread, "SHARE", 1e-9)
    monkeypatch.setattr(spread, "WARM_LOAD", 0.0)
    takes_short = pool().model_copy(update={"max_prompt_tokens": 640})
    async with cluster(model, pool(), pool(), takes_short, fetch=True, spread=True) as engines:
        await engines.manager.ask(Drain(PREFILL))  # so that decode's replicas are those that compute prompts
        prefix = prompt(15 * 32)

        async def has_come() -> bool:
            await engines.answer([*prefix, *prompt(200)], max_tokens=2)
            counted = await engines.replicas[LARGE].counters()
            return counted["blocks_fetched"] >= 14  # the last token of a prompt is computed, and so is its block

        await until(has_come)
        known = [*prefix, *prompt(100)]
        await engines.manager.ask(Drain(PREFILL, resume=True))
        await engines.manager.ask(Drain(SMALL))
        answer = await engines.answer(known, max_tokens=6)
        assert answer.tokens == (await engines.answer(known, max_tokens=6, prompt_logprobs=0)).tokens
        await engines.manager.ask(Drain(SMALL, resume=True))
        await engines.all_is_free()


@pytest.mark.usefixtures("fetches_pay")
async def test_a_fetch_that_brings_less_or_is_aborted_harms_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session manager takes decode to have more of each prompt than it has."""
    async with cluster(model, pool(), pool(), fetch=True) as engines:
        index = engines.manager._allocator.predictors.index
        await engines.answer(prompt(700), max_tokens=2)  # the engines' steps are known from now on
        for has, said in ((0, 20), (10, 20), (1, 19)):
            known = prompt(700)
            if has:
                await engines.manager.ask(Drain(PREFILL))
                await engines.alone(known[: has * 32 + 1], max_tokens=1)
                await engines.manager.ask(Drain(PREFILL, resume=True))
                await is_back(engines, known, has)
            before = await engines.replicas[PREFILL].counters()
            with monkeypatch.context() as patched:
                patched.setattr(index, "find", lambda hashes, said=said: ({SMALL: said}, {}))
                answer = await (await engines.ask(known, max_tokens=6)).over()
            after = await engines.replicas[PREFILL].counters()
            assert after["blocks_fetched"] - before["blocks_fetched"] == has
            assert after["fetches_broken"] - before["fetches_broken"] == 1
            assert answer.tokens == (await engines.answer(known, max_tokens=6, prompt_logprobs=0)).tokens
        for turn in range(10):
            with monkeypatch.context() as patched:
                patched.setattr(index, "find", lambda hashes: ({SMALL: 20}, {}))
                cancelled = await engines.ask(known if turn % 2 else prompt(700), max_tokens=6)
                await asyncio.sleep(0.01 * turn)
                await engines.core.abort_requests_async([cancelled.request_id])
        await engines.all_is_free()
        assert answer.tokens == (await engines.answer(known, max_tokens=6)).tokens


@pytest.mark.usefixtures("fetches_pay")
async def test_a_source_that_stands_still_holds_up_no_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two requests that fetch from it, one is aborted meanwhile, and the other one computes its prompt."""
    lends = pool().model_copy(update={"max_prompt_tokens": 8})  # and writes none of these answers
    async with cluster(model, pool(), pool(), lends, fetch=True) as engines:
        index = engines.manager._allocator.predictors.index
        await engines.answer(prompt(700), max_tokens=2)  # the engines' steps are known from now on
        source: Any = engines.replicas[LARGE]._engine
        processes = source._client.resources.engine_manager.processes
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        try:
            with monkeypatch.context() as patched:
                patched.setattr(index, "find", lambda hashes: ({LARGE: 20}, {}))
                known = prompt(700)
                waits, aborted = [await engines.ask(each, max_tokens=6) for each in (known, prompt(700))]
                await until(lambda: fetching(engines, 2))
            await engines.core.abort_requests_async([aborted.request_id])
            split = await (await engines.ask(prompt(100), max_tokens=6)).over()
            assert split.reason is not None, "others are served"
            computed = await waits.over()
            assert await fetching(engines, 2), "the source may still write their blocks"
        finally:
            for process in processes:
                os.kill(process.pid, signal.SIGCONT)
        whole = await engines.answer(known, max_tokens=6, prompt_logprobs=0)
        assert computed.tokens == whole.tokens
        await until(lambda: fetching(engines, 0))
        await engines.all_is_free()


async def fetching(engines: RealEngines, count: int) -> bool:
    """Whether prefill has so many fetches open."""
    return (await engines.replicas[PREFILL].counters())["open_receiving"] == count
