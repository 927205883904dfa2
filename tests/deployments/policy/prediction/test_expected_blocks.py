"""Expected blocks: they end by time, by the replica's word, or when there are too many."""

from __future__ import annotations

from deployments.policy.prediction.expected_blocks import ExpectedBlocks


def test_a_prompt_is_expected_on_its_replicas_until_it_was_computed_and_its_time_is_over() -> None:
    expected = ExpectedBlocks(10.0, 100)
    number = expected.add([1, 2], [7, 8])
    assert len(expected) == 4
    assert set(expected.of(7) or ()) == {1, 2}
    expected.expire(99.0)
    expected.computed(number, 100.0)
    expected.computed(number, 105.0)
    expected.expire(109.0)
    assert expected.concerns(1)
    expected.expire(110.0)
    assert (len(expected), expected.of(7), expected.concerns(1)) == (0, None, False)


def test_a_later_prompt_extends_what_an_earlier_one_began() -> None:
    expected = ExpectedBlocks(10.0, 100)
    first = expected.add([1], [7, 8])
    expected.add([1, 3], [7])
    expected.computed(first, 0.0)
    expected.expire(10.0)
    assert set(expected.of(7) or ()) == {1, 3}
    assert expected.of(8) is None


def test_what_a_replica_has_reported_is_not_expected_of_it_any_more() -> None:
    expected = ExpectedBlocks(10.0, 100)
    expected.add([1, 2], [7, 8])
    expected.told(1, [7, 8, 9])
    expected.told(2, [8])
    assert set(expected.of(7) or ()) == {2}
    assert expected.of(8) is None


def test_the_oldest_prompt_is_forgotten_when_too_many_blocks_are_expected() -> None:
    expected = ExpectedBlocks(10.0, 3)
    first = expected.add([1], [7, 8])
    second = expected.add([1], [17, 18])
    assert (expected.of(7), len(expected)) == (None, 2)
    expected.computed(first, 0.0)
    expected.computed(second, 1.0)
    expected.expire(11.0)
    assert not expected.concerns(1)
