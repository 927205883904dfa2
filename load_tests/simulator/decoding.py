"""The sequences that decode on a replica: when each ends, and when each needs a new block.

Time here is a count of decode steps. Every sequence gets one token a step, so its end and the steps at which it fills a
block are known when it joins. Nothing has to be updated in between.
"""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import count
from typing import NamedTuple

from load_tests.simulator.work import Work


class _Member(NamedTuple):
    """`end_step`: the step after which a sequence has its last token. `crossing`: where in a round it needs a block."""

    end_step: int
    crossing: int


class DecodeBatch:
    """`context`: the tokens that all sequences hold together. `step`: decode steps since the beginning."""

    def __init__(self, block_tokens: int) -> None:
        self.step = 0
        self.context = 0
        self._block_tokens = block_tokens
        self._members: dict[Work, _Member] = {}
        self._ends: list[tuple[int, int, Work]] = []
        self._crossings = [0] * block_tokens
        self._serial = count()
        self._objectives: Counter[float] = Counter()

    def __len__(self) -> int:
        return len(self._members)

    def join(self, work: Work) -> None:
        """A sequence decodes from the next step on. Its blocks hold exactly its context."""
        held = work.context
        end_step = self.step + work.outputs - work.generated
        crossing = (self.step - held) % self._block_tokens
        self._crossings[crossing] += 1
        self._members[work] = _Member(end_step, crossing)
        self.context += held
        self._objectives[work.tpot_s] += 1
        heapq.heappush(self._ends, (end_step, next(self._serial), work))

    @property
    def objectives(self) -> set[float]:
        """The TPOT objectives of the sequences; 0 stands for none."""
        return set(self._objectives)

    def steps_left(self) -> int:
        """Steps until the first sequence ends. Raises IndexError when there is none."""
        while not self._ends_at(*self._ends[0][::2]):
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.step

    def growth(self, steps: int) -> int:
        """The number of new blocks that the next `steps` steps need."""
        rounds, rest = divmod(steps, self._block_tokens)
        first = self.step % self._block_tokens
        beyond = first + rest - self._block_tokens
        blocks = sum(self._crossings[first : first + rest])
        if beyond > 0:
            blocks += sum(self._crossings[:beyond])
        return rounds * len(self._members) + blocks

    def steps_within(self, blocks: int, most: int) -> int:
        """How many of the next `most` steps fit into `blocks` free blocks."""
        if self.growth(most) <= blocks:
            return most
        low, high = 0, most  # the first fits, the second does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.growth(middle) <= blocks else (low, middle)
        return low

    def advance(self, steps: int) -> list[Work]:
        """Count `steps` steps as done, none beyond the first end. Returns the sequences that have their last token."""
        self.context += steps * len(self._members)
        self.step += steps
        ended = []
        while self._ends and self._ends[0][0] <= self.step:
            end_step, _, work = heapq.heappop(self._ends)
            if self._ends_at(end_step, work):
                self._remove(work)
                ended.append(work)
        return ended

    def __contains__(self, work: object) -> bool:
        return work in self._members

    def drop_newest(self) -> Work:
        """Take out the sequence that joined last, and return it."""
        work = next(reversed(self._members))
        self.drop(work)
        return work

    def drop(self, work: Work) -> None:
        """Take out a sequence between two steps."""
        self._remove(work)

    def held_tokens(self, work: Work, steps: int) -> int:
        """The tokens that a sequence holds, `steps` steps from here; 0 when it is not in the batch."""
        member = self._members.get(work)
        return 0 if member is None else work.prompt_tokens + work.outputs - (member.end_step - self.step - steps)

    def _ends_at(self, end_step: int, work: Work) -> bool:
        """Whether an entry of `_ends` still holds. The sequence may have been taken out, and may have joined again."""
        member = self._members.get(work)
        return member is not None and member.end_step == end_step

    def _remove(self, work: Work) -> None:
        end_step, crossing = self._members.pop(work)
        work.generated = work.outputs - (end_step - self.step)
        self._crossings[crossing] -= 1
        self.context -= work.context
        self._objectives[work.tpot_s] -= 1
        if not self._objectives[work.tpot_s]:
            del self._objectives[work.tpot_s]
