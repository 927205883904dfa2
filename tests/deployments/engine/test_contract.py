"""What every engine core does, the double and the real one alike: generate, batch, hand off, abort, fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.engine.protocol import RequestRefused, Step
from deployments.messages import Bring, Pin, ReplicaInfo, Role, StepSample
from transfer.memory.blocks import chained_hashes

pytestmark = pytest.mark.asyncio(loop_scope="module")
STOP, LENGTH, ERROR = 0, 1, 3


def computed(steps: list[Step]) -> list[StepSample]:
    """What an engine said of its steps."""
    return [sample for step in steps for sample in step.steps]


def named_sockets() -> list[Path]:
    """The files of this process's Unix sockets."""
    ours = {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    paths = [Path(fields[7]) for fields in sockets if len(fields) > 7 and f"socket:[{fields[6]}]" in ours]
    return [path for path in paths if path.exists()]


async def test_a_started_engine_has_no_socket_with_a_name(engine_pair: Any) -> None:
    """A process that is killed would leave it behind."""
    assert not named_sockets()


async def test_a_request_ends_with_max_tokens(engine_pair: Any) -> None:
    for engine in (engine_pair.prefill, engine_pair.decode):
        answer = await engine.generate("local", engine_pair.prompt(21), max_tokens=9)
        assert (len(answer.tokens), answer.reason) == (9, LENGTH)
        await engine.settle()


async def test_the_same_prompt_gives_the_same_tokens_on_either_engine(engine_pair: Any) -> None:
    prompt = engine_pair.prompt(19)
    answers = [
        (await engine.generate(f"same-{attempt}", prompt, max_tokens=8)).tokens
        for engine in (engine_pair.prefill, engine_pair.decode)
        for attempt in range(2)
    ]
    assert all(tokens == answers[0] for tokens in answers)


async def test_a_stop_token_ends_the_answer(engine_pair: Any) -> None:
    prompt = engine_pair.prompt(10)
    free = await engine_pair.decode.generate("free", prompt, max_tokens=8)
    stop = free.tokens[4]
    expected = free.tokens[: free.tokens.index(stop) + 1]
    stopped = await engine_pair.decode.generate("stopped", prompt, max_tokens=8, stop_token_ids=[stop])
    assert (stopped.tokens, stopped.reason) == (expected, STOP)


async def test_two_requests_share_steps(engine_pair: Any) -> None:
    engine = engine_pair.decode
    answers = [await engine.send(f"r{n}", engine_pair.prompt(9 + n), max_tokens=30) for n in range(2)]
    await asyncio.wait_for(asyncio.gather(*(answer.done.wait() for answer in answers)), 120)
    assert [len(answer.tokens) for answer in answers] == [30, 30]
    assert any(len(step.outputs) == 2 for step in engine.steps)


@pytest.mark.parametrize(("blocks", "extra"), [(0, 1), (1, -1), (1, 0), (1, 1), (5, 3)])
async def test_disaggregated_is_token_identical_to_local(engine_pair: Any, blocks: int, extra: int) -> None:
    prompt = engine_pair.prompt(blocks * engine_pair.block_size + extra)
    split = await engine_pair.disaggregated(prompt, 12)
    local = await engine_pair.decode.generate("local", prompt, max_tokens=12)
    assert split == local.tokens
    await engine_pair.prefill.settle()
    await engine_pair.decode.settle()


@pytest.mark.parametrize("has", [0, 2, 4])
async def test_a_prompt_is_brought_from_another_engine(engine_pair: Any, has: int) -> None:
    """What that one does not have is computed."""
    source, target, size = engine_pair.decode, engine_pair.prefill, engine_pair.block_size
    prompt = engine_pair.prompt(4 * size + 3)
    if has:
        await source.generate(f"known-{has}", prompt[: has * size + 1], max_tokens=1)
    frames = source.frames(prompt)
    assert target.engine.hashes(frames) == chained_hashes(prompt, size)
    before = (await target.engine.counters())["blocks_fetched"]
    peer = ReplicaInfo("source", "p", Role.DECODE, "n", "f", size, 9, 9, 999, source.info.endpoints)
    brought = await target.bring(Bring(f"brought-{has}", frames, 3 * size, peer, 30.0))
    assert (len(brought.tokens), brought.reason) == (1, LENGTH)
    if engine_pair.caches_prefixes:
        assert (await target.engine.counters())["blocks_fetched"] - before == min(has, 3)
        await target.cached(set(chained_hashes(prompt[: 3 * size], size)))
    whole = await source.generate(f"whole-{has}", prompt, max_tokens=6)
    assert (await target.generate(f"again-{has}", prompt, max_tokens=6)).tokens == whole.tokens
    await source.settle()
    await target.settle()


async def test_what_cannot_be_read_is_not_brought(engine_pair: Any) -> None:
    peer = ReplicaInfo("source", "p", Role.DECODE, "n", "f", 1, 9, 9, 999, engine_pair.decode.info.endpoints)
    with pytest.raises(RequestRefused):
        await engine_pair.prefill.engine.bring(Bring("bad", (b"?",), 32, peer, 30.0))
    with pytest.raises(RequestRefused):
        engine_pair.prefill.engine.hashes((b"?",))


TOKENS = 24
LIST = '{"type": "array", "items": {"type": "string"}, "minItems": 40}'
COUNTS_THE_ANSWER: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "greedy": lambda free: {},
    "min_tokens": lambda free: {"min_tokens": 18, "stop_token_ids": [free[6], free[20]]},
    "penalties": lambda free: {"presence_penalty": -2.0, "frequency_penalty": -2.0, "repetition_penalty": 0.9},
    "bad_words": lambda free: {"_bad_words_token_ids": [free[2:4], free[8:10], free[13:15]]},
    "grammar": lambda free: {"structured_outputs": {"json": LIST}},
    "seed": lambda free: {"seed": 7, "temperature": 1.0, "top_p": 0.9},
    "logprobs": lambda free: {"logprobs": 2},
}
"""Sampling that counts, or is moved by, generated tokens; made from what is answered without it.

The penalties are rewards: a model of random weights does not repeat itself by itself."""


