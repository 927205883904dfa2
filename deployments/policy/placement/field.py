"""One request before the fleet: which replicas could take it, and what to expect of each. Pure.

The filter is the same for all policies: a decode replica must have room for the prompt plus the longest answer, so that
its engine never has to preempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from configs.schema import WeightsConfig
from deployments.fleet.columns import Columns, Flags, Numbers
from deployments.fleet.view import View
from deployments.messages import ReplicaInfo, Role, SessionRequest
from deployments.policy.chance import Chance
from deployments.policy.placement.estimates import Knowledge, Limits, Outlook
from transfer.memory.blocks import blocks_for


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """What placement takes from the configuration. Times are in seconds.

    `split_min_prompt_tokens`: shorter prompts are prefilled by the decode replica itself. `split_always`: longer ones
    are split wherever that is possible; otherwise where it is expected to cost less. `prefill_queue_s`: the most
    predicted work with which a prefill replica still takes a prompt; None: no limit. `max_retry_after_s`: the longest
    time that a client is told to stay away. `limits`: by pool; a pool without limits takes any request. `moves`: a
    replica can hand over the KV cache of a session that it gives up.
    """

    split_min_prompt_tokens: int = 1
    handoff_timeout_s: float = 60.0
    session_timeout_s: float = 600.0
    max_retry_after_s: float = 30.0
    split_always: bool = False
    prefill_queue_s: float | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    limits: Mapping[str, Limits] = field(default_factory=dict)
    moves: bool = True


class Field:
    """One request and the fleet; what it computes of a role is kept and used again.

    `rng` decides between equals. `objectives`: TTFT and TPOT of the request's class in seconds; infinite where the
    class has none. `decode_s`: what a policy has computed of each role, kept here for its next question.
    """

    def __init__(
        self,
        request: SessionRequest,
        view: View,
        settings: PlacementSettings,
        knowledge: Knowledge,
        rng: Chance,
        objectives: tuple[float, float],
    ) -> None:
        self.request, self.view, self.settings, self.knowledge = request, view, settings, knowledge
        self.rng, self.objectives = rng, objectives
        self._columns: dict[Role, Columns] = {}
        self._outlooks: dict[Role, Outlook] = {}
        self._owners: dict[Role, Flags] = {}
        self.decode_s: dict[Role, Numbers] = {}

    def columns(self, role: Role) -> Columns:
        """The replicas of a role."""
        if role not in self._columns:
            self._columns[role] = self.view.columns(role)
        return self._columns[role]

    def outlook(self, role: Role) -> Outlook:
        """What is expected of the request on each replica of a role."""
        if role not in self._outlooks:
            self._outlooks[role] = Outlook(self.request, self.columns(role), self.knowledge, self.view.now_s)
        return self._outlooks[role]

    def owners(self, role: Role) -> Flags:
        """The replicas of a role that can hold the whole answer now."""
        if role not in self._owners:
            self._owners[role] = self._find_owners(role)
        return self._owners[role]

    def _find_owners(self, role: Role) -> Flags:
        columns, tokens = self.columns(role), most_tokens(self.request)
        able: Flags = columns["room_blocks"] >= columns.blocks_for(tokens)
        return able & columns.ready & self.can_hold(columns, tokens)

    def helpers(self) -> Flags:
        """The prefill replicas that could compute the prompt. They need no free blocks, because prefills queue."""
        columns = self.columns(Role.PREFILL)
        able = columns.ready & self.can_hold(columns, self.request.prompt_tokens + 1)
        if self.settings.prefill_queue_s is None:
            return able
        return able & (self.outlook(Role.PREFILL).queue_s <= self.settings.prefill_queue_s)

    def can_hold(self, columns: Columns, tokens: int) -> Flags:
        """The replicas that could hold so many tokens if they were empty, and whose pools take such a request."""
        return _can_hold(self.request, columns, tokens, self.settings.limits)


def most_tokens(request: SessionRequest) -> int:
    """The most tokens that a session can come to hold."""
    return request.prompt_tokens + request.max_tokens


def takes(request: SessionRequest, info: ReplicaInfo, limits: Mapping[str, Limits], tokens: int | None = None) -> bool:
    """Whether an empty replica of this shape takes a request.

    `tokens`: those of the request that it must hold; None: all of them.
    """
    held = most_tokens(request) if tokens is None else tokens
    fits = held <= info.max_model_len and blocks_for(held, info.block_size) <= info.total_blocks
    return fits and limits.get(info.pool, Limits()).take(request)


def claimed(request: SessionRequest, view: View, limits: Mapping[str, Limits] | None = None) -> str | None:
    """The decode replica that a request claims when it has waited for long.

    None where none is ready that could hold it. Of the ready replicas that could hold the request if they were empty,
    it is the one with the most free blocks. `limits`: by pool.
    """
    columns = view.columns(Role.DECODE)
    able = np.flatnonzero(columns.ready & _can_hold(request, columns, most_tokens(request), limits or {}))
    if not able.size:
        return None
    return columns.info(int(able[columns["free_blocks"][able].argmax()])).replica_id


def _can_hold(request: SessionRequest, columns: Columns, tokens: int, limits: Mapping[str, Limits]) -> Flags:
    able: Flags = columns["capacity_tokens"] >= tokens
    if not limits:
        return able
    by_kind = [limits.get(kind.pool, Limits()).take(request) for kind in columns.kinds]
    taken: Flags = np.array(by_kind or [True])[columns.kind]
    return able & taken
