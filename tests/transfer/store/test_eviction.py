"""What goes first: ends of chains, what is seldom used, what is cheap to compute, the later of equal ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.store.conftest import keys_of
from transfer.store.eviction import EvictionOrder, recompute_cost
from transfer.store.refs import BlockRef, chain


def evict_all(order: EvictionOrder) -> list[bytes]:
    gone = []
    while (key := order.victim()) is not None:
        order.evict(key)
        gone.append(key)
    return gone


def test_the_cost_grows_with_the_position() -> None:
    assert recompute_cost(0) == 1
    assert recompute_cost(512, crossover_blocks=256) == 3


def test_a_chain_gets_shorter_from_its_end() -> None:
    order, keys = EvictionOrder(), keys_of("a", 5)
    for ref in chain(keys):
        order.add(ref, uses=1)
    assert evict_all(order) == keys[::-1]
    assert len(order) == 0


def test_what_is_used_more_stays_longer() -> None:
    order = EvictionOrder()
    often, seldom = keys_of("often", 1)[0], keys_of("seldom", 1)[0]
    order.add(BlockRef(often), uses=1)
    order.add(BlockRef(seldom), uses=1)
    order.use(often, uses=3)
    assert evict_all(order) == [seldom, often]


def test_of_equal_uses_the_cheaper_goes_first() -> None:
    order = EvictionOrder(crossover_blocks=10)
    deep, shallow = keys_of("deep", 21)[-1], keys_of("shallow", 1)[0]
    order.add(BlockRef(deep, 20), uses=1)
    order.add(BlockRef(shallow, 0), uses=1)
    assert evict_all(order) == [shallow, deep]


def test_of_equal_ones_the_later_goes_first() -> None:
    order = EvictionOrder(crossover_blocks=1e300)  # every block costs the same
    keys = [keys_of(name, 1)[0] for name in "abc"]
    for position, key in zip((3, 9, 5), keys, strict=True):
        order.add(BlockRef(key, position), uses=1)
    assert evict_all(order) == [keys[1], keys[2], keys[0]]


def test_what_was_worth_much_once_goes_in_the_end() -> None:
    order = EvictionOrder()
    old = keys_of("old", 1)[0]
    order.add(BlockRef(old), uses=5)
    for number in range(20):
        order.add(BlockRef(keys_of(number, 1)[0]), uses=1)
        victim = order.victim()
        assert victim is not None
        order.evict(victim)
        if victim == old:
            return
    raise AssertionError("the old block never went")


def test_the_block_that_is_kept_is_no_victim() -> None:
    order, keys = EvictionOrder(), keys_of("a", 1)
    order.add(BlockRef(keys[0]), uses=1)
    assert order.victim(keep=keys[0]) is None
    assert order.victim() == keys[0]


@given(st.lists(st.tuples(st.sampled_from(["add", "use", "remove", "evict"]), st.integers(0, 11)), max_size=80))
def test_no_victim_has_a_child_and_each_block_goes_once(acts: list[tuple[str, int]]) -> None:
    """Three prompts of four blocks, of which two have the first two blocks in common."""
    shared = keys_of("s", 2)
    prompts = [
        chain([*shared, *keys_of("a", 2)]),
        chain([*shared, *keys_of("b", 2)]),
        chain(keys_of("c", 4)),
    ]
    refs = [ref for prompt in prompts for ref in prompt]
    order, here = EvictionOrder(), dict[bytes, BlockRef]()
    for act, number in acts:
        ref = refs[number]
        if act == "add" and ref.key not in here:
            order.add(ref, uses=number)
            here[ref.key] = ref
        elif act == "use" and ref.key in here:
            order.use(ref.key, uses=2 * number)
        elif act == "remove" and ref.key in here:
            order.remove(ref.key)
            del here[ref.key]
        elif act == "evict" and (victim := order.victim(keep=ref.key)) is not None:
            assert victim != ref.key
            assert victim not in {one.parent for one in here.values()}
            order.evict(victim)
            del here[victim]
        assert len(order) == len(here)
    assert sorted(evict_all(order)) == sorted(here)
