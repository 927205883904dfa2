"""One request before the fleet: which replicas could take it, and what to expect of each. Pure.

The filter is the same for all policies: the replica that writes an answer must have room for the prompt plus the
longest answer, so that its engine never has to preempt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from configs.schema import WeightsConfig
from deployments.fleet.columns import Columns, Flags
from deployments.fleet.view import View
from deployments.messages import Mode, ReplicaInfo, Role, SessionRequest
from deployments.policy.chance import Chance
from deployments.policy.placement.estimates import Outlook
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.placement.limits import Limits
from deployments.policy.placement.yielding import LONGEST_QUEUE_S, OWN_QUEUE_S, leaves_one_idle, spares
from deployments.policy.step_size import PROMPT_SHARE
from transfer.memory.blocks import blocks_for

TURN_SHARE = 0.5
"""The longest prefill queue that a request joins, as a share of its TTFT objective.

Engines serve prompts in the order of arrival. What waits here instead is ordered by class and objective.
"""


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """What placement takes from the configuration. Times are in seconds.

    `split_min_prompt_tokens`: shorter prompts are served whole by one replica. `split_always`: longer ones are split
    wherever that is possible; otherwise where it is expected to cost less. `prefill_queue_s`: the most predicted work
    with which a replica still takes a prompt; None: only `TURN_SHARE` limits it. `max_retry_after_s`: the longest
    time that a client is told to stay away. `limits`: by pool; a pool without limits takes any request. `moves`: any
    replica can hand over KV, also that of a session that it gives up. `prompt_share`: as in the configuration.
    `slack`: the share of an objective that a predicted time may reach. `relieves`: replicas give up sessions before
    their memory runs out. `rebalances`: answers move to where they cost less. `fetches`: a replica may fetch cached KV.
    `own`: the pools that take nothing but classes that yield.
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
    prompt_share: float = PROMPT_SHARE
    slack: float = 1.0
    relieves: bool = True
    rebalances: bool = True
    fetches: bool = False
    own: frozenset[str] = frozenset()


