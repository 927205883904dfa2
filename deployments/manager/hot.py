"""Copies hot prefixes to further replicas, as `policy.spread` plans it.

A copy needs the tokens of its prefix, which placement does not: it knows a prompt by its hashes. So the session manager
asks the ingress of the next prompt with that prefix for them, and keeps those that are copied.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from deployments.messages import Admit, BeginCopy, Pin, Reject, ReplicaSnapshot, SessionRequest
from deployments.policy.allocator import Allocator
from deployments.policy.pins import MOST_TOKENS

MOST_ASKED = 16
"""The most prefixes whose tokens are asked for at one time."""

logger = logging.getLogger("baton.manager")


class HotPrefixes:
    """Keeps the tokens of prefixes that are copied: at most `MOST_TOKENS`, and what was copied last."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._asked: OrderedDict[int, tuple[int, int]] = OrderedDict()  # by name: blocks and tokens
        self._known: OrderedDict[int, Pin] = OrderedDict()
        self._tokens = 0

    def asks(self, request: SessionRequest, decision: Admit | Reject) -> Admit | Reject:
        """The decision, with the question for tokens where the prompt begins with a prefix that lacks them."""
        if isinstance(decision, Admit):
            for name, (blocks, tokens) in self._asked.items():
                if request.hashes[blocks - 1 : blocks] == (name,):
                    return Admit(decision.placement, decision.allowance, tokens)
        return decision

    def told(self, name: int, prefix: Pin) -> None:
        """An ingress has told the tokens of a prefix."""
        if self._asked.pop(name, None) is None:
            return
        self._known[name] = prefix
        self._tokens += len(prefix.tokens)
        while self._tokens > MOST_TOKENS:
            _, oldest = self._known.popitem(last=False)
            self._tokens -= len(oldest.tokens)

    def copy_to(self, snapshot: ReplicaSnapshot, now_s: float) -> BeginCopy | None:
        """What a replica that reports this fetches now; None: nothing, or its tokens are not known yet."""
        copy = self._allocator.copy_to(snapshot, now_s)
        if copy is None:
            return None
        name = copy.hashes[-1]
        if (prefix := self._known.get(name)) is None:
            assert self._allocator.spread is not None, "it has planned the copy"
            self._allocator.spread.withdraw(snapshot.replica_id)
            self._asked[name] = len(copy.hashes), copy.tokens
            if len(self._asked) > MOST_ASKED:
                self._asked.popitem(last=False)
            return None
        self._known.move_to_end(name)
        logger.info(
            "%s fetches a prefix of %d tokens from %s: %s",
            snapshot.replica_id,
            copy.tokens,
            copy.source.replica_id,
            copy.reason,
        )
        return BeginCopy(prefix, copy.source)
