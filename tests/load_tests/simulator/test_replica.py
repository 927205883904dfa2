"""A simulated engine: closed form equals step by step, memory is never overrun, chunks and seats are respected."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.messages import ReplicaInfo, Reservation, Role
from deployments.step_cost import Coefficients
from load_tests.simulator.replica import Replica
from load_tests.simulator.reporting import Reporter
from load_tests.simulator.steps import Limits
from load_tests.simulator.work import Work

STEPS = Coefficients(base_s=0.01, prefill_token_s=1e-4, prefill_context_s=1e-7, sequence_s=1e-4, context_s=1e-6)
QUIET = Limits(batched_tokens=32, sequences=4, noise_sigma=0.0)


def replica(blocks: int = 100, limits: Limits = QUIET, block_size: int = 8) -> Replica:
    info = ReplicaInfo("r", "p", Role.DECODE, "n", "f", block_size, blocks, limits.sequences, 4096)
    return Replica(info, STEPS, limits, random.Random(0))


@dataclass
class Played:
    """When each sequence had its first and its last token."""

    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    most_used: int = 0


def play(engine: Replica, arrivals: list[tuple[float, Work]]) -> Played:
    """Sequences arrive; an offered one's KV lands half a step later."""
    played, todo = Played(), sorted(arrivals, key=lambda arrival: arrival[0])
    landings: list[tuple[float, Work]] = []
    while todo or landings or engine.boundary_s is not None:
        at_s = min(
            engine.boundary_s if engine.boundary_s is not None else float("inf"),
            todo[0][0] if todo else float("inf"),
            landings[0][0] if landings else float("inf"),
        )
        if todo and todo[0][0] == at_s:
            engine.submit(todo.pop(0)[1], at_s)
        elif landings and landings[0][0] == at_s:
            work = landings.pop(0)[1]
            played.first[work.session_id] = at_s
            engine.land(work, at_s)
        else:
            happened = engine.boundary(at_s)
            landings += [(at_s + 0.0051, work) for work in happened.offered]
            for work in happened.first:
                played.first.setdefault(work.session_id, at_s)
            played.last |= {work.session_id: at_s for work in happened.ended}
        played.most_used = max(played.most_used, engine.memory.used)
    return played