@pytest.mark.parametrize("name", COUNTS_THE_ANSWER)
async def test_an_answer_goes_on_elsewhere_as_if_undisturbed(engine_pair: Any, name: str) -> None:
    """On another engine, on the same one, and split; and what is split from the beginning is answered alike."""
    prefill, decode = engine_pair.prefill, engine_pair.decode
    prompt = engine_pair.prompt(2 * prefill.info.chunk_tokens + 5)  # prefilled in several steps
    free = await decode.generate(f"{name}-free", prompt, max_tokens=TOKENS)
    sampling = COUNTS_THE_ANSWER[name](free.tokens)
    whole = await decode.generate(f"{name}-whole", prompt, max_tokens=TOKENS, **sampling)
    for sent, engine in ((1, prefill), (3, decode), (14, prefill)):
        told = {**sampling, "max_tokens": TOKENS, "extra_args": {"baton_answered": whole.tokens[:sent]}}
        rest = await engine.generate(f"{name}-{sent}", prompt, **told)
        assert (rest.tokens, rest.reason) == (whole.tokens[sent:], whole.reason), sent
        assert engine.logprobs(f"{name}-{sent}") == pytest.approx(decode.logprobs(f"{name}-whole")[sent:], abs=1e-4)
    assert whole.reason == LENGTH or name == "min_tokens"
    if whole.reason == LENGTH:
        assert await engine_pair.disaggregated(prompt, TOKENS, **sampling) == whole.tokens
        assert await engine_pair.disaggregated(prompt, TOKENS, whole.tokens[:5], **sampling) == whole.tokens[5:]
    if engine_pair.caches_prefixes and name not in ("greedy", "logprobs"):
        assert whole.tokens != free.tokens, "it has an effect"
    await prefill.settle()
    await decode.settle()


