"""A replica's KV memory: blocks in use, and a prefix cache of unused blocks. The oldest are evicted first.

What is evicted goes to a tier in main memory, if there is one, whose oldest blocks go for good. (The product's tier
weighs uses and costs; this one does not.)

The blocks of an answer have hashes where the trace says that the next turn repeats it. Otherwise they take memory and
are never found again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from load_tests.simulator.work import Work


class BlockMemory:
    """`total` blocks of `block_tokens` tokens. A hashed block counts once, however many sequences hold it.

    `used`: the blocks that some sequence holds. `idle`: the blocks that only the cache holds; new ones replace them.
    `tier_blocks`: those that the tier in main memory can have.
    """

    def __init__(self, total: int, block_tokens: int, tier_blocks: int = 0) -> None:
        self.total, self.tier_blocks = total, tier_blocks
        self.block_tokens = block_tokens
        self.used = 0
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # a plain dict is slow to find its oldest entry
        self._tier: OrderedDict[int, None] = OrderedDict()
        self._stored: set[int] = set()
        self._removed: set[int] = set()
        self._left: set[int] = set()
        self._returned: set[int] = set()

    @property
    def idle(self) -> int:
        return len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def hits(self, hashes: Sequence[int], most: int) -> int:
        """The number of leading blocks that are here, at most `most`."""
        count = 0
        for block in hashes[:most]:
            if block not in self._holders and block not in self._idle:
                break
            count += 1
        return count

    def kept(self, hashes: Sequence[int], most: int) -> int:
        """The number of leading blocks that are here or in the tier, at most `most`."""
        count = 0
        for block in hashes[:most]:
            if block not in self._holders and block not in self._idle and block not in self._tier:
                break
            count += 1
        return count

    def allocate(self, work: Work, tokens: int, reserve: int = 0) -> bool:
        """Take blocks for the first `tokens` tokens of a sequence that holds none, cached ones first. False: no room.

        At least one token is left to compute, as in vLLM. `reserve`: the number of blocks that must stay free.
        """
        found = self.hits(work.hashes, (tokens - 1) // self.block_tokens)
        hashes = work.hashes[:found]
        fresh = self.blocks_for(tokens) - found
        woken = sum(block in self._idle for block in hashes)
        if self.used + fresh + woken + reserve > self.total:
            return False
        for block in hashes:
            self._hold(block)
        work.held = found
        work.cached_tokens = found * self.block_tokens
        self.grow(fresh)
        return True

    def grow(self, blocks: int) -> None:
        """Count `blocks` more blocks as used. The caller has made sure that there is room."""
        self.used += blocks
        beyond = self.used + len(self._idle) - self.total
        if beyond > 0:
            evicted = [self._idle.popitem(last=False)[0] for _ in range(beyond)]
            gone = self._keep(evicted)
            _note(gone, self._removed, self._stored)
            _note([block for block in evicted if block in self._tier], self._left, self._returned)
            self._returns(gone)

    def _keep(self, evicted: Sequence[int]) -> list[int]:
        """Put evicted blocks into the tier. Returns those that are nowhere now."""
        for block in evicted:
            self._tier[block] = None
            self._tier.move_to_end(block)
        gone = [self._tier.popitem(last=False)[0] for _ in range(len(self._tier) - self.tier_blocks)]
        return [block for block in gone if block not in self._holders and block not in self._idle]

    def commit(self, work: Work, tokens: int) -> None:
        """The KV of a sequence's first `tokens` tokens is computed. From now on its full blocks can be found.

        If another sequence has computed the same block meanwhile, this sequence keeps its own copy. From that block on,
        its blocks are not found by their hashes.
        """
        full = min(tokens // self.block_tokens, len(work.hashes))
        if not work.is_sharing or work.held >= full:
            return
        begin = work.held
        for block in work.hashes[begin:full]:
            if block in self._holders or block in self._idle:
                work.is_sharing = False
                break
            self._holders[block] = 1
            work.held += 1
        _note(work.hashes[begin : work.held], self._stored, self._removed)
        if self._tier:
            self._returns([block for block in work.hashes[begin : work.held] if block in self._tier])

    def copy(self, hashes: Sequence[int]) -> None:
        """KV of these leading blocks has come, and nothing holds it. It takes the place of what is oldest."""
        free = [block for block in hashes[: self.total - self.used] if block not in self._holders]
        new = [block for block in free if block not in self._idle]
        for block in reversed(free):
            self._idle[block] = None
            self._idle.move_to_end(block)
        _note(new, self._stored, self._removed)
        if self._tier:
            self._returns([block for block in new if block in self._tier])
        self.grow(0)

    def release(self, work: Work, blocks: int) -> None:
        """A sequence gives up its `blocks` blocks. The end of its prompt is evicted first."""
        self.used -= blocks - work.held
        for block in reversed(work.hashes[: work.held]):
            holders = self._holders[block] - 1
            if holders:
                self._holders[block] = holders
            else:
                del self._holders[block]
                self._idle[block] = None
                self.used -= 1
        work.held, work.is_sharing = 0, True

    def _returns(self, blocks: Sequence[int]) -> None:
        if self.tier_blocks:
            _note(blocks, self._returned, self._left)

    def changes(self) -> tuple[tuple[int, ...], ...]:
        """The hashes that came and went since the last call, those that only the tier has now, and has not any more."""
        told = self._stored, self._removed, self._left, self._returned
        if any(told):
            self._stored, self._removed, self._left, self._returned = set(), set(), set(), set()
        return tuple(map(tuple, told))

    def _hold(self, block: int) -> None:
        if block in self._idle:
            del self._idle[block]
            self._holders[block] = 1
            self.used += 1
        else:
            self._holders[block] += 1


def _note(blocks: Sequence[int], news: set[int], opposite: set[int]) -> None:
    """Note that blocks were added or removed. A block that was both between two reports is not reported."""
    undone = opposite.intersection(blocks) if opposite else None
    if undone:
        opposite -= undone
        news.update(block for block in blocks if block not in undone)
    else:
        news.update(blocks)
