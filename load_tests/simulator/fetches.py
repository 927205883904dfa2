"""A prompt's first part on its way from the replica's tier, or from another replica's cache, before it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from deployments.policy.placement.fetch import FETCH_S
from deployments.policy.spread import Copy
from load_tests.simulator.calendar import Calendar
from load_tests.simulator.cluster import Node
from load_tests.simulator.reporting import TIER_BYTES_PER_S
from load_tests.simulator.work import Work


class Fetches:
    """Brings what a prompt finds elsewhere, once the prompt has its blocks, as the product does.

    The tier is asked where it has at least as much as the source. What has gone meanwhile is computed. `touched`: told
    of a replica that has something new to do.
    """

    def __init__(
        self, calendar: Calendar, nodes: Mapping[str, Node], block_tokens: int, touched: Callable[[Node], None]
    ) -> None:
        self._calendar, self._nodes, self._block_tokens, self._touched = calendar, nodes, block_tokens, touched
        for node in nodes.values():
            self.join(node)

    def join(self, node: Node) -> None:
        """A replica is there from now on."""
        node.replica.bring = partial(self._begin, node)

    def _begin(self, node: Node, work: Work) -> bool:
        plan, most = work.fetch, (work.target - 1) // self._block_tokens
        kept = node.replica.memory.kept(work.hashes, most)
        source = self._nodes.get(plan.source.replica_id) if plan else None
        wanted = min(plan.tokens // self._block_tokens, most) if plan else 0
        there = source.replica.memory.hits(work.hashes, wanted) if source else 0
        blocks = max(kept, there)
        tokens = blocks * self._block_tokens - work.computed
        if tokens <= 0:
            return False
        there_s = self._there_s(tokens * node.kv_bytes_per_token, source if there > kept else None, node)
        self._calendar.at(there_s, self._there, (node, work, blocks * self._block_tokens))
        return True

    def copy(self, replica_id: str, copy: Copy) -> None:
        """A replica fetches a prefix that no request waits for, as far as its source has it."""
        node, source = self._nodes[replica_id], self._nodes.get(copy.source.replica_id)
        there = source.replica.memory.hits(copy.hashes, len(copy.hashes)) if source else 0
        missing = there - node.replica.memory.hits(copy.hashes, there)
        if missing > 0:
            there_s = self._there_s(missing * self._block_tokens * node.kv_bytes_per_token, source, node)
            self._calendar.at(there_s, self._copied, (node, copy.hashes[:there]))

    def _copied(self, what: tuple[Node, tuple[int, ...]]) -> None:
        node, hashes = what
        node.replica.memory.copy(hashes)
        node.reporter.changed = True

    def _there_s(self, size: float, source: Node | None, node: Node) -> float:
        """`source`: None is the replica's tier."""
        now_s = self._calendar.now_s
        if source is None:
            return now_s + size / TIER_BYTES_PER_S
        return max(source.out.passes(size, now_s), node.into.passes(size, now_s)) + FETCH_S

    def _there(self, what: tuple[Node, Work, int]) -> None:
        node, work, tokens = what
        node.replica.brought(work, tokens, self._calendar.now_s)
        self._touched(node)