class Field:
    """One request and the fleet: where it could go, and what to expect of each replica.

    `rng` decides between equals. `objectives`: TTFT and TPOT of the request's class in seconds; infinite where the
    class has none. `modes`: those in which the request may be served, best first. `yields`: it takes only what others
    leave. The flags have one entry per row of `columns`.
    """

    def __init__(
        self,
        request: SessionRequest,
        view: View,
        settings: PlacementSettings,
        knowledge: Knowledge,
        rng: Chance,
        objectives: tuple[float, float],
        yields: bool = False,
    ) -> None:
        self.request, self.view, self.settings, self.knowledge = request, view, settings, knowledge
        self.rng, self.objectives, self.yields = rng, objectives, yields
        self.columns = view.columns
        self.outlook = Outlook(request, self.columns, knowledge, view.now_s, settings.prompt_share, settings.fetches)
        self.modes = _modes(request, settings)

    @cached_property
    def owners(self) -> Flags:
        """The replicas that can hold the whole answer now, and may write it."""
        return self.has_room & self.may_own

    @cached_property
    def has_room(self) -> Flags:
        """The replicas that can hold the whole answer now."""
        columns, tokens = self.columns, most_tokens(self.request)
        blocks = columns.blocks_for(tokens)
        able: Flags = columns["room_blocks"] >= blocks
        if self.yields:
            able &= spares(columns, blocks, self.outlook.step_s, self.settings.slack) | self._own
        return able & columns.ready & self.can_hold(tokens)

    @cached_property
    def may_own(self) -> Flags:
        """The replicas that write answers. Those of prefill pools write none that yield: these would slow all prompts.

        With `split_always` they write others as a last resort only.
        """
        columns = self.columns
        keeps_roles = self.settings.split_always or self.yields
        return columns.decodes & ~columns.is_of(Role.PREFILL) if keeps_roles else columns.decodes

    @property
    def helpers(self) -> Flags:
        """The replicas that could compute the prompt for another, and whose prompts leave time for it."""
        return self.all_helpers & self.has_turn

    @cached_property
    def all_helpers(self) -> Flags:
        """The replicas that could compute the prompt for another. They need no free blocks, because prefills queue."""
        columns = self.columns
        able = columns.ready & columns.prefills & self.can_hold(self.request.prompt_tokens + 1)
        if not self.settings.moves:
            able &= ~columns.is_of(Role.DECODE)  # vLLM's connector lets a decode replica hand nothing over
        return able

    @cached_property
    def has_turn(self) -> Flags:
        """The replicas whose queue of prompts this one may join."""
        has_turn: Flags = self.outlook.queue_s <= self.longest_queue_s
        if self.yields:
            has_turn &= leaves_one_idle(self.columns, self._own)
            has_turn |= self._own & (self.outlook.queue_s <= OWN_QUEUE_S)
        return has_turn

    @cached_property
    def _own(self) -> Flags:
        """The replicas of pools that take nothing but what yields: there it leaves others nothing."""
        own: Flags = np.array([kind.pool in self.settings.own for kind in self.columns.kinds] or [False])
        return own[self.columns.kind]

    @property
    def longest_queue_s(self) -> float:
        """The most predicted seconds of prompts behind which this one is placed."""
        limit_s = LONGEST_QUEUE_S if self.yields else self.settings.prefill_queue_s
        return min(math.inf if limit_s is None else limit_s, TURN_SHARE * self.objectives[0])

    @cached_property
    def pair_owners(self) -> Flags:
        """The owners that another replica could compute the prompt for."""
        if Mode.DISAGGREGATED not in self.modes:
            return np.zeros(len(self.owners), np.bool_)
        return self.owners if self.settings.moves else self.owners & ~self.columns.is_of(Role.PREFILL)

    @property
    def alone(self) -> Flags:
        """The replicas that could serve the request whole, and whose prompts leave time for it."""
        return self.alone_with_room & self.has_turn

    @cached_property
    def alone_with_room(self) -> Flags:
        """The replicas that could serve the request whole.

        A strict decode replica does so for requests that cannot be split, a strict prefill replica for answers of one
        token, which take no decode step.
        """
        columns, modes = self.columns, self.modes
        of_prefill = columns.is_of(Role.PREFILL)
        able = np.zeros(len(of_prefill), np.bool_)
        if Mode.DECODE_LOCAL in modes:
            able |= ~of_prefill & (columns.prefills | (Mode.DISAGGREGATED not in modes))
        if Mode.PREFILL_LOCAL in modes:
            has_other = self.yields and (columns.ready & ~of_prefill).any()
            decodes = columns.decodes & ~np.bool_(has_other)
            able |= of_prefill & (decodes | (modes[0] is Mode.PREFILL_LOCAL))
        return self.has_room & able

    def by_role(self) -> Iterator[tuple[Flags, Flags | None]]:
        """The ways that keep to the roles of the pools, best first: owners and helpers, or None for one replica.

        A replica of a prefill pool decodes only where the request asks for it first, or where no other is up.
        """
        of_prefill, of_decode = self.columns.is_of(Role.PREFILL), self.columns.is_of(Role.DECODE)
        for mode in self.modes:
            if mode is Mode.DISAGGREGATED:
                yield self.pair_owners & ~of_prefill, self.helpers & ~of_decode
            elif mode is Mode.DECODE_LOCAL:
                yield self.alone & ~of_prefill, None
            elif mode is self.modes[0] or not (self.columns.ready & ~of_prefill).any():
                yield self.alone & of_prefill, None

    def can_hold(self, tokens: int) -> Flags:
        """The replicas that could hold so many tokens if they were empty, and whose pools take such a request."""
        return _can_hold(self.request, self.columns, tokens, self.settings.limits)


def _modes(request: SessionRequest, settings: PlacementSettings) -> tuple[Mode, ...]:
    if not request.allowed:
        raise ValueError(f"session {request.session_id} allows no mode")
    if is_short(request, settings):
        return tuple(mode for mode in request.allowed if mode is not Mode.DISAGGREGATED)
    return request.allowed


def is_short(request: SessionRequest, settings: PlacementSettings) -> bool:
    """Whether a prompt that could be split is too short for that, by the configuration."""
    has_choice = {Mode.DISAGGREGATED, Mode.DECODE_LOCAL} <= set(request.allowed)
    return has_choice and request.prompt_tokens < settings.split_min_prompt_tokens


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
    """The replica that a request claims, to decode there, when it has waited for long.

    None where none is ready that could hold it. Of the ready replicas that could hold the request if they were empty,
    it is the one with the most free blocks. `limits`: by pool.
    """
    columns = view.columns
    able = np.flatnonzero(
        columns.ready & columns.decodes & _can_hold(request, columns, most_tokens(request), limits or {})
    )
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
