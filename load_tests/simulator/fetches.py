"""A prompt's first part on its way from another replica's cache, before the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deployments.messages import FetchPlan
from deployments.policy.placement.fetch import FETCH_S
from load_tests.simulator.calendar import Calendar
from load_tests.simulator.cluster import Node
from load_tests.simulator.work import Work


class Fetches:
    """`submit`: gives a sequence to the replica that computes its prompt."""

    def __init__(
        self, calendar: Calendar, nodes: Mapping[str, Node], block_tokens: int, submit: Callable[[Node, Work], None]
    ) -> None:
        self._calendar, self._nodes, self._block_tokens, self._submit = calendar, nodes, block_tokens, submit

    def begin(self, plan: FetchPlan | None, node: Node, work: Work) -> None:
        """Fetch what the placement says, and submit the sequence then. Blocks that have gone meanwhile are computed."""
        source = self._nodes.get(plan.source.replica_id) if plan else None
        if plan is None or source is None:
            self._submit(node, work)
            return
        if work.session_id not in node.replica.sessions:
            node.replica.expect(work)
        wanted, now_s = plan.tokens // self._block_tokens, self._calendar.now_s
        blocks = source.replica.memory.hits(work.hashes, wanted)
        missing = max(0, blocks - node.replica.memory.hits(work.hashes, wanted))
        size = missing * self._block_tokens * source.kv_bytes_per_token
        there_s = max(source.out.passes(size, now_s), node.into.passes(size, now_s)) + FETCH_S
        self._calendar.at(there_s, self._there, (node, work, blocks))

    def _there(self, what: tuple[Node, Work, int]) -> None:
        node, work, blocks = what
        node.replica.memory.bring(work.hashes[:blocks])
        self._submit(node, work)
