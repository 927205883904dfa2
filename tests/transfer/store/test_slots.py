"""The table of a tier: each block in a slot of its own, and no slot lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.store.conftest import keys_of
from transfer.store.admission import FrequencySketch
from transfer.store.refs import BlockRef, chain
from transfer.store.slots import Held, Slots

ACTS = st.lists(st.tuples(st.sampled_from(["store", "fail", "drop", "use"]), st.integers(0, 14)), max_size=100)


@given(st.integers(0, 5), ACTS)
def test_every_slot_is_free_or_has_one_block(count: int, acts: list[tuple[str, int]]) -> None:
    sketch = FrequencySketch(count)
    slots = Slots(count, sketch, 256.0)
    refs = [ref for name in "abc" for ref in chain(keys_of(name, 5))]
    for act, number in acts:
        ref = refs[number]
        if act == "drop":
            slots.drop(ref.key)
        elif act == "use":
            sketch.use(ref.key)
            slots.use(ref.key)
        elif ref.key not in slots:
            sketch.use(ref.key)
            slot, victim = slots.claim(ref)
            assert victim is None or (victim.slot == slot and victim.ref.key not in slots)
            if slot is not None and act == "store":
                slots.fill(Held(ref, slot, b""))
            elif slot is not None:
                slots.release(slot)
        taken = [held.slot for held in slots]
        assert len(set(taken)) == len(taken) == len(slots)
        assert len(slots) + slots.free == count
        assert set(taken) <= set(range(count))


def full(names: str) -> tuple[Slots, FrequencySketch]:
    """A full table of first blocks that were used once."""
    sketch = FrequencySketch(100)
    slots = Slots(len(names), sketch, 256.0)
    for name in names:
        ref = BlockRef(keys_of(name, 1)[0])
        sketch.use(ref.key)
        slot, _ = slots.claim(ref)
        assert slot is not None
        slots.fill(Held(ref, slot, b""))
    return slots, sketch


def test_a_full_tier_takes_only_what_is_used_more_than_its_victim() -> None:
    slots, sketch = full("ab")
    ref = BlockRef(keys_of("new", 1)[0])
    sketch.use(ref.key)
    assert slots.claim(ref) == (None, None)
    sketch.use(ref.key)
    slot, victim = slots.claim(ref)
    assert victim is not None
    assert victim.slot == slot


def test_a_block_does_not_push_out_its_parent() -> None:
    slots, sketch = full("a")
    parent = keys_of("a", 1)[0]
    child = BlockRef(keys_of("a", 2)[1], 1, parent)
    for _ in range(9):
        sketch.use(child.key)
    assert slots.claim(child) == (None, None)
    assert parent in slots


def test_what_was_found_at_the_start_is_in_its_slots() -> None:
    slots = Slots(4, FrequencySketch(4), 256.0)
    found = [Held(BlockRef(keys_of(name, 1)[0]), slot, b"") for name, slot in (("a", 2), ("b", 0))]
    slots.restore(found)
    assert [slots.get(held.ref.key) for held in found] == found
    claimed = {slots.claim(BlockRef(keys_of(number, 1)[0]))[0] for number in range(2)}
    assert claimed == {1, 3}
