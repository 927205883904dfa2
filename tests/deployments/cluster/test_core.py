"""The whole control plane over mock engines: answers are right, and nothing is left of a session however it ends.

The mock's tokens are read from the KV in its blocks, so an answer that is equal to a local one had the right KV.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from deployments.cluster import engine_request, request_context
from deployments.cluster.recovery import Limits
from deployments.cluster.timings import Timings
from deployments.engine.protocol import EngineError
from deployments.errors import (
    HandoffFailed,
    NeverFits,
    Overloaded,
    ReplicaLost,
    SessionError,
    SessionTimeout,
    Unavailable,
)
from deployments.messages import MANAGER_RETIRES, Admit, Mode, Reject, ReplicaSnapshot, ReportAnswer, SessionRequest
from deployments.policy.admission.retry_budget import RETRY_BUDGET
from deployments.replica.drain import drain
from deployments.replica.timings import Timings as ReplicaTimings
from load_tests.harness.control_plane import (
    LARGE,
    MAX_MODEL_LEN,
    PREFILL,
    REPLICAS,
    SMALL,
    WAIT_S,
    Answer,
    InProcess,
    config,
    until,
)

Launch = Callable[..., Any]
LENGTH, STOP, ERROR = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR
ONE_SEAT = {"max_num_seqs": 1}
_random = random.Random(5)


def prompt(tokens: int) -> list[int]:
    """A prompt that was not there before."""
    return [_random.randint(100, 40_000) for _ in range(tokens)]


def assert_failed(answer: Answer, error: type[SessionError]) -> None:
    assert answer.reason is ERROR
    assert type(answer.context.error) is error, answer.context.error


# ---- answers


@pytest.mark.parametrize("prompt_tokens", [1, 3, 4, 5, 16, 63, 64, 65, 200])
async def test_a_split_answer_is_the_local_answer(cluster: InProcess, prompt_tokens: int) -> None:
    asked = prompt(prompt_tokens)
    for max_tokens in (2, 3, 17):
        split = await cluster.answer(asked, max_tokens=max_tokens)
        assert split.context.modes == {Mode.DISAGGREGATED}
        assert split.tokens == await cluster.local(asked, max_tokens=max_tokens)
        assert (len(split.tokens), split.reason) == (max_tokens, LENGTH)
    await cluster.settle()
    received = await cluster.replicas[LARGE].counters(), await cluster.replicas[SMALL].counters()
    assert sum(each["loaded_tokens"] for each in received) == 3 * prompt_tokens


async def test_many_at_once_identical_prompts_among_them(cluster: InProcess) -> None:
    prompts = [prompt(1 + n * 3) for n in range(24)]
    prompts += [prompts[20]] * 4 + [prompts[3]] * 4
    answers = [await cluster.ask(each, max_tokens=2 + n % 12) for n, each in enumerate(prompts)]
    for answer in answers:
        await answer.over()
    for number, (each, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.tokens == await cluster.local(each, max_tokens=2 + number % 12)
        assert answer.context.modes == {Mode.DISAGGREGATED}
    await cluster.settle()
    closed = (await cluster.manager.status())["sessions"]["closed"]
    assert closed["length"] == 2 * len(prompts)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7, 30])
async def test_max_tokens_is_exact(cluster: InProcess, max_tokens: int) -> None:
    asked = prompt(13)
    whole = await cluster.local(asked, max_tokens=30)
    answer = await cluster.answer(asked, max_tokens=max_tokens)
    assert answer.tokens == whole[:max_tokens]
    assert [output.finish_reason for output in answer.outputs] == [None] * (max_tokens - 1) + [LENGTH]
    await cluster.settle()


@pytest.mark.parametrize("place", [0, 1, 2, 9])
async def test_a_stop_token_ends_the_answer_wherever_it_is(cluster: InProcess, place: int) -> None:
    asked = prompt(22)
    whole = await cluster.local(asked, max_tokens=20)
    stopped = await cluster.answer(asked, max_tokens=20, stop_token_ids=[whole[place]])
    assert stopped.context.modes == {Mode.DISAGGREGATED}
    assert stopped.tokens == whole[: whole.index(whole[place]) + 1]
    assert (stopped.reason, stopped.stop_reason) == (STOP, whole[place])
    assert [output.stop_reason for output in stopped.outputs[:-1]] == [None] * place
    await cluster.settle()


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("place", [0, 1, 2, 7])
async def test_min_tokens_counts_the_first_token(cluster: InProcess, place: int, more: int) -> None:
    """A stop token that comes right after `min_tokens` ends the answer; one token earlier it is masked."""
    asked = prompt(9)
    whole = await cluster.local(asked, max_tokens=12)
    limits = {"max_tokens": 12, "min_tokens": place + more, "stop_token_ids": [whole[place]]}
    split = await cluster.answer(asked, **limits)
    assert split.context.modes == {Mode.DISAGGREGATED}
    assert split.tokens == await cluster.local(asked, **limits)
    if more:
        assert split.tokens[: place + 1] == [*whole[:place], whole[place] + 1], "what the mock samples instead"
        assert (len(split.tokens), split.reason) == (12, LENGTH)
    else:
        assert (split.tokens, split.reason) == (whole[: place + 1], STOP)
    await cluster.settle()


async def test_decode_that_answers_before_prefill_is_heard_is_held_back(cluster: InProcess) -> None:
    """Prefill's outputs go through a relay that is slower than the whole answer."""
    relay = zmq.asyncio.Context()
    inbox = relay.socket(zmq.PULL)
    cluster.pools["prefill"].reply_to = f"tcp://127.0.0.1:{inbox.bind_to_random_port('tcp://127.0.0.1')}"
    asked = prompt(10)
    answer = await cluster.ask(asked, max_tokens=5)
    late = await asyncio.wait_for(inbox.recv_multipart(), WAIT_S)

    async def decode_is_done() -> bool:
        counters = await cluster.replicas[SMALL].counters(), await cluster.replicas[LARGE].counters()
        return sum(each["generated_tokens"] for each in counters) == 4

    await until(decode_is_done)
    assert not answer.outputs
    out = relay.socket(zmq.PUSH)
    out.connect(cluster.pools["prefill"].tasks[0].reply_to)
    out.send_multipart(late)
    await answer.over()
    assert len(answer.tokens) == 5
    cluster.pools["prefill"].reply_to = None
    assert answer.tokens == await cluster.local(asked, max_tokens=5)
    relay.destroy(0)
    await cluster.settle()


