"""Two thousand fetches at random: cancelled, recalled, late, of blocks that are not there. No byte is wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.transfer.channel.test_fetch import Shelf, name

FETCHES, OPEN, MOST = 2000, 5, 8
TARGETS, MARK = 56, 255
"""Blocks from this number on belong to a handoff; what a free block is filled with."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An open fetch: the source's blocks, and those that they are to come into."""

    held: list[int]
    into: list[int]


class Churn:
    """`source` has some blocks, which change. `target` has a block of each open fetch for itself; others are marked."""

    def __init__(self, source: Any, target: Any, seed: int) -> None:
        self.source, self.target, self.chance = source, target, random.Random(seed)
        self.shelf = Shelf(*range(48))
        source.channel.lend(self.shelf)
        source.fill(list(range(source.blocks)), seed)
        target.memory[:] = MARK
        self.free, self.open = set(range(TARGETS)), dict[str, Asked]()
        self.brought = self.whole = 0

    def ask(self, number: int) -> None:
        count = self.chance.randint(1, MOST)
        asked = Asked(
            [self.chance.randrange(64 if self.chance.random() < 0.1 else 48) for _ in range(count)],
            self.chance.sample(sorted(self.free), count),
        )
        self.free -= set(asked.into)
        self.open[f"r{number}"] = asked
        timeout_s = self.chance.choice((60.0, 60.0, 60.0, 0.001))
        names = [name(block) for block in asked.held]
        address = self.source.channel.address
        self.target.channel.fetch((f"s{number}", 1), f"r{number}", [address], asked.into, names, timeout_s)

    def disturb(self) -> None:
        kind = self.chance.random()
        if kind < 0.1 and self.open:
            request_id = self.chance.choice(sorted(self.open))
            self.target.channel.cancel((f"s{request_id[1:]}", 1), "aborted")
        elif kind < 0.12:
            assert self.source.channel.recall(60.0)

    def settled(self) -> int:
        """Look at the fetches that have ended: what came is as the source has it. Returns how many are open."""
        results = self.target.channel.take_results()
        assert not results.received
        assert not results.broken
        for request_id, came in results.fetched.items():
            asked = self.open.pop(request_id)
            assert came <= len(asked.held)
            for held, into in list(zip(asked.held, asked.into, strict=True))[:came]:
                assert np.array_equal(self.target.memory[:, :, into], self.source.memory[:, :, held])
            self.brought += came
            self.whole += came == len(asked.held)
            self.target.memory[:, :, asked.into] = MARK  # it is free: nothing may write into it any more
            self.free |= set(asked.into)
        return len(self.open)

    def untouched(self) -> bool:
        return bool((self.target.memory[:, :, sorted(self.free)] == MARK).all())


@pytest.fixture(params=[1, 2])
def churn(request: pytest.FixtureRequest, prefill: Any, decode: Any) -> Churn:
    return Churn(prefill, decode, request.param)


def test_no_byte_is_wrong_and_nothing_is_left(churn: Churn) -> None:
    for number in range(FETCHES // 2):
        churn.target.until(lambda: churn.settled() < OPEN)
        assert churn.untouched()
        churn.ask(number)
        churn.disturb()
    churn.target.until(lambda: not churn.settled())
    for side in (churn.source, churn.target):
        side.wait_idle()
    assert churn.untouched()
    assert churn.shelf.is_whole
    assert churn.brought > FETCHES
    assert churn.whole > FETCHES // 8
