"""A request's part in a handoff, as the cluster says it in `kv_transfer_params`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transfer.channel.outbox import Key
from transfer.vllm.continued_answer import answered

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Part:
    """A request's part in a handoff. `peers`: the other side's workers, by rank."""

    role: str
    key: Key
    peers: list[str]


def part_of(request: Request) -> Part | None:
    """The request's part in a handoff; None when nothing of it is handed over."""
    baton = (request.kv_transfer_params or {}).get("baton")
    return Part(baton["role"], (baton["session"], baton["epoch"]), baton["peers"]) if baton else None


def the_part(request: Request) -> Part:
    """The same of a request that has one."""
    part = part_of(request)
    assert part is not None
    return part


def handed_over(request: Request) -> int:
    """The number of tokens whose KV the handoff carries: the prompt, and what was answered before."""
    return int(request.num_prompt_tokens) + len(answered(request.sampling_params))