# ---- modes and rules


@pytest.mark.parametrize(
    ("sampling", "mode", "rule"),
    [
        ({}, Mode.DISAGGREGATED, ""),
        ({"temperature": 0.7}, Mode.DISAGGREGATED, ""),
        ({"seed": 3}, Mode.DISAGGREGATED, ""),
        ({"repetition_penalty": 1.2, "min_tokens": 2, "logprobs": 2}, Mode.DISAGGREGATED, ""),
        ({"max_tokens": 1}, Mode.PREFILL_LOCAL, "one_token"),
        ({"max_tokens": 1, "seed": 3, "temperature": 1.0}, Mode.PREFILL_LOCAL, "one_token"),
        ({"seed": 3, "temperature": 0.7}, Mode.DISAGGREGATED, ""),
        ({"prompt_logprobs": 1}, Mode.DECODE_LOCAL, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, Mode.DECODE_LOCAL, "prompt_logprobs"),
        ({"presence_penalty": 0.1}, Mode.DISAGGREGATED, ""),
        ({"frequency_penalty": -0.1}, Mode.DISAGGREGATED, ""),
        ({"bad_words": ["never"]}, Mode.DISAGGREGATED, ""),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, Mode.DISAGGREGATED, ""),
        ({"thinking_token_budget": 9}, Mode.DECODE_LOCAL, "stateful_logits"),
    ],
)
async def test_modes_and_rules_are_noted(cluster: InProcess, sampling: dict[str, Any], mode: Mode, rule: str) -> None:
    answer = await cluster.answer(prompt(12), **{"max_tokens": 6, **sampling})
    assert answer.context.modes == {mode}
    assert answer.context.rules == ({rule} if rule else set())
    assert answer.context.error is None
    assert (len(answer.tokens), answer.reason) == ({"max_tokens": 6, **sampling}["max_tokens"], LENGTH)
    await cluster.settle()


async def test_a_prompt_that_is_computed_where_it_is_answered_is_backlog_until_then_only(cluster: InProcess) -> None:
    answer = await (await cluster.ask(prompt(20), max_tokens=400, prompt_logprobs=0)).has(1)

    async def is_prefilled() -> bool:
        return not (await cluster.placed(answer))["prefilling"]

    await until(is_prefilled)
    assert answer.context.modes == {Mode.DECODE_LOCAL}
    assert answer.reason is None
    await cluster.core.abort_requests_async([answer.request_id])
    await cluster.settle()


async def test_a_short_prompt_is_not_worth_splitting(launch: Launch) -> None:
    cluster = await launch(config(split_min_prompt_tokens=10))
    short, enough = await cluster.answer(prompt(9), max_tokens=4), await cluster.answer(prompt(10), max_tokens=4)
    assert (short.context.modes, enough.context.modes) == ({Mode.DECODE_LOCAL}, {Mode.DISAGGREGATED})
    assert short.context.rules == set()
    await cluster.settle()


async def test_the_prefill_replica_answers_while_no_decode_replica_is_up(launch: Launch) -> None:
    cluster = await launch(config(), [PREFILL])
    asked = prompt(21)
    alone = await cluster.answer(asked, max_tokens=9)
    assert alone.context.modes == {Mode.PREFILL_LOCAL}
    await cluster.start(SMALL, LARGE)
    assert alone.tokens == await cluster.local(asked, max_tokens=9)
    assert (await cluster.answer(asked, max_tokens=9)).context.modes == {Mode.DISAGGREGATED}
    await cluster.settle()


# ---- aborts


async def test_aborting_in_the_queue(launch: Launch) -> None:
    cluster = await launch(config(ONE_SEAT))
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.clear()
    asked = [prompt(8) for _ in range(3)]
    first, second = [await cluster.ask(each, max_tokens=5) for each in asked[:2]]
    await cluster.placed(first)
    await cluster.placed(second)
    third = await cluster.ask(asked[2], max_tokens=5)
    await cluster.queued(1)
    await cluster.core.abort_requests_async([third.request_id])
    await cluster.queued(0)
    assert set(await cluster.placements()) == {first.request_id, second.request_id}
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.set()
    for each, answer in zip(asked, (first, second), strict=False):
        await answer.over()
        assert answer.tokens == await cluster.local(each, max_tokens=5)
    assert not third.outputs
    await cluster.settle()


