"""The cost model of steps: from data sheets at first, then from what steps took."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.messages import StepSample
from deployments.policy.prediction.step_time import (
    DEVICES,
    UNKNOWN_DEVICE,
    ModelShape,
    Roofline,
    StepModel,
    device_named,
    roofline,
)
from deployments.step_cost import Coefficients

PRIOR = Coefficients(0.04, 0.004, 1.4e-6, 0.005, 3e-6)
LLAMA_8B = ModelShape(
    layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256, bytes_per_weight=2
)
SMOLLM_135M = ModelShape(
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49152,
    bytes_per_weight=4,
    kv_bytes_per_value=4,
)


def work(rng: random.Random) -> StepSample:
    """A step of a mixed load, of no time yet."""
    prefill = rng.randint(1, 256) if rng.random() < 0.4 else 0
    before = rng.randrange(4) * 256
    decode = rng.randint(1, 16) if not prefill or rng.random() < 0.7 else 0
    context = sum(rng.randint(50, 2000) for _ in range(decode))
    return StepSample(0.0, prefill, prefill * before + prefill * (prefill - 1) // 2, decode, context)


def seconds(true: Coefficients, step: StepSample) -> float:
    return true.step_s(step.prefill_tokens, step.prefill_context, step.decode_sequences, step.decode_context)


def timed(step: StepSample, took_s: float) -> StepSample:
    counts = step.prefill_tokens, step.prefill_context, step.decode_sequences, step.decode_context
    return StepSample(took_s, *counts)


def samples(true: Coefficients, count: int, rng: random.Random, outliers: float = 0.05) -> list[StepSample]:
    """Steps that take 5% more or less than they should, and some that take something else."""
    steps = []
    for _ in range(count):
        step = work(rng)
        took_s = seconds(true, step) * rng.gauss(1.0, 0.05)
        if rng.random() < outliers:
            took_s *= rng.choice([10.0, 30.0, 0.01])
        steps.append(timed(step, took_s))
    return steps


def typical_error(model: StepModel, true: Coefficients) -> float:
    """Nine tenths of new steps are predicted with a smaller relative error."""
    rng = random.Random(99)
    steps = [work(rng) for _ in range(300)]
    errors = sorted(abs(seconds(model.coefficients, step) / seconds(true, step) - 1.0) for step in steps)
    return errors[len(errors) * 9 // 10]


@pytest.mark.parametrize(("tokens", "cached", "chunk"), [(600, 128, 100), (40, 0, 256), (512, 512, 64)])
def test_a_prompt_adds_to_the_steps_of_others_what_it_takes_alone_but_for_the_steps(
    tokens: int, cached: int, chunk: int
) -> None:
    alone_s = added_s = 0.0
    for begin in range(min(cached, tokens - 1), tokens, chunk):
        new = min(chunk, tokens - begin)
        context = new * begin + new * (new - 1) / 2
        alone_s += PRIOR.step_s(new, context, 0, 0)
        added_s += PRIOR.step_s(new, context, 8, 4000) - PRIOR.step_s(0, 0, 8, 4000)
    assert PRIOR.prefill_s(tokens, cached, chunk) == pytest.approx(alone_s)
    assert PRIOR.beside_s(tokens, cached) == pytest.approx(added_s)
    assert added_s < alone_s


def scaled(by: tuple[float, ...]) -> Coefficients:
    return Coefficients(*(value * factor for value, factor in zip(PRIOR, by, strict=True)))


def test_before_any_step_the_prior_holds() -> None:
    assert StepModel(PRIOR).coefficients == PRIOR


@pytest.mark.parametrize(
    "by",
    [(1, 1, 1, 1, 1), (0.3, 0.2, 1, 2, 3), (3, 6, 2, 1, 1), (0.05, 0.2, 0.2, 0.2, 0.2), (20, 10, 10, 10, 10)],
)
def test_learns_what_steps_take_from_noisy_ones_with_gross_outliers(by: tuple[float, ...]) -> None:
    true, model = scaled(by), StepModel(PRIOR)
    for sample in samples(true, 1000, random.Random(1)):
        model.observe(sample)
    assert typical_error(model, true) < 0.05


def test_the_coefficients_themselves_are_found_where_the_load_tells_them_apart() -> None:
    true, model = scaled((0.5, 2.0, 2.0, 0.5, 2.0)), StepModel(PRIOR, memory=2000)
    for sample in samples(true, 3000, random.Random(2)):
        model.observe(sample)
    learned = np.array(model.coefficients) / np.array(true)
    assert learned == pytest.approx(np.ones(5), abs=0.15)


def test_a_machine_twice_as_slow_is_noticed() -> None:
    rng, model = random.Random(3), StepModel(PRIOR)
    for sample in samples(PRIOR, 1000, rng):
        model.observe(sample)
    slow = scaled((2, 2, 2, 2, 2))
    assert typical_error(model, slow) > 0.4
    for sample in samples(slow, 256, rng):
        model.observe(sample)
    assert typical_error(model, slow) < 0.1


def test_one_first_step_moves_the_prior_by_no_more_than_a_quarter() -> None:
    model = StepModel(PRIOR)
    model.observe(StepSample(500.0, prefill_tokens=256, decode_sequences=4, decode_context=2000))
    moved = np.array(model.coefficients) / np.array(PRIOR)
    assert model.coefficients != PRIOR
    assert moved.max() <= 1.25 + 1e-9
    assert moved.min() >= 0.8 - 1e-9


def test_steps_that_are_all_alike_teach_their_time_and_spoil_nothing_else() -> None:
    rng, model = random.Random(4), StepModel(PRIOR)
    for _ in range(8000):
        model.observe(StepSample(0.05 * rng.gauss(1.0, 0.05), decode_sequences=4, decode_context=2000))
    learned = model.coefficients
    assert learned.step_s(0, 0, 4, 2000) == pytest.approx(0.05, rel=0.05)
    assert learned.prefill_token_s == pytest.approx(PRIOR.prefill_token_s, rel=0.3)
    assert learned.step_s(0, 0, 8, 4000) < 0.2


@pytest.mark.parametrize("seats", [32, 0])
def test_a_step_with_all_seats_taken_takes_what_so_many_prompt_tokens_take_however_flat_small_steps_are(
    seats: int,
) -> None:
    """Reading the weights takes 40 ms, in which up to 15 tokens are computed, and each further one takes 2.7 ms."""
    rng, model = random.Random(6), StepModel(PRIOR, seats=seats)
    for _ in range(400):
        sequences = rng.randint(1, 4)
        model.observe(StepSample(0.04, decode_sequences=sequences, decode_context=200 * sequences))
        tokens = rng.randint(50, 200)
        model.observe(StepSample(0.0027 * tokens, prefill_tokens=tokens, prefill_context=0))
    learned = model.coefficients
    assert learned.step_s(0, 0, 3, 600) == pytest.approx(0.04, rel=0.1)
    assert (learned.step_s(0, 0, 32, 0) > 0.95 * 32 * learned.prefill_token_s) is bool(seats)


def test_what_the_prior_says_of_prompts_bounds_no_step() -> None:
    """A strict decode pool computes no prompts. On an unknown device its prior may be several times too slow."""
    true, rng = scaled((0.25, 0.1, 0.1, 0.1, 0.25)), random.Random(7)
    learned = {seats: StepModel(PRIOR, seats=seats) for seats in (0, 64)}
    for _ in range(400):
        sequences = rng.randint(8, 64)
        step = StepSample(0.0, decode_sequences=sequences, decode_context=rng.randint(100, 400) * sequences)
        for model in learned.values():
            model.observe(timed(step, seconds(true, step)))
    assert learned[64].coefficients == learned[0].coefficients
    prompt = StepSample(0.0, prefill_tokens=200, prefill_context=0)
    for _ in range(64):
        learned[64].observe(timed(prompt, seconds(true, prompt)))
    assert learned[64].coefficients.prefill_token_s < 0.2 * PRIOR.prefill_token_s
    assert learned[64].coefficients.step_s(0, 0, 64, 0) > 0.95 * 64 * learned[64].coefficients.prefill_token_s


def test_what_one_kind_of_step_taught_outlasts_a_long_time_of_another() -> None:
    true, rng, model = scaled((1, 3, 1, 1, 1)), random.Random(5), StepModel(PRIOR)
    for sample in samples(true, 1000, rng):
        model.observe(sample)
    for _ in range(3000):
        step = StepSample(0.0, decode_sequences=rng.randint(1, 16), decode_context=rng.randint(100, 9000))
        model.observe(timed(step, seconds(true, step) * rng.gauss(1.0, 0.05)))
    assert model.coefficients.prefill_token_s == pytest.approx(true.prefill_token_s, rel=0.25)


@pytest.mark.parametrize(
    "sample",
    [
        StepSample(0.0, prefill_tokens=10),
        StepSample(-1.0, prefill_tokens=10),
        StepSample(math.nan, prefill_tokens=10),
        StepSample(math.inf, prefill_tokens=10),
        StepSample(10_000.0, prefill_tokens=10),
        StepSample(0.1),
        StepSample(0.1, prefill_tokens=10, decode_context=-1),
    ],
)
def test_a_step_that_cannot_have_been_teaches_nothing(sample: StepSample) -> None:
    model = StepModel(PRIOR)
    model.observe(sample)
    assert (model.coefficients, model.count) == (PRIOR, 0)


ANY_STEP = st.builds(
    StepSample,
    st.floats(1e-6, 600.0),
    st.integers(0, 100_000),
    st.integers(0, 10**10),
    st.integers(0, 1000),
    st.integers(0, 10**8),
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(ANY_STEP, max_size=200), st.sampled_from([PRIOR, Coefficients(0, 0, 0, 0, 0), PRIOR._replace(base_s=0)])
)
def test_no_steps_make_a_coefficient_negative_or_unbounded(steps: list[StepSample], prior: Coefficients) -> None:
    model = StepModel(prior)
    for step in steps:
        model.observe(step)
    assert all(math.isfinite(value) and value >= 0.0 for value in model.coefficients)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 1500), st.integers(0, 2000), st.integers(1, 700))
def test_a_prompts_time_is_that_of_its_chunks(tokens: int, cached: int, chunk: int) -> None:
    expected, at = 0.0, min(cached, tokens - 1)
    while at < tokens:
        count = min(chunk, tokens - at)
        expected += PRIOR.step_s(count, sum(range(at, at + count)), 0, 0)
        at += count
    assert PRIOR.prefill_s(tokens, cached, chunk) == pytest.approx(expected)


def test_many_replicas_are_judged_by_one_product() -> None:
    step = 100, 5000, 8, 9000
    both = np.array([PRIOR, scaled((2, 2, 2, 2, 2))]) @ np.array((1, *step))
    assert both == pytest.approx([PRIOR.step_s(*step), 2 * PRIOR.step_s(*step)])


def test_a_roofline_counts_a_models_weights_and_its_cache() -> None:
    line = roofline(LLAMA_8B, "NVIDIA H100 80GB HBM3")
    assert line.flops_per_token / 2 + line.head_flops / 2 == pytest.approx(7.5e9, rel=0.01)  # 8.03e9 less the embedding
    assert line.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert line.kv_bytes_per_token == 128 * 1024


def test_two_devices_halve_what_is_shared_and_not_the_overhead() -> None:
    one, two = (roofline(LLAMA_8B, "H200", workers=n).coefficients() for n in (1, 2))
    overhead_s = DEVICES["h200"].overhead_s
    assert two.prefill_token_s == pytest.approx(one.prefill_token_s / 2)
    assert two.base_s - overhead_s == pytest.approx((one.base_s - overhead_s) / 2)


def test_devices_are_ordered_as_their_data_sheets_are() -> None:
    h100, h200, unknown = (roofline(LLAMA_8B, name).coefficients() for name in ("H100", "NVIDIA H200", "Abacus 9000"))
    assert h200.prefill_token_s == h100.prefill_token_s
    assert h200.base_s < h100.base_s < unknown.base_s
    assert h200.context_s < h100.context_s < unknown.context_s
    assert device_named("Abacus 9000") is UNKNOWN_DEVICE


def test_a_cpu_core_starts_within_what_was_measured() -> None:
    """SmolLM2-135M in float32 on one core: 135 to 220 prompt tokens a second, steps of 20 to 60 ms."""
    core = roofline(SMOLLM_135M, "cpu").coefficients()
    assert 135 < 1000 / core.prefill_s(1000, 0, 256) < 220
    assert 0.02 < core.step_s(0, 0, 1, 300) < 0.06


def test_reading_and_computing_are_added() -> None:
    line = Roofline(
        flops_per_s=1e12,
        bytes_per_s=1e9,
        overhead_s=0.001,
        weight_bytes=1e7,
        flops_per_token=2e9,
        attention_flops_per_token_pair=1e6,
        kv_bytes_per_token=1e3,
        head_flops=1e9,
    )
    assert tuple(line.coefficients()) == pytest.approx((0.011, 0.002, 1e-6, 0.003, 1e-6))
