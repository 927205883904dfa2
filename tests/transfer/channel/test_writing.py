"""The reasons to keep a decode worker out of a handoff."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transfer.channel.writing import Reader, Writing, objection, objection_to_blocks
from transfer.control.handoff import Writer
from transfer.control.messages import Offer
from transfer.memory.layout import KVLayout

LAYOUT = KVLayout(1, 1, 4, 16, 64, (2**20,), workers=2, total_heads=4)
PEER, OTHER = b"peer", b"other"


def reader(peer: bytes | None = PEER, blocks: tuple[int, ...] = ()) -> Reader:
    made = Reader(Writer(range(1), 16), peer)
    if blocks:
        made.machine.offered(0, blocks)
    return made


def writing(*readers: Reader, request_id: str | None = None) -> Writing:
    return Writing(0.0, dict(enumerate(readers)), request_id)


def offer(*blocks: int, first: int = 0) -> Offer:
    return Offer("session", 1, 0, first, list(blocks), 1.0)


@pytest.mark.parametrize(
    ("handoff", "rank", "reason"),
    [
        (None, 0, None),
        (None, 1, "another worker's name"),
        (writing(), 0, None),
        (writing(request_id="p"), 0, "fewer workers"),
        (writing(reader(None), request_id="p"), 0, None),
        (writing(reader()), 0, None),
        (writing(reader(OTHER)), 0, "another worker has offered"),
    ],
)
def test_a_worker_takes_its_own_part_unless_another_has_it(
    handoff: Writing | None, rank: int, reason: str | None
) -> None:
    found = objection(LAYOUT, LAYOUT, handoff, PEER, rank)
    assert found is None if reason is None else reason in (found or "")


def test_a_worker_takes_its_heads_from_the_prefill_worker_that_holds_them() -> None:
    second = replace(LAYOUT, rank=1)
    assert objection(LAYOUT, second, None, PEER, 1) == "this worker's KV is not ours to write"
    assert objection(second, second, None, PEER, 1) is None


@pytest.mark.parametrize("wrong", [offer(), offer(-1), offer(4), offer(0, first=-1)], ids=str)
def test_blocks_that_the_peer_does_not_have_are_refused(wrong: Offer) -> None:
    assert objection_to_blocks(LAYOUT, None, [], PEER, wrong) == "an offer of blocks that the peer does not have"
    assert objection_to_blocks(LAYOUT, None, [], PEER, offer(0, 3)) is None


def test_offers_to_prefills_that_have_not_begun_count_together_for_each_peer() -> None:
    three = reader(blocks=(0, 1, 2))

    def refused(*others: Writing) -> bool:
        return objection_to_blocks(LAYOUT, None, others, PEER, offer(2, 3)) is not None

    assert refused(writing(three))
    assert refused(writing(reader(blocks=(0,))), writing(reader(blocks=(1, 2))))
    assert not refused(writing(reader(blocks=(0, 1))))
    assert not refused(writing(three, request_id="p")), "its prefill has begun"
    assert not refused(writing(reader(OTHER, (0, 1, 2)))), "another peer's blocks"
    three.machine.stop("cancelled")
    assert not refused(writing(three)), "its handoff is over, so its blocks are its own again"


def test_a_repeated_offer_is_not_checked_again() -> None:
    taken = writing(reader(blocks=(0, 1)))
    assert objection_to_blocks(LAYOUT, taken, [taken], PEER, offer(99)) is None
    assert objection_to_blocks(LAYOUT, writing(reader()), [], PEER, offer(99)) is not None, "the first is checked"