async def test_a_session_makes_no_call_in_its_request_s_context(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve cancels every call made in the context of a request whose client goes away, the closing one too."""
    heard: dict[str, object] = {}

    def listen(owner: object, method: str) -> None:
        original = getattr(owner, method)

        async def listening(*args: Any) -> Any:
            heard[method] = request_context.current.get()
            return await original(*args)

        monkeypatch.setattr(owner, method, listening)

    for method in ("open", "prefill_done", "close"):
        listen(cluster.manager, method)
    for pool in cluster.pools.values():
        listen(pool, "run")
    await cluster.answer(prompt(8), max_tokens=5)
    await cluster.settle()
    assert heard == dict.fromkeys(("open", "run", "prefill_done", "close"))


async def test_aborting_before_the_session_begins(cluster: InProcess) -> None:
    answer = await cluster.ask(prompt(8), max_tokens=5)
    await cluster.core.abort_requests_async([answer.request_id, "nobody"])
    await cluster.settle()
    assert not answer.outputs


async def test_aborting_while_it_is_prefilled(cluster: InProcess) -> None:
    """The session is closed at once; the engine gives its blocks back when its step is over."""
    cluster.engines[PREFILL].go.clear()
    answer = await cluster.ask(prompt(200), max_tokens=5)
    await cluster.stopped(PREFILL)
    await cluster.core.abort_requests_async([answer.request_id])
    await cluster.closed()
    cluster.engines[PREFILL].go.set()
    await cluster.settle()
    assert not answer.outputs


async def test_aborting_at_the_handoff_holds_the_blocks_until_no_write_is_under_way(cluster: InProcess) -> None:
    cluster.planes[PREFILL].shut = True
    answer = await (await cluster.ask(prompt(200), max_tokens=5)).has(1)
    placed = await cluster.placed(answer)
    await cluster.core.abort_requests_async([answer.request_id])
    await cluster.closed()
    assert cluster.planes[PREFILL].writes
    for held in (PREFILL, placed["decode"]):
        assert cluster.engines[held].used_blocks >= 50, "a write could still touch them"
    cluster.planes[PREFILL].shut = False
    await cluster.settle()
    assert len(answer.tokens) == 1


async def test_aborting_while_it_decodes(cluster: InProcess) -> None:
    answer = await (await cluster.ask(prompt(20), max_tokens=400)).has(3)
    await cluster.core.abort_requests_async([answer.request_id])
    await cluster.core.abort_requests_async([answer.request_id])
    await cluster.settle()
    assert answer.reason is None
    assert len(answer.tokens) < 400


async def test_aborts_at_any_moment_leave_nothing(cluster: InProcess) -> None:
    """Some of a crowd go, each after another number of turns of the event loop; the others get their answers."""
    prompts = [prompt(5 + 9 * n % 70) for n in range(24)]
    answers = [await cluster.ask(each, max_tokens=20) for each in prompts]
    for number, answer in enumerate(answers):
        if number % 3:
            for _ in range(_random.randrange(40)):
                await asyncio.sleep(0)
            await cluster.core.abort_requests_async([answer.request_id])
    for each, answer in list(zip(prompts, answers, strict=True))[::3]:
        await answer.over()
        assert answer.tokens == await cluster.local(each, max_tokens=20)
    await cluster.settle()


# ---- refusals


async def test_what_can_never_fit(cluster: InProcess) -> None:
    answer = await cluster.answer(prompt(MAX_MODEL_LEN // 2), max_tokens=MAX_MODEL_LEN)
    assert_failed(answer, NeverFits)
    assert f"the request needs {MAX_MODEL_LEN * 3 // 2} tokens" in str(answer.context.error)
    assert not answer.tokens
    await cluster.settle()


@pytest.mark.parametrize("placement", [{"queue_timeout_s": 0.05}, {"max_queued_requests": 0}])
async def test_no_capacity_in_time(launch: Launch, placement: dict[str, Any]) -> None:
    cluster = await launch(config(ONE_SEAT, **placement))
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.clear()
    answers = []
    for _ in range(2):
        answers.append(await cluster.ask(prompt(8), max_tokens=5))
        await cluster.placed(answers[-1])
    late = await cluster.answer(prompt(8), max_tokens=5)
    assert_failed(late, Overloaded)
    assert isinstance(late.context.error, Overloaded)
    assert late.context.error.retry_after_s > 0
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.set()
    for answer in answers:
        assert (await answer.over()).reason is LENGTH
    await cluster.settle()


@pytest.mark.parametrize("up", [[], [PREFILL]])
async def test_no_replica_is_up(launch: Launch, monkeypatch: pytest.MonkeyPatch, up: list[str]) -> None:
    """Every rule of today allows the prefill replica as the last resort; one that does not has to be made up."""
    if up:
        modes = (Mode.DISAGGREGATED, Mode.DECODE_LOCAL)
        monkeypatch.setattr(engine_request, "split_rule", lambda *_: (modes, "made_up"))
    cluster = await launch(config(queue_timeout_s=0.05), up)
    answer = await cluster.answer(prompt(8), max_tokens=5)
    assert_failed(answer, Unavailable)
    assert answer.context.modes == set()
    await cluster.settle()


@pytest.mark.slow
async def test_a_session_manager_that_cannot_be_reached(cluster: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreachable(*args: Any) -> None:
        raise Unavailable("it is being restarted")

    monkeypatch.setattr(cluster.manager, "open", unreachable)
    assert_failed(await cluster.answer(prompt(8), max_tokens=5), Unavailable)
    monkeypatch.undo()
    monkeypatch.setattr(cluster.manager, "prefill_done", unreachable)
    assert (await cluster.answer(prompt(8), max_tokens=5)).reason is LENGTH
    await cluster.settle()


async def test_what_nobody_foresaw_is_an_error_and_no_silence(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*args: Any) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(cluster.manager, "open", broken)
    assert_failed(await cluster.answer(prompt(8), max_tokens=5), SessionError)
    monkeypatch.undo()
    cluster.pools["prefill"].error = ValueError("another")
    assert_failed(await cluster.answer(prompt(8), max_tokens=5), SessionError)
    cluster.pools["prefill"].error = None
    assert (await cluster.answer(prompt(8), max_tokens=5)).reason is LENGTH
    await cluster.settle()


# ---- failures


@pytest.mark.slow
async def test_answers_go_on_elsewhere_when_their_decode_engine_dies(cluster: InProcess) -> None:
    prompts = [prompt(8 + n) for n in range(6)]
    answers = [await cluster.ask(each, max_tokens=200) for each in prompts]
    for answer in answers:
        await answer.has(3)
    owners = {request_id: placed["decode"] for request_id, placed in (await cluster.placements()).items()}
    assert set(owners.values()) == {SMALL, LARGE}
    await cluster.kill(SMALL)
    for each, answer in zip(prompts, answers, strict=True):
        await answer.over()
        assert answer.context.error is None
        assert (len(answer.tokens), answer.reason) == (200, LENGTH)
        assert answer.tokens == await cluster.local(each, max_tokens=200), "no token lost, repeated or changed"
    await cluster.settle(dead=[SMALL])
    closed = (await cluster.manager.status())["sessions"]["closed"]
    assert closed["lost"] == sum(owner == SMALL for owner in owners.values())


@pytest.mark.slow
async def test_a_draining_replica_gets_nothing_new_and_what_outlives_its_time_goes_on_elsewhere(
    cluster: InProcess,
) -> None:
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=400)).has(3)
    leaving = (await cluster.placed(answer))["decode"]

    async def no() -> bool:
        return False

    draining = asyncio.create_task(drain(cluster.replicas[leaving], 0.4, no, ReplicaTimings(look_s=0.002)))

    async def is_known() -> bool:
        replicas = (await cluster.manager.status())["replicas"]
        return bool(replicas[leaving]["phase"] == "draining")

    await until(is_known)
    others = [await cluster.ask(prompt(9), max_tokens=4) for _ in range(6)]
    for other in others:
        await other.over()
    await answer.over()
    await draining
    assert answer.context.error is None
    assert answer.tokens == await cluster.local(asked, max_tokens=400)
    placed = [task.session_id for pool in cluster.pools.values() for task in pool.tasks if task.replica_id == leaving]
    assert placed == [answer.request_id] * 2, "its answer, and what it hands over of it"
    assert cluster.replicas[leaving].open_runs == 0
    await cluster.settle(dead=[leaving])
    assert cluster.engines[leaving].used_blocks == 0


async def test_a_session_asks_the_next_manager_when_one_leaves(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, original = list[str](), cluster.manager.open

    async def leaving(request: SessionRequest) -> Admit | Reject:
        if len(refused) < 2:
            refused.append(request.session_id)
            return Reject("ask again", 0.01, unavailable=True, code=MANAGER_RETIRES)
        return await original(request)

    monkeypatch.setattr(cluster.manager, "open", leaving)
    answer = await cluster.answer(prompt(20), max_tokens=4)
    assert refused == [answer.request_id] * 2
    assert answer.reason is LENGTH
    await cluster.settle()


async def test_an_ingress_whose_time_is_over_ends_its_sessions_with_an_error(cluster: InProcess) -> None:
    answer = await (await cluster.ask(prompt(20), max_tokens=400)).has(3)
    cluster.core.end_all(Unavailable("this server is being stopped"))
    await answer.over()
    assert_failed(answer, Unavailable)
    await cluster.settle()


async def test_where_all_leave_nobody_waits_for_a_place_and_what_runs_goes_on(launch: Launch) -> None:
    cluster = await launch(config(ONE_SEAT))
    asked = [prompt(8 + number) for number in range(4)]
    whole = [await cluster.local(each, max_tokens=60) for each in asked[:2]]
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.clear()
    run = [await cluster.ask(each, max_tokens=60) for each in asked[:2]]
    for answer in run:
        await cluster.placed(answer)
    waits = await cluster.ask(asked[2], max_tokens=5)
    await cluster.queued(1)
    cluster.core.refuse(Unavailable("this server is being stopped"))
    late = await cluster.ask(asked[3], max_tokens=5)
    for answer in (waits, late):
        await answer.over()
        assert_failed(answer, Unavailable)
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.set()
    for answer in run:
        await answer.over()
    assert [answer.tokens for answer in run] == whole
    await cluster.settle()


async def test_an_answer_that_loses_its_replica_where_all_leave_ends_at_once(cluster: InProcess) -> None:
    answer = await (await cluster.ask(prompt(20), max_tokens=400)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    cluster.core.refuse(Unavailable("this server is being stopped"))
    await cluster.kill(owner)
    await answer.over()
    assert_failed(answer, Unavailable)
    await cluster.settle(dead=[owner])


async def test_one_death_after_the_other(cluster: InProcess) -> None:
    """Decode, then the other decode, and the prefill replica ends what is left by itself."""
    asked = prompt(20)
    whole = await cluster.local(asked, max_tokens=200)
    answer = await (await cluster.ask(asked, max_tokens=200)).has(5)
    for _ in range(2):
        owner = (await cluster.placed(answer))["decode"]
        await cluster.kill(owner)
        await answer.has(len(answer.tokens) + 5)
    await answer.over()
    assert answer.context.error is None
    assert answer.tokens == whole
    assert answer.context.modes == {Mode.DISAGGREGATED, Mode.PREFILL_LOCAL}
    await cluster.settle(dead=[SMALL, LARGE])


@pytest.mark.parametrize("place", [60, 75, 79])
async def test_limits_and_stops_count_what_was_answered_before(cluster: InProcess, place: int) -> None:
    asked = prompt(20)
    whole = await cluster.local(asked, max_tokens=80)
    limits = {"max_tokens": 80, "min_tokens": place, "stop_token_ids": [whole[place]]}
    expected = await cluster.local(asked, **limits)
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.clear()
    answer = await (await cluster.ask(asked, **limits)).has(1)
    owner = (await cluster.placed(answer))["decode"]
    cluster.engines[owner].go.set()
    await answer.has(2)
    await cluster.kill(owner)
    assert answer.reason is None
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.set()
    await answer.over()
    assert (answer.tokens, answer.context.error) == (expected, None)
    await cluster.settle(dead=[owner])


async def test_a_seeded_answer_goes_on_elsewhere(cluster: InProcess) -> None:
    asked, sampling = prompt(20), {"temperature": 1.0, "seed": 3}
    whole = await cluster.local(asked, max_tokens=200, **sampling)
    answer = await (await cluster.ask(asked, max_tokens=200, **sampling)).has(5)
    owner = (await cluster.placed(answer))["decode"]
    await cluster.kill(owner)
    await answer.over()
    assert (answer.tokens, answer.context.error) == (whole, None)
    assert whole != await cluster.local(asked, max_tokens=200)
    assert answer.context.seed_moved
    await cluster.settle(dead=[owner])


async def test_an_answer_that_cannot_go_on_elsewhere_ends_with_an_error(cluster: InProcess) -> None:
    sampling, rule = {"thinking_token_budget": 9}, "stateful_logits"
    answer = await (await cluster.ask(prompt(20), max_tokens=200, **sampling)).has(5)
    owner = (await cluster.placed(answer))["decode"]
    await cluster.kill(owner)
    await answer.over()
    assert_failed(answer, ReplicaLost)
    assert str(answer.context.error).endswith(f"what was answered so far cannot go on elsewhere ({rule})")
    assert 5 <= len(answer.tokens) < 200
    again = await cluster.answer(prompt(20), max_tokens=10, **sampling)
    assert again.reason is LENGTH, "nothing had been answered yet, so it can be placed anywhere"
    await cluster.settle(dead=[owner])


async def test_attempts_are_bounded(launch: Launch) -> None:
    cluster = await launch(config(max_attempts=3))
    gone = dict(cluster.replicas)
    cluster.replicas.clear()
    for pool in cluster.pools.values():
        pool.tasks.clear()
    answer = cluster.ask(prompt(40), max_tokens=5)
    first = await answer

    async def reporting() -> bool:  # the manager hears that they are lost, and then from them again
        return first.reason is not None

    await until(reporting)
    assert_failed(first, ReplicaLost)
    assert str(first.context.error).endswith(", and so in each of 3 placements")
    epochs = {task.epoch for pool in cluster.pools.values() for task in pool.tasks}
    assert epochs == {1, 2, 3}
    cluster.replicas.update(gone)
    await cluster.settle()


async def test_a_placement_that_gave_tokens_begins_the_count_anew(launch: Launch) -> None:
    """Four decode replicas in a row die under one answer, of which two placements in a row may come to nothing."""
    cluster = await launch(config(max_attempts=2))
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=300)).has(3)
    for life in range(4):
        owner = (await cluster.placed(answer))["decode"]
        await cluster.kill(owner)
        await cluster.bury(owner)
        await cluster.start(f"{owner.rpartition('-')[0]}-life{life}")
        await answer.has(len(answer.tokens) + 3)
    await answer.over()
    assert answer.tokens == await cluster.local(asked, max_tokens=300)
    await cluster.settle()


async def test_placements_of_one_session_are_bounded_whatever_they_give(launch: Launch) -> None:
    cluster = await launch(config(), limits=Limits(placements=2))
    answer = await (await cluster.ask(prompt(20), max_tokens=300)).has(3)
    killed = []
    for _ in range(2):
        killed.append((await cluster.placed(answer))["decode"])
        await cluster.kill(killed[-1])
        if len(killed) < 2:
            await answer.has(len(answer.tokens) + 3)
    await answer.over()
    assert_failed(answer, ReplicaLost)
    assert str(answer.context.error).endswith(", the last of 2 placements")
    await cluster.settle(dead=killed)


async def test_a_lost_session_waits_for_the_retry_budget(cluster: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, original = list[int](), cluster.manager.open

    async def without_budget(request: SessionRequest) -> Admit | Reject:
        if request.attempt > 1 and len(refused) < 3:
            refused.append(request.attempt)
            return Reject("no budget", 0.01, unavailable=True, code=RETRY_BUDGET)
        return await original(request)

    monkeypatch.setattr(cluster.manager, "open", without_budget)
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=200)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    await cluster.kill(owner)
    await answer.over()
    assert refused == [2, 2, 2], "waiting for budget is no placement"
    assert answer.tokens == await cluster.local(asked, max_tokens=200)
    await cluster.settle(dead=[owner])


async def test_a_retry_budget_that_never_comes_ends_the_session(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await launch(config(), timings=Timings(budget_wait_s=0.05))
    original: Callable[[SessionRequest], Awaitable[Admit | Reject]] = cluster.manager.open

    async def without_budget(request: SessionRequest) -> Admit | Reject:
        if request.attempt > 1:
            return Reject("no budget", 0.01, unavailable=True, code=RETRY_BUDGET)
        return await original(request)

    monkeypatch.setattr(cluster.manager, "open", without_budget)
    answer = await (await cluster.ask(prompt(20), max_tokens=200)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    await cluster.kill(owner)
    await answer.over()
    assert_failed(answer, Unavailable)
    await cluster.settle(dead=[owner])


async def test_aborting_between_two_placements(cluster: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client goes while its session waits for its second place."""
    opened, original, gate = list[int](), cluster.manager.open, asyncio.Event()

    async def slow(request: SessionRequest) -> Admit | Reject:
        opened.append(request.attempt)
        if request.attempt > 1:
            await gate.wait()
        return await original(request)

    monkeypatch.setattr(cluster.manager, "open", slow)
    answer = await (await cluster.ask(prompt(20), max_tokens=300)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    await cluster.kill(owner)

    async def waits() -> bool:
        return opened == [1, 2]

    await until(waits)
    await cluster.core.abort_requests_async([answer.request_id])
    await cluster.closed()
    gate.set()
    await cluster.settle(dead=[owner])
    assert answer.reason is None


async def test_an_engine_that_hangs_is_given_up_and_its_sessions_move(launch: Launch) -> None:
    cluster = await launch(config(hang_timeout_s=1.0))
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=100)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    engine = cluster.engines[owner]
    engine.is_deaf = True
    engine.go.clear()
    await answer.over()
    assert answer.context.error is None
    with pytest.raises(EngineError, match="has not moved for 1 s"):
        cluster.replicas[owner].check_health()
    engine.is_deaf = False
    engine.go.set()
    assert answer.tokens == await cluster.local(asked, max_tokens=100)
    await cluster.settle(dead=[owner])


async def test_an_engine_that_only_waits_is_not_given_up(launch: Launch) -> None:
    """Its KV is late: it makes no step, but it answers."""
    cluster = await launch(config(hang_timeout_s=0.7))
    cluster.planes[PREFILL].shut = True
    asked = prompt(100)
    answer = await (await cluster.ask(asked, max_tokens=5)).has(1)
    await asyncio.sleep(2.1)
    cluster.planes[PREFILL].shut = False
    await answer.over()
    assert answer.tokens == await cluster.local(asked, max_tokens=5)
    assert answer.context.modes == {Mode.DISAGGREGATED}
    await cluster.settle()


@pytest.mark.slow
async def test_a_replica_that_is_heard_of_no_more_loses_its_sessions(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is stopped, say: it does not die, it does not report, and its calls never end."""
    timings = Timings(quiet_s=0.05, watch_s=0.05, silent_times=30)
    cluster = await launch(config(snapshot_stale_s=1.5), timings=timings)
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=100)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    unheard = functools.partial(_unheard, owner, cluster.manager.report)
    monkeypatch.setattr(cluster.manager, "report", unheard)
    cluster.engines[owner].go.clear()
    await answer.over()
    assert answer.context.error is None
    cluster.engines[owner].go.set()
    assert answer.tokens == await cluster.local(asked, max_tokens=100)
    await cluster.settle(dead=[owner])


async def _unheard(replica_id: str, report: Any, snapshot: ReplicaSnapshot) -> ReportAnswer:
    if snapshot.replica_id == replica_id:
        return ReportAnswer()
    answer: ReportAnswer = await report(snapshot)
    return answer


async def test_what_an_older_placement_still_says_is_not_heard(cluster: InProcess) -> None:
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=100)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    await cluster.kill(owner)
    await answer.has(len(answer.tokens) + 3)
    with zmq.Context() as context:
        socket = context.socket(zmq.PUSH)
        socket.connect(cluster.pools["prefill"].tasks[0].reply_to)
        for _ in range(5):
            socket.send_multipart([owner.encode(), forged(answer.request_id, finish_reason=STOP)])
        socket.close()
    await answer.over()
    assert answer.tokens == await cluster.local(asked, max_tokens=100)
    await cluster.settle(dead=[owner])


async def test_nothing_is_placed_on_a_replica_whose_engine_has_died(cluster: InProcess) -> None:
    await cluster.kill(SMALL)

    async def is_known() -> bool:
        return not (await cluster.manager.ready())["pools"]["decode-small"]["ready"]

    await until(is_known)
    for _ in range(8):
        answer = await cluster.answer(prompt(8), max_tokens=3)
        assert (answer.reason, answer.context.modes) == (LENGTH, {Mode.DISAGGREGATED})
    await cluster.settle(dead=[SMALL])


async def test_one_role_after_the_other_dies(launch: Launch) -> None:
    cluster = await launch(config(queue_timeout_s=0.2))
    asked = prompt(30)
    expected = await cluster.local(asked, max_tokens=6)

    async def served(mode: Mode) -> bool:
        answer = await cluster.answer(asked, max_tokens=6)
        assert answer.reason is ERROR or answer.tokens == expected
        return bool(answer.context.modes == {mode})

    await cluster.kill(PREFILL)
    await until(lambda: served(Mode.DECODE_LOCAL))
    await cluster.settle(dead=[PREFILL])
    for replica_id in (SMALL, LARGE):
        await cluster.kill(replica_id)

    async def unavailable() -> bool:
        return type((await cluster.answer(asked, max_tokens=6)).context.error) is Unavailable

    await until(unavailable)
    await cluster.settle(dead=REPLICAS)


async def test_a_prefill_engine_that_dies_before_the_first_token(cluster: InProcess) -> None:
    cluster.engines[PREFILL].go.clear()
    asked = prompt(100)
    answer = await cluster.ask(asked, max_tokens=5)
    await cluster.stopped(PREFILL)
    await cluster.kill(PREFILL)
    await answer.over()
    assert answer.context.error is None
    assert answer.context.modes == {Mode.DISAGGREGATED, Mode.DECODE_LOCAL}
    assert answer.tokens == await cluster.local(asked, max_tokens=5)
    await cluster.settle(dead=[PREFILL])


async def test_a_prefill_engine_that_dies_in_the_midst_of_the_handoff(cluster: InProcess) -> None:
    """The client has the first token; the KV never arrives."""
    local = await cluster.ask(prompt(10), max_tokens=300, prompt_logprobs=0)
    await local.has(1)
    cluster.planes[PREFILL].shut = True
    asked = prompt(100)
    answer = await (await cluster.ask(asked, max_tokens=5)).has(1)
    cluster.planes[PREFILL].broken = True
    await cluster.kill(PREFILL)
    await answer.over()
    assert answer.context.error is None
    assert answer.tokens == await cluster.local(asked, max_tokens=5)
    assert (await local.over()).reason is LENGTH
    assert len(local.tokens) == 300
    await cluster.settle(dead=[PREFILL])


async def test_writes_that_fail_fail_the_placement_and_not_the_replica(launch: Launch) -> None:
    cluster = await launch(config(max_attempts=2))
    cluster.planes[PREFILL].broken = True
    failed = await cluster.answer(prompt(40), max_tokens=5)
    assert_failed(failed, HandoffFailed)
    assert len(failed.tokens) <= 2, "a first token from each placement's prefill, where it came before the failure"
    cluster.planes[PREFILL].broken = False
    assert (await cluster.answer(prompt(40), max_tokens=5)).reason is LENGTH
    await cluster.settle()


async def test_a_replica_that_is_not_there(cluster: InProcess) -> None:
    """Serve has lost it, and the session manager has not heard of it yet."""
    gone = {replica_id: cluster.replicas.pop(replica_id) for replica_id in (SMALL,)}
    asked = [prompt(40) for _ in range(6)]
    answers = [await cluster.ask(each, max_tokens=5) for each in asked]
    for answer in answers:
        await answer.over()
        assert answer.context.error is None
    cluster.replicas.update(gone)
    for each, answer in zip(asked, answers, strict=True):
        assert answer.tokens == await cluster.local(each, max_tokens=5)
    await cluster.settle()


@pytest.mark.parametrize("where", [PREFILL, "decode"])
async def test_a_session_that_takes_too_long(launch: Launch, where: str) -> None:
    cluster = await launch(config(session_timeout_s=0.3))
    stuck = [PREFILL] if where == PREFILL else [SMALL, LARGE]
    for replica_id in stuck:
        cluster.engines[replica_id].go.clear()
    answer = await cluster.answer(prompt(40), max_tokens=5)
    assert_failed(answer, SessionTimeout)
    assert len(answer.tokens) == (where != PREFILL)
    await cluster.closed()
    for replica_id in stuck:
        cluster.engines[replica_id].go.set()
    await cluster.settle()


async def test_a_session_that_waits_too_long_for_its_place(launch: Launch) -> None:
    cluster = await launch(config(session_timeout_s=0.1), [])
    assert_failed(await cluster.answer(prompt(40), max_tokens=5), SessionTimeout)
    await cluster.settle()


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_outputs_that_never_arrive(launch: Launch, pool: str) -> None:
    cluster = await launch(config(max_attempts=1), timings=Timings(output_grace_s=0.05))
    lost = [port for name, port in cluster.pools.items() if name.startswith(pool)]
    elsewhere = zmq.Context()
    inbox = elsewhere.socket(zmq.PULL)
    address = f"tcp://127.0.0.1:{inbox.bind_to_random_port('tcp://127.0.0.1')}"
    for port in lost:
        port.reply_to = address
    answer = await cluster.answer(prompt(20), max_tokens=5)
    assert_failed(answer, ReplicaLost)
    assert str(answer.context.error) == "the last outputs did not arrive"
    assert len(answer.tokens) == (pool == "decode")
    for port in lost:
        port.reply_to = None
    elsewhere.destroy(0)
    assert (await cluster.answer(prompt(20), max_tokens=5)).reason is LENGTH
    await cluster.settle()


async def test_the_ingress_shuts_down_with_sessions_open(launch: Launch) -> None:
    """The replicas hear of it and give everything back."""
    cluster = await launch(config())
    answers = [await cluster.ask(prompt(8), max_tokens=400) for _ in range(3)]
    for answer in answers:
        await answer.has(2)
    cluster.core.shutdown()
    await cluster.settle()


async def test_the_ingress_dies_with_sessions_open(launch: Launch) -> None:
    """Nobody tells the replicas or the manager anything."""
    cluster = await launch(config(ingress_lease_s=2.0))
    answers = [await cluster.ask(prompt(8), max_tokens=400) for _ in range(3)]
    for answer in answers:
        await answer.has(2)
    cluster.end_ingress()
    await cluster.settle()
    assert (await cluster.manager.status())["sessions"]["closed"] == {"orphaned": 3}


# ---- what else arrives at the ingress


def forged(request_id: str, **fields: Any) -> bytes:
    outputs = [EngineCoreOutput(request_id, [1, 2, 3], **fields)]
    return msgspec.msgpack.encode(EngineCoreOutputs(outputs=outputs))


GARBAGE: dict[str, list[bytes]] = {
    "only a name": [b"decode-small-0"],
    "nothing": [b"", b""],
    "a name that is no text": [b"\xff\xfe", b"\x00"],
    "no msgpack": [b"decode-small-0", b"\xc1\xc1"],
    "another message": [b"decode-small-0", msgspec.msgpack.encode({"outputs": "all of them"})],
    "cut off": [b"decode-small-0", forged("request-0")[:-1]],
    "an unknown extension": [b"d", forged("x", kv_transfer_params={"a": msgspec.msgpack.Ext(99, b"x")})],
    "a pickle": [b"d", forged("x", kv_transfer_params={"a": msgspec.msgpack.Ext(1, b"x")})],
    "a tensor of no known type": [
        b"d",
        msgspec.msgpack.encode([0, [["x", [1], None, [["rubbish", [1], b"x"]] * 3 + [None]]]]),
    ],
    "a tensor that is not there": [
        b"d",
        msgspec.msgpack.encode([0, [["x", [1], None, [["int64", [1], 77]] * 3 + [None]]]]),
    ],
    "a finish reason that does not exist": [
        b"d",
        msgspec.msgpack.encode([0, [["request-0", [1], None, None, None, 77]]]),
    ],
}
HARMLESS: dict[str, list[bytes]] = {
    "an unknown request": [b"decode-small-0", forged("nobody", finish_reason=STOP)],
    "another replica's request": [b"stranger", forged("request-0", finish_reason=STOP)],
}


async def test_garbage_is_dropped_and_harmless(cluster: InProcess, caplog: pytest.LogCaptureFixture) -> None:
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=200)).has(2)
    noise = random.Random(1)
    with caplog.at_level(logging.WARNING, "baton.core"), zmq.Context() as context:
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(cluster.pools["prefill"].tasks[0].reply_to)
        rubbish = [*GARBAGE.values(), *([b"d", b"\xc1" + noise.randbytes(n)] for n in range(20))]
        for frames in [*HARMLESS.values(), *rubbish]:
            socket.send_multipart(frames)

        async def all_were_dropped() -> bool:
            return Counter(record.msg[:17] for record in caplog.records)["dropped a message"] >= len(rubbish)

        await until(all_were_dropped)
        socket.close(0)
    await answer.over()
    assert answer.tokens == await cluster.local(asked, max_tokens=200)
    assert answer.context.error is None
    await cluster.settle()


@pytest.mark.parametrize("name", GARBAGE)
async def test_each_kind_of_garbage_alone(cluster: InProcess, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """In a burst one kind could hide behind another."""
    first = await cluster.answer(prompt(5), max_tokens=2)
    with caplog.at_level(logging.WARNING, "baton.core"), zmq.Context() as context:
        socket = context.socket(zmq.PUSH)
        socket.connect(cluster.pools["prefill"].tasks[0].reply_to)
        socket.send_multipart(GARBAGE[name])

        async def was_dropped() -> bool:
            return any("dropped a message" in record.message for record in caplog.records)

        await until(was_dropped)
        socket.close(0)
    assert (await cluster.answer(prompt(5), max_tokens=2)).reason is first.reason is LENGTH
    await cluster.settle()