async def test_a_repeated_prompt_is_answered_alike(engine_pair: Any) -> None:
    prompt = engine_pair.prompt(3 * engine_pair.block_size + 1)
    answers = [await engine_pair.disaggregated(prompt, 6) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]


async def test_identical_prompts_at_one_moment_and_16_at_once(engine_pair: Any) -> None:
    size = engine_pair.block_size
    prompts = [engine_pair.prompt(1 + (n * 7) % (5 * size)) for n in range(14)]
    prompts += [prompts[13], prompts[13]]
    split = await asyncio.gather(*(engine_pair.disaggregated(prompt, 10) for prompt in prompts))
    for number, (prompt, tokens) in enumerate(zip(prompts, split, strict=True)):
        local = await engine_pair.prefill.generate(f"local-{number}", prompt, max_tokens=10)
        assert tokens == local.tokens
    await engine_pair.prefill.settle()
    await engine_pair.decode.settle()


async def test_a_running_session_is_handed_over_to_another_engine(engine_pair: Any) -> None:
    """A move: decode, which has let a session go, writes what it has where prefill would have written the prompt."""
    source, target, size = engine_pair.decode, engine_pair.prefill, engine_pair.block_size
    prompt, limit = engine_pair.prompt(2 * size - 10 if size > 10 else 7), 40
    running = await source.send("moving", prompt, max_tokens=limit)
    async with asyncio.timeout(120):
        while len(running.tokens) < 15:
            running.grew.clear()
            await running.grew.wait()
    await source.engine.abort(["moving"])
    given = list(running.tokens)
    before, seen = await source.engine.counters(), len(source.steps)
    parts = {
        "decode": (target, source, limit),
        "prefill": (source, target, len(given) + 1),
    }
    answers = []
    for role, (engine, peer, tokens) in parts.items():
        baton = {"role": role, "session": "moved", "epoch": 2, "peers": list(peer.info.endpoints)}
        extra = {"kv_transfer_params": {"baton": baton}, "baton_answered": given}
        answers.append(await engine.send("moved", prompt, max_tokens=tokens, extra_args=extra))
    await asyncio.wait_for(asyncio.gather(*(answer.done.wait() for answer in answers)), 120)
    decoded, handed_over = answers
    after = await source.engine.counters()
    assert after["blocks_written"] > before["blocks_written"]
    if engine_pair.caches_prefixes:
        assert [step.prefill_tokens for step in computed(source.steps[seen:])] == [0], "the last token alone"
    await source.settle()
    await target.settle()
    whole = await source.generate("whole", prompt, max_tokens=limit)
    assert [*given, *handed_over.tokens, *decoded.tokens] == whole.tokens


async def test_its_steps_say_what_was_computed_and_idleness_is_no_part_of_them(engine_pair: Any) -> None:
    engine, prompt_tokens, answer_tokens = engine_pair.decode, 21, 9
    await engine.settle()
    await asyncio.sleep(0.2)
    seen, began_s = len(engine.steps), time.monotonic()
    await engine.generate("counted", engine_pair.prompt(prompt_tokens), max_tokens=answer_tokens)
    elapsed_s = time.monotonic() - began_s
    steps = computed(engine.steps[seen:])
    assert sum(step.prefill_tokens for step in steps) == prompt_tokens
    assert sum(step.prefill_context for step in steps) == sum(range(prompt_tokens))
    assert sum(step.decode_sequences for step in steps) == answer_tokens - 1
    assert sum(step.decode_context for step in steps) == sum(range(prompt_tokens + 1, prompt_tokens + answer_tokens))
    assert all(step.seconds > 0 for step in steps)
    assert sum(step.seconds for step in steps) <= elapsed_s
    assert max(step.load.running_tokens for step in engine.steps[seen:]) == prompt_tokens + answer_tokens - 1


