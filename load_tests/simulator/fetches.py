"""A prompt's first part on its way from the replica's tier, or from another replica's cache, before it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deployments.messages import FetchPlan
from deployments.policy.placement.fetch import FETCH_S
from load_tests.simulator.calendar import Calendar
from load_tests.simulator.cluster import Node
from load_tests.simulator.work import Work

TIER_BYTES_PER_S = 40e9
"""What a load from main memory has of PCIe 5.0 x16, whose data sheet says 63e9."""


class Fetches:
    """`submit`: gives a sequence to the replica that computes its prompt."""

    def __init__(
        self, calendar: Calendar, nodes: Mapping[str, Node], block_tokens: int, submit: Callable[[Node, Work], None]
    ) -> None:
        self._calendar, self._nodes, self._block_tokens, self._submit = calendar, nodes, block_tokens, submit

    def begin(self, plan: FetchPlan | None, node: Node, work: Work) -> None:
        """Load or fetch what is not in the replica's memory, and submit the sequence then.

        The tier is asked where it has at least as much as the placement says that another replica has. Blocks that have
        gone meanwhile are computed.
        """
        memory, now_s = node.replica.memory, self._calendar.now_s
        source = self._nodes.get(plan.source.replica_id) if plan else None
        wanted = plan.tokens // self._block_tokens if plan else 0
        have = memory.hits(work.hashes, (work.target - 1) // self._block_tokens)
        kept = memory.kept(work.hashes, (work.target - 1) // self._block_tokens)
        there = source.replica.memory.hits(work.hashes, wanted) if source else 0
        blocks = max(kept, there)
        if blocks <= have:
            self._submit(node, work)
            return
        if work.session_id not in node.replica.sessions:
            node.replica.expect(work)
        size = (blocks - have) * self._block_tokens * node.kv_bytes_per_token
        if source is None or kept >= there:
            there_s = now_s + size / TIER_BYTES_PER_S
        else:
            there_s = max(source.out.passes(size, now_s), node.into.passes(size, now_s)) + FETCH_S
        self._calendar.at(there_s, self._there, (node, work, blocks))

    def _there(self, what: tuple[Node, Work, int]) -> None:
        node, work, blocks = what
        node.replica.memory.bring(work.hashes[:blocks])
        self._submit(node, work)