works = st.lists(
    st.tuples(
        st.floats(0.0, 1.0).map(lambda value: round(value, 4) + 0.000037),
        st.integers(1, 90),
        st.integers(2, 40),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda value: value[0],
)


def arrivals(drawn: list[tuple[float, int, int, bool]]) -> list[tuple[float, Work]]:
    return [
        (at_s, Work(f"s{index}", 1, prompt, outputs, tuple(range(1, prompt // 8 + 1)), loads=loads))
        for index, (at_s, prompt, outputs, loads) in enumerate(drawn)
    ]


@settings(deadline=None, max_examples=60)
@given(works, st.integers(17, 60))
def test_closed_form_equals_step_by_step(drawn: list[tuple[float, int, int, bool]], blocks: int) -> None:
    whole, stepwise = replica(blocks), replica(blocks, replace(QUIET, span_steps=1))
    fast, slow = play(whole, arrivals(drawn)), play(stepwise, arrivals(drawn))
    assert fast.first == pytest.approx(slow.first)
    assert fast.last == pytest.approx(slow.last)
    assert whole.preemptions == stepwise.preemptions
    assert fast.most_used <= blocks
    assert (whole.memory.used, stepwise.memory.used) == (0, 0)
    assert len(fast.last) == len(drawn)


def test_a_lone_answer_takes_what_the_coefficients_say() -> None:
    played = play(replica(), [(0.0, Work("a", 1, 40, 3))])
    prefill_s = STEPS.prefill_s(40, 0, 32)
    assert played.first["a"] == pytest.approx(prefill_s)
    decode_s = STEPS.step_s(0, 0, 1, 40) + STEPS.step_s(0, 0, 1, 41)
    assert played.last["a"] == pytest.approx(prefill_s + decode_s)


def test_memory_that_runs_out_makes_the_newest_start_over() -> None:
    engine = replica(blocks=6)
    played = play(engine, [(0.0, Work("a", 1, 20, 20)), (0.001, Work("b", 1, 20, 20))])
    assert engine.preemptions > 0
    assert played.last["a"] < played.last["b"]
    assert played.most_used == 6
    assert engine.memory.used == 0


def test_a_prompt_beside_it_slows_a_running_answer_by_its_chunks() -> None:
    alone = play(replica(), [(0.0, Work("a", 1, 8, 30))])
    beside = play(replica(), [(0.0, Work("a", 1, 8, 30)), (0.1, Work("b", 1, 320, 2))])
    assert beside.last["a"] > alone.last["a"] + 0.02


def test_prompts_alone_take_whole_steps_one_after_the_other() -> None:
    first, later = (0.0, Work("first", 1, 90, 2)), (0.0, Work("next", 1, 95, 2))
    alone = play(replica(), [first])
    assert alone.first["first"] == pytest.approx(STEPS.prefill_s(90, 0, 32))
    both = play(replica(), [first, later])
    assert both.first["next"] > both.first["first"] == pytest.approx(alone.first["first"], rel=0.2)


def test_a_short_prompt_has_its_tokens_beside_a_long_one() -> None:
    both = play(replica(), [(0.0, Work("long", 1, 90, 2)), (0.0, Work("short", 1, 12, 2))])
    assert both.first["short"] == pytest.approx(STEPS.step_s(32, 20 * 19 / 2 + 12 * 11 / 2, 0, 0))


def test_beside_an_answer_with_an_objective_steps_are_short_and_a_long_prompt_leaves_half_of_them() -> None:
    """A quarter of each step at least goes to prompts: 34 tokens beside this answer, of 128 in a step."""
    limits = replace(QUIET, batched_tokens=128)

    def played(answer: Work) -> Played:
        later = [(0.05, Work("long", 1, 400, 2)), (0.05, Work("short", 1, 8, 2))]
        return play(replica(limits=limits), [(0.0, answer), *later])

    free, bound = played(Work("answer", 1, 8, 90)), played(Work("answer", 1, 8, 90, tpot_s=0.001))
    assert bound.first["long"] > 1.5 * free.first["long"]
    assert bound.first["short"] < bound.first["long"] / 2


def test_a_snapshot_lists_what_is_expected_with_what_it_was_promised_until_it_ends() -> None:
    engine = replica()
    work = Work("a", 1, 8, 2, reserved=Reservation(3, 2, 9, 8, 0.1))
    engine.expect(work)
    reporter = Reporter(engine)
    assert (reporter.snapshot(0.0).sessions, reporter.snapshot(0.0).reservations) == (("a",), (work.reserved,))
    engine.submit(work, 0.0)
    for _ in range(2):
        assert engine.boundary_s is not None
        engine.boundary(engine.boundary_s)
    assert reporter.snapshot(1.0).reservations == (Reservation(3, 2, 9),)
    engine.boundary(engine.boundary_s or 1.0)
    assert reporter.snapshot(1.0).sessions == ()


def test_no_more_sequences_run_than_there_are_seats() -> None:
    engine = replica()
    played = play(engine, [(0.0, Work(f"s{index}", 1, 8, 20)) for index in range(5)])
    assert played.first["s4"] > min(played.last[f"s{index}"] for index in range(4))


def test_decoding_between_boundaries_is_seen_from_outside() -> None:
    engine = replica()
    engine.submit(Work("a", 1, 8, 30), 0.0)
    for _ in range(2):
        assert engine.boundary_s is not None
        engine.boundary(engine.boundary_s)
    begun_s = STEPS.prefill_s(8, 0, 32)
    steps, blocks = engine.decoded_now(begun_s + 10.5 * STEPS.step_s(0, 0, 1, 8))
    assert steps == 10
    assert blocks == 2


def test_a_prompt_holds_its_blocks_while_a_part_of_it_comes_and_others_go_on() -> None:
    engine = replica()
    engine.bring = lambda work: work.session_id == "brings"
    brings, other = Work("brings", 1, 80, 2, tuple(range(1, 11))), Work("other", 1, 20, 2)
    engine.submit(brings, 0.0)
    engine.submit(other, 0.0)
    assert ended(engine) == ["other"]
    assert (brings.generated, other.generated) == (0, 2)
    assert (engine.memory.used, engine.backlog_tokens) == (10, 80)
    engine.brought(brings, 64, 1.0)
    assert (brings.cached_tokens, engine.backlog_tokens) == (64, 16)
    assert ended(engine) == ["brings"]
    assert engine.memory.hits(brings.hashes, 10) == 10
    assert (engine.memory.used, engine.backlog_tokens) == (0, 0)


def ended(engine: Replica) -> list[str]:
    """Run until nothing is left to compute. The sequences that ended, in order."""
    found: list[str] = []
    while engine.boundary_s is not None:
        found += [work.session_id for work in engine.boundary(engine.boundary_s).ended]
    return found
