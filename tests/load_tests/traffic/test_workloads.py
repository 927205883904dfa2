"""What is asked, and when: the same from the same seed, at the rate and in the shares that are promised."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from load_tests.simulator.traces import Trace, TraceRequest
from load_tests.traffic.client import Ask
from load_tests.traffic.workloads import CLOSED, LONG, SHORT, TOKEN_IDS, asks, bursts, mixed, poisson, replay, unlike


def token_ids(ask: Ask) -> tuple[int, ...]:
    assert isinstance(ask.prompt, tuple)
    return ask.prompt


def test_the_same_seed_asks_the_same() -> None:
    assert mixed(2.0, 20.0, 7) == mixed(2.0, 20.0, 7)
    assert mixed(2.0, 20.0, 7) != mixed(2.0, 20.0, 8)
    first, second = (list(itertools.islice(asks(CLOSED, 3), 4)) for _ in range(2))
    assert first == second
    assert len({ask.prompt for ask in first}) == 4


def test_another_attempt_asks_the_same_with_other_tokens() -> None:
    asked = mixed(2.0, 20.0, 7)
    again = unlike(asked, 1)
    assert unlike(asked, 0) == asked
    assert [(ask.at_s, len(ask.prompt), ask.kind) for ask in again] == [
        (ask.at_s, len(ask.prompt), ask.kind) for ask in asked
    ]
    assert not {ask.prompt[:16] for ask in asked} & {ask.prompt[:16] for ask in again}
    assert all(TOKEN_IDS[0] <= token < TOKEN_IDS[1] for ask in again for token in token_ids(ask))
    shared = [Ask(0.0, (*range(500, 516), tail), 4) for tail in (200, 300)]
    one, other = (ask.prompt for ask in unlike(shared, 3))
    assert one[:16] == other[:16], "what they share is in a cache, as it was"
    assert one[16] != other[16]


def test_the_mix_is_35_long_ones_in_155() -> None:
    made = mixed(1.55, 5000.0, 1)
    kinds = Counter(ask.kind for ask in made)
    assert kinds["short"] / 5000 == pytest.approx(1.2, rel=0.05)
    assert kinds["long"] / 5000 == pytest.approx(0.35, rel=0.08)


def test_requests_have_their_shape_and_order() -> None:
    made = mixed(5.0, 60.0, 1)
    shapes = {(ask.kind, len(ask.prompt), ask.output_tokens) for ask in made}
    assert shapes == {(shape.kind, shape.prompt_tokens, shape.output_tokens) for shape in (SHORT, LONG)}
    assert [ask.at_s for ask in made] == sorted(ask.at_s for ask in made)
    assert all(0 < ask.at_s < 60.0 for ask in made)
    assert len({ask.prompt[:8] for ask in made}) == len(made), "prompts share a beginning"


def test_poisson_gaps_are_exponential() -> None:
    times = poisson(4.0, 10_000.0, random.Random(1))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.02)


def test_bursts_come_in_herds_at_the_same_mean_rate() -> None:
    times = bursts(4.0, 10_000.0, random.Random(1), size=8)
    assert len(times) / 10_000 == pytest.approx(4.0, rel=0.1)
    assert set(Counter(times).values()) == {8}


def test_replay_keeps_what_prompts_share_and_leaves_out_what_does_not_fit() -> None:
    requests = (
        TraceRequest(0.0, 10, 4, (1, 2)),
        TraceRequest(1.0, 13, 5, (1, 2, 3)),
        TraceRequest(2.0, 4000, 5),
        TraceRequest(3.0, 6, 3, (9,)),
    )
    trace = Trace("made", 4, requests)
    made = replay(trace, rate=2.0, seconds=1.5, max_model_len=512, seed=1)
    assert [len(ask.prompt) for ask in made] == [10, 13, 6]
    assert [ask.output_tokens for ask in made] == [4, 5, 3]
    assert made[0].prompt[:8] == made[1].prompt[:8]
    assert made[0].prompt[8:] != made[1].prompt[8:10]
    assert made[2].prompt[:4] != made[0].prompt[:4]
    assert made[-1].at_s < 1.5
