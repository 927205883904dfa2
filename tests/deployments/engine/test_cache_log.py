"""A reader that applies every change in order knows what is cached."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine.cache_log import CacheLog
from deployments.messages import CacheChange


def test_the_first_change_is_whole_and_there_is_none_without_news() -> None:
    log = CacheLog()
    assert log.change() == CacheChange(1, whole=True)
    assert log.change() is None
    log.stored([1, 2])
    assert log.change() == CacheChange(2, stored=(1, 2))
    log.stored([2])
    log.removed([9])
    assert log.change() is None
    log.removed([1])
    assert log.change() == CacheChange(3, removed=(1,))
    assert log.change(whole=True) == CacheChange(4, stored=(2,), whole=True)


def test_what_came_and_went_between_two_changes_is_not_told() -> None:
    log = CacheLog()
    log.stored([1])
    log.change()
    log.stored([2])
    log.removed([1, 2])
    log.stored([1])
    assert log.change() is None


def test_what_only_a_tier_has_is_told_until_it_is_in_memory_again_or_gone() -> None:
    log = CacheLog()
    log.stored([1, 2, 3])
    log.left([1, 2, 9])
    assert log.change() == CacheChange(1, stored=(1, 2, 3), whole=True, left=(1, 2))
    log.stored([1])
    assert log.change() == CacheChange(2, returned=(1,))
    log.left([1])
    log.stored([1])
    assert log.change() is None
    log.removed([2])
    assert log.change() == CacheChange(3, removed=(2,), returned=(2,))


operations = st.lists(
    st.tuples(st.sampled_from(["stored", "left", "removed", "clear", "change", "whole"]), st.sets(st.integers(1, 6))),
    max_size=40,
)


@settings(deadline=None)
@given(operations)
def test_a_receiver_has_what_the_log_has(todo: list[tuple[str, set[int]]]) -> None:
    log, cached, received, sequence = CacheLog(), set[int](), set[int](), 0
    tiered, received_tiered = set[int](), set[int]()
    for name, hashes in [*todo, ("change", set[int]())]:
        match name:
            case "stored":
                log.stored(hashes)
                cached |= hashes
                tiered -= hashes
            case "left":
                log.left(hashes)
                tiered |= hashes & cached
            case "removed":
                log.removed(hashes)
                cached -= hashes
                tiered -= hashes
            case "clear":
                log.clear()
                cached.clear()
                tiered.clear()
            case _:
                change = log.change(whole=name == "whole")
                assert change is not None or name == "change"
                if change is not None:
                    assert change.sequence == sequence + 1
                    sequence = change.sequence
                    kept = set() if change.whole else received - set(change.removed)
                    received = kept | set(change.stored)
                    kept = set() if change.whole else received_tiered - set(change.returned)
                    received_tiered = kept | set(change.left)
                assert (received, received_tiered) == (cached, tiered)
    assert len(log) == len(cached)