async def test_the_steps_of_a_handoff_are_told_by_who_computes_them(engine_pair: Any) -> None:
    seen = [len(engine.steps) for engine in (engine_pair.prefill, engine_pair.decode)]
    await engine_pair.disaggregated(engine_pair.prompt(30), 6)
    prefill, decode = computed(engine_pair.prefill.steps[seen[0] :]), computed(engine_pair.decode.steps[seen[1] :])
    assert [sum(step.prefill_tokens for step in steps) for steps in (prefill, decode)] == [30, 0]
    assert [sum(step.decode_sequences for step in steps) for steps in (prefill, decode)] == [0, 5]
    assert sum(step.decode_context for step in decode) == sum(range(31, 36))


async def test_the_counters_say_what_moved(engine_pair: Any) -> None:
    before = [await engine.engine.counters() for engine in (engine_pair.prefill, engine_pair.decode)]
    tokens = 3 * engine_pair.block_size + 1
    await engine_pair.disaggregated(engine_pair.prompt(tokens), 5)
    landed = before[0]["handoffs_landed"] + 1
    sent = await engine_pair.prefill.until_counter(lambda c: c["handoffs_landed"] == landed)
    got = await engine_pair.decode.engine.counters()
    assert sent["bytes_written"] - before[0]["bytes_written"] == 4 * engine_pair.block_bytes
    assert got["handoffs_received"] - before[1]["handoffs_received"] == 1
    if engine_pair.counts_tokens:
        assert sent["computed_tokens"] - before[0]["computed_tokens"] == tokens
        assert got["computed_tokens"] == before[1]["computed_tokens"], "decode computed the prompt again"
        assert got["loaded_tokens"] - before[1]["loaded_tokens"] == tokens


async def test_it_says_when_it_did_what_for_a_handoff(engine_pair: Any) -> None:
    session, prefilled, decoded = await engine_pair.begin(engine_pair.prompt(30), 5)
    await asyncio.wait_for(asyncio.gather(prefilled.done.wait(), decoded.done.wait()), 120)
    spans: dict[str, Any] = {}
    for engine, named in (
        (engine_pair.prefill, {"chunk", "writes", "landed"}),
        (engine_pair.decode, {"offer", "received"}),
    ):
        ((now_s, found),) = await engine.engine.spans([session, "never"])
        assert {each["what"] for each in found[session]} == named
        assert all(each["from_s"] <= each["to_s"] <= now_s for each in found[session])
        assert found["never"] == []
        spans |= {each["what"]: each for each in found[session]}
    assert spans["chunk"]["note"] == "up to token 30"
    assert spans["chunk"]["from_s"] <= spans["writes"]["from_s"] <= spans["writes"]["to_s"] <= spans["landed"]["from_s"]


async def test_it_tells_which_blocks_it_caches(engine_pair: Any) -> None:
    """Computed, generated and received ones, by the hashes that the cluster core makes of a prompt."""
    size = engine_pair.block_size
    prompt = engine_pair.prompt(3 * size - 2)
    tokens = await engine_pair.disaggregated(prompt, 4)
    hashes = chained_hashes([*prompt, *tokens], size)
    for engine, expected in ((engine_pair.prefill, hashes[:2]), (engine_pair.decode, hashes)):
        cached = await engine.cached(set(expected) if engine_pair.caches_prefixes else set())
        assert cached & set(hashes) == (set(expected) if engine_pair.caches_prefixes else set())
        if not engine_pair.caches_prefixes:
            assert not cached
    assert len(hashes) == 3


