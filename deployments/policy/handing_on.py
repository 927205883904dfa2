"""Which cached prompts of a leaving replica go to which other replicas, in the time that is left. Pure.

The replica says which prompts it was asked lately. A block is as hot as the number of these prompts that it is part of,
so along a prompt the heat only falls. The hottest beginnings go first, of equal ones those of the newest prompts. What
another replica of the engine has already stays where it is. What several prompts share may take the place of cached KV
that nothing uses now, and what one prompt alone has goes only into blocks that hold nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from deployments.policy.placement.fetch import FETCH_S

DISPLACED_SHARE = 0.5
"""The share of a replica's free blocks that shared beginnings may take, also where the blocks hold cached KV."""

MOST_TARGETS = 16
"""The replicas that get something: those with the most room. A plan for all of a large fleet holds up placement."""

Prompt = Sequence[int]
"""The chained hashes of its full blocks."""


@dataclass(frozen=True, slots=True)
class Target:
    """A replica that may get prompts. `free_blocks`: in no use. `empty_blocks`: those of them that cache nothing.

    `block_s`: seconds that a block takes to come.
    """

    replica_id: str
    free_blocks: int
    empty_blocks: int
    block_s: float


@dataclass(frozen=True, slots=True)
class Handed:
    """`replica_id` fetches the first `blocks` blocks of prompt number `prompt`; `new` of them are not there yet."""

    replica_id: str
    prompt: int
    blocks: int
    new: int


@dataclass(frozen=True, slots=True)
class _Beginning:
    prompt: int
    blocks: int
    heat: int


def hand_on(
    prompts: Sequence[Prompt],
    found: Callable[[Prompt], Mapping[str, int]],
    targets: Sequence[Target],
    left_s: float,
) -> list[Handed]:
    """What is to be fetched, in this order. All comes over the leaving replica's link, so the times add up.

    `prompts`: the newest first. `found`: the number of leading blocks of a prompt that each replica caches. `targets`:
    all that run the same engine and stay.
    """
    stay = {target.replica_id for target in targets}
    roomy = heapq.nlargest(MOST_TARGETS, targets, key=lambda target: (target.empty_blocks, target.free_blocks))
    plan, rooms = list[Handed](), [_Room(target) for target in roomy]
    for beginning in sorted(_beginnings(prompts), key=lambda each: (-each.heat, each.prompt, each.blocks)):
        wanted = prompts[beginning.prompt][: beginning.blocks]
        there = found(wanted)
        places = sorted(((room.has(wanted, there), room.room(beginning.heat), room) for room in rooms), key=_rank)
        is_there = any(there[each] >= len(wanted) for each in there.keys() & stay)
        if is_there or not places or places[0][0] == len(wanted):
            continue
        for has, blocks, room in places:
            new, takes_s = len(wanted) - has, FETCH_S + (len(wanted) - has) * room.target.block_s
            if new <= blocks and takes_s <= left_s:
                left_s -= takes_s
                room.take(wanted, new)
                plan.append(Handed(room.target.replica_id, beginning.prompt, len(wanted), new))
                break
    return plan


def _rank(place: tuple[int, int, _Room]) -> tuple[int, int, str]:
    """First the replica that has most of the prompt, then the one with most room."""
    has, blocks, room = place
    return -has, -blocks, room.target.replica_id


def _beginnings(prompts: Sequence[Prompt]) -> Iterator[_Beginning]:
    """Of each prompt, the beginnings after which it is less hot, once where several prompts have the same."""
    heat = Counter(block for prompt in prompts for block in prompt)
    seen = set[int]()
    for number, prompt in enumerate(prompts):
        for place, block in enumerate(prompt, 1):
            after = heat[prompt[place]] if place < len(prompt) else 0
            if after < heat[block] and block not in seen:
                seen.add(block)
                yield _Beginning(number, place, heat[block])


class _Room:
    """What a replica still takes, and what it gets."""

    def __init__(self, target: Target) -> None:
        self.target, self._free, self._empty = target, target.free_blocks, target.empty_blocks
        self._gets: set[int] = set()

    def has(self, wanted: Prompt, there: Mapping[str, int]) -> int:
        cached = there.get(self.target.replica_id, 0)
        return cached + sum(1 for _ in takewhile(self._gets.__contains__, wanted[cached:]))

    def room(self, heat: int) -> int:
        return max(self._empty, int(self._free * DISPLACED_SHARE)) if heat > 1 else self._empty

    def take(self, wanted: Prompt, new: int) -> None:
        self._gets.update(wanted)
        self._free -= new
        self._empty = max(0, self._empty - new)
