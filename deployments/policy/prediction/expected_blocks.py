"""Which replicas are about to cache which blocks, because a prompt with those blocks was placed on them. Pure.

It is made for a thousand prompts a second. The blocks of a prompt share one small mapping of what is expected, so
entering a prompt costs about as much as entering one block.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_Replicas = dict[int, int]
"""Replica -> number of the newest prompt that it is expected to cache the block for.

Blocks with the same expectation share one."""


@dataclass(slots=True)
class _Prompt:
    """`until_s`: when its expectation ends; infinite while the prompt is not computed."""

    replicas: tuple[int, ...]
    blocks: Sequence[int]
    until_s: float = math.inf


class ExpectedBlocks:
    """Replicas are small numbers. An expectation ends when the replica reports the block.

    Otherwise it ends `for_s` seconds after the prompt was computed, or given up. `max_blocks`: the most blocks of all
    expected prompts; beyond it the oldest prompts are forgotten.
    """

    def __init__(self, for_s: float, max_blocks: int) -> None:
        self._for_s, self._max_blocks = for_s, max_blocks
        self._of: dict[int, _Replicas] = {}
        self._prompts: dict[int, _Prompt] = {}  # by number, in order
        self._ending: deque[int] = deque()  # the first to end first
        self._number = self._blocks = 0
        self._concerned: Counter[int] = Counter()

    def __len__(self) -> int:
        """The number of expectations, each of one block by one replica."""
        return sum(map(len, self._of.values()))

    def of(self, block: int) -> Mapping[int, int] | None:
        """The replicas that a block is expected on. The blocks of a prompt mostly give the same object."""
        return self._of.get(block)

    def concerns(self, replica: int) -> bool:
        """Whether anything of a replica is remembered. Its number must not be given to another while this is so."""
        return replica in self._concerned

    def add(self, replicas: Iterable[int], blocks: Sequence[int]) -> int:
        """These replicas are about to cache these blocks. Returns the number of this prompt, for `computed`."""
        self._number += 1
        new = dict.fromkeys(replicas, self._number)
        if not new or not blocks:
            return self._number
        before = list(map(self._of.get, blocks))
        if any(before):
            merged = {key: _without(old, new) | new for key, old in {id(old): old for old in before}.items()}
            self._of.update(zip(blocks, [merged[id(old)] for old in before], strict=True))
        else:
            self._of.update(dict.fromkeys(blocks, new))
        self._prompts[self._number] = _Prompt(tuple(new), blocks)
        self._concerned.update(new.keys())
        self._blocks += len(blocks)
        while self._blocks > self._max_blocks:
            self._forget(next(iter(self._prompts)))
        return self._number

    def computed(self, number: int, now_s: float) -> None:
        """A prompt is computed, or never will be. What is not reported soon is not there. Idempotent."""
        prompt = self._prompts.get(number)
        if prompt is not None and prompt.until_s == math.inf:
            prompt.until_s = now_s + self._for_s
            self._ending.append(number)

    def told(self, replica: int, blocks: Iterable[int]) -> None:
        """The replica has reported whether it has these blocks."""
        old: _Replicas | None = None
        for block in blocks if self._of else ():
            expected = self._of.get(block)
            if expected is None or replica not in expected:
                continue
            if expected is not old:
                old, less = expected, {each: number for each, number in expected.items() if each != replica}
            if less:
                self._of[block] = less
            else:
                del self._of[block]

    def expire(self, now_s: float) -> None:
        """Forget the expectations that have ended."""
        while self._ending:
            prompt = self._prompts.get(self._ending[0])
            if prompt is not None and prompt.until_s > now_s:
                return
            self._forget(self._ending.popleft())

    def _forget(self, number: int) -> None:
        prompt = self._prompts.pop(number, None)
        if prompt is None:
            return
        self._blocks -= len(prompt.blocks)
        for replica in prompt.replicas:
            self._concerned[replica] -= 1
            if not self._concerned[replica]:
                del self._concerned[replica]
        for block in prompt.blocks:
            expected = self._of.get(block)
            if expected is None:
                continue
            for replica in prompt.replicas:
                if expected.get(replica) == number:
                    del expected[replica]
            if not expected:
                del self._of[block]


def _without(expected: _Replicas | None, replicas: _Replicas) -> _Replicas:
    return {each: number for each, number in (expected or {}).items() if each not in replicas}
