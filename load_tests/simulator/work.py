"""One sequence on one replica."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.messages import NOTHING, FetchPlan, Reservation


@dataclass(slots=True, eq=False)
class Work:
    """What a replica has to do for a session, and how much is done. Lengths are in tokens.

    `outputs`: tokens to generate here. `reserved`: what its placement reserved here. `loads`: the KV of its prompt
    comes from another replica. `keeps`: its blocks stay after its last token, until `Replica.release`. `generated`:
    tokens so far, including those of the other replica. `computed`: while it prefills, the tokens of `target` whose KV
    is there. `target` grows when a preempted sequence computes its answer again. `held`: the leading hashed blocks that
    it holds by their hashes. `is_sharing`: whether the next full blocks may also be found by their hashes. `tpot_s`:
    the objective of its class; 0: none. `fetch`: the part of its prompt that comes from another replica's cache.
    `is_given_up`: it has moved, and its KV is read from here.
    """

    session_id: str
    epoch: int
    prompt_tokens: int
    outputs: int
    hashes: tuple[int, ...] = ()
    reserved: Reservation = NOTHING
    loads: bool = False
    keeps: bool = False
    generated: int = 0
    computed: int = 0
    target: int = 0
    cached_tokens: int = 0
    held: int = 0
    is_sharing: bool = True
    is_offered: bool = False
    tpot_s: float = 0.0
    fetch: FetchPlan | None = None
    is_given_up: bool = False

    def __post_init__(self) -> None:
        self.target = self.prompt_tokens

    @property
    def context(self) -> int:
        """The number of tokens whose KV it holds when it decodes: all but the newest."""
        return self.prompt_tokens + self.generated - 1

    @property
    def reservation(self) -> Reservation:
        """The memory that it may still take."""
        return self.reserved.prefilled() if self.generated else self.reserved
