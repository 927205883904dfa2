"""Which prefixes are pinned, what that sets aside, and which replica pins what next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.messages import BeginPin, Phase, Pin, ReplicaInfo, ReplicaSnapshot, Role
from deployments.policy.pins import LEAD_S, MOST_TOKENS, SPARE_BLOCKS, Pins

INFO = ReplicaInfo("a", "mixed", Role.MIXED, "node", "engine", 16, 400, 8, 1600)
"""The longest request takes 100 of its 400 blocks, and a share of 0.25 is 100."""
STRICT_DECODE = replace(INFO, replica_id="d", role=Role.DECODE, strict=True)


def pin(name: str, blocks: int = 40) -> Pin:
    return Pin(name, tuple(range(16 * blocks + 3)), blocks)


def pins(*named: Pin, most: int = 3, share: float = 0.25, fetches: bool = False) -> Pins:
    made = Pins(most, share, fetches)
    for each in named:
        assert made.add(each, [INFO]) == ""
    return made


def snapshot(info: ReplicaInfo = INFO, phase: Phase = Phase.READY, **pinned: int) -> ReplicaSnapshot:
    return ReplicaSnapshot(info.replica_id, 1, phase, info, pinned=pinned)


def test_every_change_has_a_higher_version_and_the_same_prefix_twice_is_none() -> None:
    made, versions = pins(), [0]
    for change in (lambda: made.add(pin("x"), [INFO]), lambda: made.add(pin("y"), [INFO]), lambda: made.remove("x")):
        change()
        versions.append(made.now.version)
    assert versions == sorted(set(versions))
    assert made.add(pin("y"), [INFO]) == ""
    assert not made.remove("x")
    assert (made.now.version, [each.id for each in made.now.pins]) == (versions[-1], ["y"])


@pytest.mark.parametrize(
    ("asked", "replicas", "reason"),
    [
        (pin("z", 0), [INFO], "the prompt fills no block"),
        (pin("z", 21), [INFO], "101 blocks, and a replica of mixed has 100"),
        (pin("z", 21), [INFO, replace(INFO, total_blocks=800)], "101 blocks"),
        (pin("z", 1), [], "no replica is up"),
        (pin("z", 1), [STRICT_DECODE], "no replica is up that computes prompts"),
        (Pin("z", (1,) * MOST_TOKENS, 1), [INFO], f"more than {MOST_TOKENS} tokens"),
        (pin("z", 1), [replace(INFO, total_blocks=181)], "a replica of mixed has 45"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(asked: Pin, replicas: list[ReplicaInfo], reason: str) -> None:
    made = pins(pin("x"), pin("y"))
    before = made.now
    assert reason in made.add(asked, replicas)
    assert made.now is before


def test_the_number_of_prefixes_is_bounded_and_the_longest_request_always_fits_beside_them() -> None:
    made = pins(pin("x"), pin("y"), most=2)
    assert "the most that `placement.pins.most` allows" in made.add(pin("z", 1), [INFO])
    wide = pins(share=0.9)
    assert "has 299 for them" in wide.add(pin("x", 300), [INFO])
    assert Pins(1, 0.5, False, "not here").add(pin("x", 1), [INFO]) == "not here"


def test_blocks_are_set_aside_on_replicas_that_compute_prompts() -> None:
    made = pins()
    assert made.set_aside(INFO) == 0
    assert made.add(pin("x"), [INFO]) == ""
    assert made.set_aside(INFO) == 40 + SPARE_BLOCKS
    assert made.set_aside(STRICT_DECODE) == 0
    small = replace(INFO, replica_id="s", total_blocks=130)
    assert (made.wanted_on(small), made.set_aside(small)) == ((), 0), "it came later, and has no room for them"
    made.remove("x")
    assert made.set_aside(INFO) == 0


def test_a_replica_pins_one_after_the_other_until_all_blocks_stand() -> None:
    made = pins(pin("x"), pin("y"))
    assert made.next_on(snapshot(), [], 0.0) == BeginPin("x")
    assert made.next_on(snapshot(x=39), [], 0.0) == BeginPin("x")
    assert made.next_on(snapshot(x=40), [], 0.0) == BeginPin("y")
    assert made.next_on(snapshot(x=40, y=40), [], 0.0) is None
    assert made.next_on(snapshot(phase=Phase.LOADING), [], 0.0) is None
    assert made.next_on(snapshot(STRICT_DECODE), [], 0.0) is None


def test_with_fetches_the_first_of_an_engine_computes_and_the_others_fetch() -> None:
    made = pins(pin("x"), fetches=True)
    first, second = snapshot(), snapshot(replace(INFO, replica_id="b"))
    other = snapshot(replace(INFO, replica_id="c", fingerprint="another"))
    assert made.next_on(first, [first, second], 5.0) == BeginPin("x")
    assert made.next_on(second, [first, second], 5.0) is None
    assert made.next_on(first, [first, second], 5.1) == BeginPin("x"), "it is told until it stands"
    assert made.next_on(other, [first, second], 5.1) == BeginPin("x")
    has = snapshot(x=40)
    assert made.next_on(second, [has, second], 6.0) == BeginPin("x", INFO)
    assert made.next_on(snapshot(other.info or INFO), [has, other], 6.0) == BeginPin("x"), "it has other KV"


def test_a_first_one_that_does_not_come_to_an_end_gives_way() -> None:
    made = pins(pin("x"), fetches=True)
    first, second = snapshot(), snapshot(replace(INFO, replica_id="b"))
    assert made.next_on(first, [first, second], 5.0) == BeginPin("x")
    assert made.next_on(second, [second], 5.0 + LEAD_S) == BeginPin("x")


def test_a_manager_that_has_restarted_takes_the_newest_list() -> None:
    older, newer, restarted = pins(pin("x")), pins(pin("x"), pin("y")), pins()
    assert restarted.learn(newer.now)
    assert not restarted.learn(older.now)
    assert not restarted.learn(None)
    assert [each.id for each in restarted.now.pins] == ["x", "y"]
    assert restarted.set_aside(INFO) == 80 + SPARE_BLOCKS
    assert restarted.remove("x")
    assert restarted.now.version > newer.now.version
