"""The sketch counts at least what was used, in bounded memory, and forgets."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from transfer.store.admission import FrequencySketch

KEYS = st.binary(min_size=32, max_size=32)


@given(st.lists(st.integers(0, 9), max_size=60))
def test_no_key_is_counted_too_few_times_before_aging(uses: list[int]) -> None:
    sketch = FrequencySketch(100)
    for key in uses:
        sketch.use(key.to_bytes(32, "little"))
    for key, count in Counter(uses).items():
        assert sketch.estimate(key.to_bytes(32, "little")) >= count


@given(st.sets(KEYS, max_size=50), KEYS)
def test_a_key_that_comes_often_is_ahead_of_many_that_come_once(once: set[bytes], often: bytes) -> None:
    sketch = FrequencySketch(1000)
    for key in once - {often}:
        sketch.use(key)
    for _ in range(20):
        sketch.use(often)
    assert all(sketch.estimate(key) < sketch.estimate(often) for key in once - {often})


def test_old_uses_count_less_and_less() -> None:
    sketch, key = FrequencySketch(8), b"old"
    for _ in range(40):
        sketch.use(key)
    before = sketch.estimate(key)
    assert before >= 40
    for number in range(64 * 10):
        sketch.use(number.to_bytes(32, "little"))
    assert sketch.estimate(key) < before / 4


def test_a_count_has_a_bound() -> None:
    sketch = FrequencySketch(1000)
    for _ in range(5000):
        sketch.use(b"one")
    assert 250 <= sketch.estimate(b"one") <= 256
