"""Which replicas are about to cache which blocks, because a prompt with those blocks was placed on them. Pure.

It is made for a thousand prompts a second. The blocks of a prompt share one small mapping of what is expected, so
entering a prompt costs about as much as entering one block.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

_Replicas = dict[int, float]
"""Replica -> until when it is expected; shared by blocks with the same expectation."""


class ExpectedBlocks:
    """Replicas are small numbers. An expectation ends after `for_s` seconds, or when the replica reports the block.

    `max_blocks`: the most blocks of all expected prompts; beyond it the oldest prompts are forgotten.
    """

    def __init__(self, for_s: float, max_blocks: int) -> None:
        self._for_s, self._max_blocks = for_s, max_blocks
        self._of: dict[int, _Replicas] = {}
        self._prompts: deque[tuple[float, tuple[int, ...], Sequence[int]]] = deque()  # until when, replicas, blocks
        self._blocks = 0
        self._concerned: Counter[int] = Counter()

    def __len__(self) -> int:
        """The number of expectations, each of one block by one replica."""
        return sum(map(len, self._of.values()))

    def of(self, block: int) -> Mapping[int, float] | None:
        """The replicas that a block is expected on. The blocks of a prompt mostly give the same object."""
        return self._of.get(block)

    def concerns(self, replica: int) -> bool:
        """Whether anything of a replica is remembered. Its number must not be given to another while this is so."""
        return replica in self._concerned

    def add(self, replicas: Iterable[int], blocks: Sequence[int], now_s: float) -> None:
        """These replicas are about to cache these blocks."""
        until_s = now_s + self._for_s
        new = dict.fromkeys(replicas, until_s)
        if not new or not blocks:
            return
        before = list(map(self._of.get, blocks))
        if any(before):
            merged = {key: new | _without(old, new) for key, old in {id(old): old for old in before}.items()}
            self._of.update(zip(blocks, [merged[id(old)] for old in before], strict=True))
        else:
            self._of.update(dict.fromkeys(blocks, new))
        self._prompts.append((until_s, tuple(new), blocks))
        self._concerned.update(new.keys())
        self._blocks += len(blocks)
        while self._blocks > self._max_blocks:
            self._forget_first(self._prompts[0][0])

    def told(self, replica: int, blocks: Iterable[int]) -> None:
        """The replica has reported whether it has these blocks."""
        old: _Replicas | None = None
        for block in blocks if self._of else ():
            expected = self._of.get(block)
            if expected is None or replica not in expected:
                continue
            if expected is not old:
                old, less = expected, {each: at_s for each, at_s in expected.items() if each != replica}
            if less:
                self._of[block] = less
            else:
                del self._of[block]

    def expire(self, now_s: float) -> None:
        """Forget the expectations that have ended."""
        while self._prompts and self._prompts[0][0] <= now_s:
            self._forget_first(now_s)

    def _forget_first(self, now_s: float) -> None:
        _, replicas, blocks = self._prompts.popleft()
        self._blocks -= len(blocks)
        for replica in replicas:
            self._concerned[replica] -= 1
            if not self._concerned[replica]:
                del self._concerned[replica]
        for block in blocks:
            expected = self._of.get(block)
            if expected is None:
                continue
            for replica in replicas:
                if expected.get(replica, now_s + 1.0) <= now_s:
                    del expected[replica]
            if not expected:
                del self._of[block]


def _without(expected: _Replicas | None, replicas: _Replicas) -> _Replicas:
    return {each: until_s for each, until_s in (expected or {}).items() if each not in replicas}
