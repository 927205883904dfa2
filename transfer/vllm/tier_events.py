"""What a replica's tiers hold, as events beside those of vLLM's own prefix cache."""

from __future__ import annotations

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash

from transfer.store.ledger import Changes, Tier

MEDIUM = {Tier.HOST: MEDIUM_CPU, Tier.DISK: MEDIUM_STORAGE}


def tier_events(changes: Changes, block_size: int) -> list[BlockStored | BlockRemoved]:
    """At most two events for each tier: what has gone, and what has come. They have names, and no tokens."""
    events: list[BlockStored | BlockRemoved] = []
    for tier, medium in MEDIUM.items():
        if gone := _named(changes, tier, is_here=False):
            events.append(BlockRemoved(gone, medium))
        if come := _named(changes, tier, is_here=True):
            events.append(BlockStored(come, None, [], block_size, None, medium, None))
    return events


def _named(changes: Changes, tier: Tier, is_here: bool) -> list[ExternalBlockHash]:
    """The blocks of a tier that are there now, or are not, by the names that vLLM gives them in its events."""
    keys = [key for (where, key), is_now in changes.items() if where is tier and is_now is is_here]
    return [maybe_convert_block_hash(BlockHash(key)) for key in keys]
