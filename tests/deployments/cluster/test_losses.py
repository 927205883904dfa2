"""Replicas that die in the middle of a session: the answer goes on elsewhere, and stays the same."""

from __future__ import annotations

import pytest

from deployments.errors import HandoffFailed, ReplicaLost, Unavailable
from deployments.manager.calls import Drain, Ready, Status
from deployments.messages import Mode
from load_tests.harness.control_plane import LARGE, PREFILL, REPLICAS, SMALL, InProcess, config, until
from tests.deployments.cluster.asking import ERROR, LENGTH, STOP, Launch, assert_failed, forged, prompt


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
    closed = (await cluster.manager.ask(Status()))["sessions"]["closed"]
    assert closed["lost"] == sum(owner == SMALL for owner in owners.values())


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


async def test_what_an_older_placement_still_says_is_not_heard(cluster: InProcess) -> None:
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=100)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    await cluster.kill(owner)
    await answer.has(len(answer.tokens) + 3)
    cluster.core._take(owner, [forged(answer.request_id, finish_reason=STOP)])
    await answer.over()
    assert answer.tokens == await cluster.local(asked, max_tokens=100)
    await cluster.settle(dead=[owner])


async def test_nothing_is_placed_on_a_replica_whose_engine_has_died(cluster: InProcess) -> None:
    await cluster.kill(SMALL)

    async def is_known() -> bool:
        return not (await cluster.manager.ask(Ready()))["pools"]["decode-small"]["ready"]

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
    cluster = await launch(config(max_attempts=1))
    cluster.planes[PREFILL].broken = True
    failed = await cluster.answer(prompt(40), max_tokens=5)
    assert_failed(failed, HandoffFailed)
    assert len(failed.tokens) <= 1, "a first token from prefill, where it came before the failure"
    cluster.planes[PREFILL].broken = False
    assert (await cluster.answer(prompt(40), max_tokens=5)).reason is LENGTH
    await cluster.settle()


@pytest.mark.parametrize("is_strict", [False, True], ids=["of no strict pool", "strict"])
async def test_an_answer_whose_handoff_fails_is_given_by_one_replica(launch: Launch, is_strict: bool) -> None:
    """Also by a decode replica of a strict pool, where no other replica prefills."""
    made = config()
    pools = {name: pool.model_copy(update={"strict": is_strict}) for name, pool in made.decode.items()}
    cluster = await launch(made.model_copy(update={"decode": pools}))
    cluster.planes[PREFILL].broken = True
    asked = prompt(40)
    answer = await cluster.answer(asked, max_tokens=5)
    assert answer.context.error is None
    assert answer.context.modes == {Mode.DISAGGREGATED, Mode.DECODE_LOCAL}
    assert answer.tokens == await cluster.local(asked, max_tokens=5)
    await cluster.settle()


async def test_an_answer_whose_handoff_fails_gets_its_prompt_from_another_replica(launch: Launch) -> None:
    cluster = await launch(config())
    await cluster.start("prefill-1")
    await cluster.manager.ask(Drain("prefill-1"))
    cluster.planes[PREFILL].shut = True
    answer = await cluster.ask(asked := prompt(40), max_tokens=5)
    assert (await cluster.placed(answer))["prefill"] == PREFILL
    await cluster.manager.ask(Drain("prefill-1", resume=True))

    async def is_back() -> bool:
        replicas = (await cluster.manager.ask(Ready()))["pools"]["prefill"]["replicas"]
        return bool(replicas["prefill-1"]["phase"] == "ready")

    await until(is_back)
    cluster.planes[PREFILL].broken = True
    await answer.over()
    assert answer.context.error is None
    assert answer.context.modes == {Mode.DISAGGREGATED}
    assert answer.tokens == await cluster.local(asked, max_tokens=5)
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
