"""The prefix index against a naive one, and what its callers rely on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.messages import CacheChange
from deployments.policy.prediction.prefix_index import PrefixIndex
from transfer.memory.blocks import chained_hashes

PROMPT = chained_hashes(range(1000), 100)
EXPECTATION_S = 10.0


def up(*replica_ids: str, max_blocks: int = 4_000_000) -> PrefixIndex:
    index = PrefixIndex(max_blocks, EXPECTATION_S)
    for replica_id in replica_ids:
        assert index.apply(replica_id, CacheChange(1, whole=True), 0.0)
    return index


def test_hits_are_the_leading_blocks_of_each_replica() -> None:
    index = up("a", "b", "c")
    index.apply("a", CacheChange(2, stored=PROMPT[:4]), 0.0)
    index.apply("b", CacheChange(2, stored=PROMPT[:7]), 0.0)
    index.apply("c", CacheChange(2, stored=PROMPT[1:]), 0.0)
    assert index.hits(PROMPT) == {"a": 4, "b": 7}
    assert index.hits(PROMPT[:2]) == {"a": 2, "b": 2}
    assert index.hits(()) == {}
    assert index.hits(chained_hashes(range(1, 1001), 100)) == {}


def test_a_removal_in_the_middle_cuts_the_hit_and_a_new_one_mends_it() -> None:
    index = up("a", "b")
    for replica_id in "ab":
        index.apply(replica_id, CacheChange(2, stored=PROMPT), 0.0)
    index.apply("a", CacheChange(3, removed=PROMPT[3:4]), 0.0)
    assert index.hits(PROMPT) == {"a": 3, "b": 10}
    index.apply("a", CacheChange(4, stored=PROMPT[3:4]), 0.0)
    assert index.hits(PROMPT) == {"a": 10, "b": 10}


def test_after_a_gap_nothing_is_entered_until_the_whole_comes() -> None:
    index = up("a")
    assert index.apply("a", CacheChange(2, stored=PROMPT[:2]), 0.0)
    assert index.apply("a", CacheChange(2, removed=PROMPT[:2]), 0.0), "again"
    assert index.hits(PROMPT) == {"a": 2}
    assert not index.apply("a", CacheChange(4, stored=PROMPT), 0.0)
    assert not index.apply("a", CacheChange(5, stored=PROMPT), 0.0)
    assert not index.knows("a")
    assert index.hits(PROMPT) == {"a": 2}, "the best hint that there is"
    assert index.apply("a", CacheChange(6, stored=PROMPT[:1], whole=True), 0.0)
    assert index.knows("a")
    assert index.hits(PROMPT) == {"a": 1}
    assert index.apply("a", CacheChange(7, stored=PROMPT[1:3]), 0.0)
    assert index.hits(PROMPT) == {"a": 3}


def test_a_replica_that_was_not_heard_of_must_tell_the_whole() -> None:
    index = PrefixIndex()
    assert not index.knows("a")
    assert not index.apply("a", CacheChange(7, stored=PROMPT), 0.0)
    assert index.hits(PROMPT) == {}


def expect(index: PrefixIndex, replica_ids: Sequence[str], blocks: Sequence[int], now_s: float) -> None:
    """The prompt is placed, and computed at once."""
    index.computed(index.expect(replica_ids, blocks, now_s), now_s)


def test_an_expectation_lasts_as_long_as_its_prompt_waits_and_a_moment_longer() -> None:
    index = up("a", "b")
    number = index.expect(["a", "b"], PROMPT, 5.0)
    index.sweep(500.0)
    assert index.hits(PROMPT) == {"a": 10, "b": 10}
    index.apply("b", CacheChange(2, stored=PROMPT), 500.0)
    index.computed(number, 500.0)
    index.computed(number, 505.0)
    index.sweep(500.0 + EXPECTATION_S)
    assert index.hits(PROMPT) == {"b": 10}
    assert index.expected == 0


def test_an_expectation_counts_until_its_time_is_over() -> None:
    index = up("a", "b")
    expect(index, ["a", "b"], PROMPT, 5.0)
    assert index.hits(PROMPT) == {"a": 10, "b": 10}
    assert index.expected == 20
    index.apply("a", CacheChange(2, stored=PROMPT[:4]), 6.0)
    assert index.expected == 16
    expect(index, ["b"], PROMPT[:2], 9.0)
    index.sweep(5.0 + EXPECTATION_S)
    assert index.hits(PROMPT) == {"a": 4, "b": 2}
    index.sweep(9.0 + EXPECTATION_S)
    assert index.hits(PROMPT) == {"a": 4}
    assert (len(index), index.expected) == (4, 0)


def test_blocks_that_a_replica_is_known_to_have_are_not_expected_of_it_again() -> None:
    index = up("a", "b")
    index.apply("a", CacheChange(2, PROMPT[:4], ()), 0.0)
    index.expect(["a"], PROMPT, 0.0, known=4)
    assert index.expected == len(PROMPT) - 4
    assert index.hits(PROMPT) == {"a": len(PROMPT)}


def test_an_expectation_does_not_take_away_what_is_cached() -> None:
    index = up("a")
    index.apply("a", CacheChange(2, stored=PROMPT[:4]), 0.0)
    expect(index, ["a"], PROMPT, 0.0)
    index.sweep(EXPECTATION_S)
    assert index.hits(PROMPT) == {"a": 4}


def test_a_lost_replica_is_no_hit_and_is_cleaned_away() -> None:
    index = up("a", "b")
    for replica_id in "ab":
        index.apply(replica_id, CacheChange(2, stored=PROMPT), 0.0)
    expect(index, ["a"], (1, 2, 3), 0.0)
    index.forget("a")
    index.forget("unknown")
    assert index.hits(PROMPT) == {"b": 10}
    assert not index.knows("a")
    for _ in range(300):
        index.sweep(0.0)
    assert len(index) == 10
    index.apply("c", CacheChange(1, whole=True), 0.0)
    expect(index, ["c"], (1,), 1.0)
    index.sweep(EXPECTATION_S)
    assert index.hits((1, 2)) == {"c": 1}, "not what the lost one was expected to have"


def test_replicas_may_come_and_go_without_end() -> None:
    index = PrefixIndex(max_blocks=100)
    for number in range(70_000):
        index.apply(f"replica-{number}", CacheChange(1, stored=PROMPT[:1], whole=True), 0.0)
        index.forget(f"replica-{number}")
    index.apply("last", CacheChange(1, stored=PROMPT, whole=True), 0.0)
    assert index.hits(PROMPT) == {"last": 10}


def test_memory_is_bounded_and_the_longest_unused_goes_first() -> None:
    index = up("a", max_blocks=20)
    index.apply("a", CacheChange(2, stored=PROMPT), 0.0)
    other = chained_hashes(range(5000, 6000), 100)
    index.apply("a", CacheChange(3, stored=other), 0.0)
    index.expect(["a"], PROMPT[:5], 1.0)
    index.apply("a", CacheChange(4, stored=chained_hashes(range(7000, 7800), 100)), 2.0)
    assert len(index) == 20
    assert index.hits(PROMPT) == {"a": 5}
    assert index.hits(other) == {}


def test_of_one_prompt_the_end_is_forgotten_first() -> None:
    index = up("a", max_blocks=8)
    index.apply("a", CacheChange(2, stored=PROMPT[:6]), 0.0)
    index.expect([], PROMPT[:6], 0.0)  # a prompt that is placed
    index.apply("a", CacheChange(3, stored=(1, 2, 3, 4)), 0.0)
    assert index.hits(PROMPT) == {"a": 4}


def test_what_only_tiers_have_is_a_hit_that_is_not_resident() -> None:
    index = up("a", "b")
    for replica_id in "ab":
        index.apply(replica_id, CacheChange(2, stored=PROMPT[:6]), 0.0)
    index.apply("a", CacheChange(3, left=PROMPT[2:4]), 0.0)
    assert index.find(PROMPT) == ({"a": 6, "b": 6}, {"a": 2})
    assert index.find(PROMPT[:2]) == ({"a": 2, "b": 2}, {})
    index.apply("a", CacheChange(4, returned=PROMPT[2:3]), 0.0)
    assert index.find(PROMPT) == ({"a": 6, "b": 6}, {"a": 3})
    index.apply("a", CacheChange(5, removed=PROMPT[3:4], returned=PROMPT[3:4]), 0.0)
    assert index.find(PROMPT) == ({"a": 3, "b": 6}, {})
    index.apply("a", CacheChange(6, stored=PROMPT[:2], left=PROMPT[:2], whole=True), 0.0)
    assert index.find(PROMPT) == ({"a": 2, "b": 6}, {"a": 0})
    index.expect(["a"], PROMPT[:2], 0.0)
    assert index.find(PROMPT) == ({"a": 2, "b": 6}, {}), "a request loads them"
    index.forget("a")
    assert index.find(PROMPT) == ({"b": 6}, {})


def test_many_blocks_over_many_replicas() -> None:
    """Enough that the index uses many tables, and blocks with several holders."""
    draw = random.Random(3)
    index = up(*(f"r{n}" for n in range(40)))
    prompts = [chained_hashes([draw.randrange(1000) for _ in range(40)], 2) for _ in range(50)]
    held = {f"r{n}": draw.sample(prompts, 12) for n in range(40)}
    for replica_id, its in held.items():
        index.apply(replica_id, CacheChange(2, stored=tuple(block for prompt in its for block in prompt)), 0.0)
    for prompt in prompts:
        assert index.hits(prompt) == {name: 20 for name, its in held.items() if prompt in its}


class Naive:
    """Sets of blocks."""

    def __init__(self) -> None:
        self.cached: dict[str, set[int]] = {}
        self.expected: dict[tuple[str, int], float] = {}
        self.followed: dict[str, int] = {}

    def apply(self, replica_id: str, change: CacheChange) -> bool:
        if change.whole:
            self.forget(replica_id)
        elif replica_id not in self.followed:
            return False
        elif change.sequence <= self.followed[replica_id]:
            return True
        elif change.sequence > self.followed[replica_id] + 1:
            del self.followed[replica_id]
            return False
        self.followed[replica_id] = change.sequence
        for block in change.stored + change.removed:
            self.expected.pop((replica_id, block), None)
        self.cached[replica_id] = self.cached.get(replica_id, set()) - set(change.removed) | set(change.stored)
        return True

    def forget(self, replica_id: str) -> None:
        self.followed.pop(replica_id, None)
        self.cached.pop(replica_id, None)
        self.expected = {key: until_s for key, until_s in self.expected.items() if key[0] != replica_id}

    def expect(self, replica_ids: Sequence[str], blocks: Sequence[int], now_s: float) -> None:
        for replica_id in replica_ids:
            for block in set(blocks) - self.cached.get(replica_id, set()):
                self.expected[replica_id, block] = now_s + EXPECTATION_S

    def hits(self, blocks: Sequence[int], now_s: float) -> dict[str, int]:
        found: dict[str, int] = {}
        for replica_id in REPLICAS:
            has = self.cached.get(replica_id, set()) | {
                block for (name, block), until_s in self.expected.items() if name == replica_id and until_s > now_s
            }
            depth = next((n for n, block in enumerate(blocks) if block not in has), len(blocks))
            found |= {replica_id: depth} if depth else {}
        return found


REPLICAS = ("a", "b", "c", "d")
BLOCKS = PROMPT[:6]
Blocks = tuple[int, ...]
some_blocks = st.lists(st.sampled_from(BLOCKS), max_size=6, unique=True).map(tuple)
operations = st.one_of(
    st.tuples(st.just("change"), st.sampled_from(REPLICAS), st.integers(0, 2), some_blocks, some_blocks),
    st.tuples(st.just("whole"), st.sampled_from(REPLICAS), some_blocks),
    st.tuples(st.just("expect"), st.lists(st.sampled_from(REPLICAS), max_size=2, unique=True), some_blocks),
    st.tuples(st.just("forget"), st.sampled_from(REPLICAS)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 4.0, EXPECTATION_S])),
)


@settings(deadline=None)
@given(st.lists(operations, max_size=30))
def test_any_order_of_messages_gives_what_a_naive_index_gives(todo: list[tuple[Any, ...]]) -> None:
    index, naive, now_s, sequence = PrefixIndex(expectation_s=EXPECTATION_S), Naive(), 0.0, dict.fromkeys(REPLICAS, 0)
    for operation in todo:
        match operation:
            case "change", name, step, stored, removed:
                sequence[name] += step
                change = CacheChange(sequence[name], stored, tuple(set(removed) - set(stored)))
                assert index.apply(name, change, now_s) == naive.apply(name, change)
            case "whole", name, stored:
                sequence[name] += 1
                change = CacheChange(sequence[name], stored, whole=True)
                assert index.apply(name, change, now_s)
                assert naive.apply(name, change)
            case "expect", names, blocks:
                expect(index, names, blocks, now_s)
                naive.expect(names, blocks, now_s)
            case "forget", name:
                index.forget(name)
                naive.forget(name)
            case _, passed_s:
                now_s += passed_s
                index.sweep(now_s)
        assert index.hits(BLOCKS) == naive.hits(BLOCKS, now_s)
        assert {name for name in REPLICAS if index.knows(name)} == naive.followed.keys()


changes = st.lists(
    st.tuples(st.sampled_from(REPLICAS), st.sampled_from(["change", "whole", "forget"]), some_blocks, some_blocks),
    max_size=30,
)


@settings(deadline=None)
@given(changes)
def test_what_is_resident_is_what_a_naive_index_says(todo: list[tuple[str, str, Blocks, Blocks]]) -> None:
    index, sequence = up(*REPLICAS), dict.fromkeys(REPLICAS, 1)
    cached, tiered = ({name: set[int]() for name in REPLICAS} for _ in range(2))
    for name, kind, some, others in todo:
        sequence[name] += 1
        if kind == "change":
            here = cached[name] ^ set(some)
            away = here & set(others)
            gone = tuple(cached[name] - here), tuple(tiered[name] - away)
            come = tuple(here - cached[name]), tuple(away - tiered[name])
            index.apply(name, CacheChange(sequence[name], come[0], gone[0], False, come[1], gone[1]), 0.0)
        else:
            index.forget(name)
            here, away = set(some), set(some) & set(others)
            index.apply(name, CacheChange(sequence[name], tuple(here), (), True, tuple(away)), 0.0)
        cached[name], tiered[name] = here, away
    hits = {name: leading(cached[name]) for name in REPLICAS}
    resident = {name: leading(cached[name] - tiered[name]) for name in REPLICAS}
    found = {name: depth for name, depth in hits.items() if depth}
    assert index.find(BLOCKS) == (found, {name: resident[name] for name in found if resident[name] < hits[name]})


def leading(blocks: set[int]) -> int:
    return next((n for n, block in enumerate(BLOCKS) if block not in blocks), len(BLOCKS))
