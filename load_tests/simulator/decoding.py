"""The sequences that decode on a replica: who ends when, and who needs a new block when.

Time here is a count of decode steps. Every sequence gets one token a step, so a sequence's end and the steps at which
it fills a block are known when it joins, and nothing has to be touched in between.
"""

from __future__ import annotations

import heapq
from itertools import count

from load_tests.simulator.work import Work


class DecodeBatch:
    """`context`: tokens held by all, summed. `step`: decode steps since the beginning."""

    def __init__(self, block_tokens: int) -> None:
        self.step = 0
        self.context = 0
        self._block_tokens = block_tokens
        self._members: dict[Work, None] = {}
        self._ends: list[tuple[int, int, Work]] = []
        self._crossings = [0] * block_tokens
        self._serial = count()

    def __len__(self) -> int:
        return len(self._members)

    def join(self, work: Work) -> None:
        """A sequence decodes from the next step on; its blocks hold exactly its context."""
        held = work.context
        work.end_step = self.step + work.outputs - work.generated
        work.crossing = (self.step - held) % self._block_tokens
        self._crossings[work.crossing] += 1
        self._members[work] = None
        self.context += held
        heapq.heappush(self._ends, (work.end_step, next(self._serial), work))

    def steps_left(self) -> int:
        """Steps until the first sequence ends. Raises IndexError when there is none."""
        while self._ends[0][2].end_step != self._ends[0][0]:
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.step

    def growth(self, steps: int) -> int:
        """New blocks that the next `steps` steps need."""
        rounds, rest = divmod(steps, self._block_tokens)
        first = self.step % self._block_tokens
        beyond = first + rest - self._block_tokens
        blocks = sum(self._crossings[first : first + rest])
        if beyond > 0:
            blocks += sum(self._crossings[:beyond])
        return rounds * len(self._members) + blocks

    def steps_within(self, blocks: int, most: int) -> int:
        """How many of the next `most` steps fit into so many free blocks."""
        if self.growth(most) <= blocks:
            return most
        low, high = 0, most  # the first fits, the second does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.growth(middle) <= blocks else (low, middle)
        return low

    def advance(self, steps: int) -> list[Work]:
        """So many steps are done, none beyond the first end: who has its last token now, oldest first."""
        self.context += steps * len(self._members)
        self.step += steps
        ended = []
        while self._ends and self._ends[0][0] <= self.step:
            end_step, _, work = heapq.heappop(self._ends)
            if work.end_step == end_step:
                self._leave(work)
                ended.append(work)
        return ended

    def drop_newest(self) -> Work:
        """Take out whoever joined last."""
        work = next(reversed(self._members))
        self._leave(work)
        return work

    def _leave(self, work: Work) -> None:
        work.generated = work.outputs - (work.end_step - self.step)
        work.end_step = -1
        del self._members[work]
        self._crossings[work.crossing] -= 1
        self.context -= work.context
