"""What is known of a request when it is placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known when a request arrives. All of it may be empty: then only memory and counts decide.

    `hits`: leading blocks of the prompt in a replica's prefix cache, by replica id. `resident`: how many of them the
    engine's memory has, for replicas whose KV tiers have more. `output_tokens`: the expected
    length of the answer. `trusted`: the pools whose step times were learned. `pinned`: the replicas that the request's
    affinity names. `link_bytes_per_s`: between two replicas; 0 where it is not known.
    `adapter_on`: the replicas that have its LoRA adapter. `adapter_s`: seconds to load that on another; 0: it needs
    none.
    """

    hits: Mapping[str, int] = field(default_factory=dict)
    resident: Mapping[str, int] = field(default_factory=dict)
    output_tokens: float = 0.0
    trusted: frozenset[str] = frozenset()
    pinned: frozenset[str] = frozenset()
    link_bytes_per_s: float = 0.0
    adapter_on: frozenset[str] = frozenset()
    adapter_s: float = 0.0