async def test_a_pinned_prefix_keeps_its_blocks_until_it_is_unpinned(engine_pair: Any) -> None:
    """It is computed once. Later requests find it in the cache, also after many other prompts."""
    engine, size = engine_pair.decode, engine_pair.block_size
    prefix = engine_pair.prompt(3 * size + 2)
    free = await engine.generate("free", [*prefix, 7, 8], max_tokens=9)
    await engine.settle()
    pin = Pin("system", tuple(prefix), 3)
    load = await engine.pin("pins", ["system"], pin)
    assert (load.pinned, load.used_blocks) == ({"system": 3}, 3)
    again = await engine.pin("again", ["system"], pin)
    assert (again.pinned, again.used_blocks) == ({"system": 3}, 3)
    room = engine.info.total_blocks - 4
    for number in range(3):
        await engine.generate(f"filler-{number}", engine_pair.prompt(min(room * size, 480)), max_tokens=1)
    seen = len(engine.steps)
    with_it = await engine.generate("with it", [*prefix, 7, 8], max_tokens=9)
    assert with_it.tokens == free.tokens
    if engine_pair.caches_prefixes:
        assert sum(step.prefill_tokens for step in computed(engine.steps[seen:])) == len(prefix) + 2 - 3 * size
    other = Pin("other", tuple(engine_pair.prompt(2 * size)), 2)
    load = await engine.pin("other", ["other"], other)
    assert (load.pinned, load.used_blocks) == ({"other": 2}, 2)
    load = await engine.pin("none", [])
    assert load.pinned == {}
    await engine.settle()


async def test_an_unknown_id_is_not_aborted(engine_pair: Any) -> None:
    await engine_pair.decode.engine.abort(["unknown"])
    answer = await engine_pair.decode.generate("after", engine_pair.prompt(5), max_tokens=2)
    assert answer.reason == LENGTH


async def test_aborting_a_decode_that_waits_for_a_prefill_that_never_comes(engine_pair: Any) -> None:
    decode = engine_pair.decode
    part = engine_pair.part(Role.DECODE, "lonely")
    answer = await decode.send("lonely", engine_pair.prompt(20), max_tokens=4, **part)
    await engine_pair.prefill.until_counter(lambda c: c["open_writing"] == 1)
    await decode.engine.abort(["lonely"])
    await decode.settle()
    await engine_pair.prefill.settle()
    assert not answer.tokens


@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
async def test_aborting_during_the_handoff(engine_pair: Any, side: str) -> None:
    session, _, decoded = await engine_pair.begin(engine_pair.prompt(15 * engine_pair.block_size), 40)
    await engine_pair.prefill.until_counter(lambda c: c["writes"] > 0)
    if side != "decode":
        await engine_pair.prefill.engine.abort([session])
    if side != "prefill":
        await engine_pair.decode.engine.abort([session])
    else:
        await asyncio.wait_for(decoded.done.wait(), 120)
        assert decoded.reason in (ERROR, LENGTH)  # LENGTH: the prefill was over before the abort
    await engine_pair.prefill.settle()
    await engine_pair.decode.settle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_aborting_while_decode_generates(engine_pair: Any, side: str) -> None:
    session, prefilled, decoded = await engine_pair.begin(engine_pair.prompt(20), 150)
    await asyncio.wait_for(decoded.grew.wait(), 120)
    await getattr(engine_pair, side).engine.abort([session])
    if side == "prefill":  # over there: decode does not notice
        await asyncio.wait_for(decoded.done.wait(), 60)
        assert decoded.reason == LENGTH
    await engine_pair.prefill.settle()
    await engine_pair.decode.settle()
    assert prefilled.reason == LENGTH


async def test_a_prefill_engine_that_dies_breaks_the_handoff(engine_pair: Any) -> None:
    """The last of this module: it costs the pair its prefill engine."""
    _, _, decoded = await engine_pair.begin(engine_pair.prompt(15 * engine_pair.block_size), 5)
    await engine_pair.prefill.until_counter(lambda c: c["writes"] > 0)
    await engine_pair.kill_prefill()
    await asyncio.wait_for(decoded.done.wait(), 120)
    assert decoded.reason == ERROR
    assert not decoded.tokens
    await engine_pair.decode.settle()
    after = await engine_pair.decode.generate("after", engine_pair.prompt(5), max_tokens=2)
    assert after.reason == LENGTH
