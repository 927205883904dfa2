"""The KV tiers of a worker. Where the scheduler is in another process, `shared_tiers` tells it what they have.

When a request is over, its blocks are stored as far as vLLM's prefix cache still has them. A request whose prompt goes
on in a tier behind what the prefix cache has loads those blocks before it computes. Both are done on the store's
thread: an engine step waits for neither.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from transfer.memory.layout import KVLayout
from transfer.store.block_memory import BlockMemory, HostMemory, Lender, TensorMemory
from transfer.store.block_store import BlockStore
from transfer.store.config import DiskConfig, StoreConfig
from transfer.store.ledger import Changes
from transfer.store.refs import StoreError
from transfer.store.worker import StoreResults, StoreWorker

logger = logging.getLogger("baton.store")

LOAD_WAIT_S = 10.0
"""The longest that a request waits for a load: a disk may hang. Then it computes its prompt."""


class Tiers:
    """The engine's thread calls its methods. Where the store's thread has died, the engine goes on without tiers."""

    def __init__(self, store: BlockStore) -> None:
        self._wake: Callable[[], None] = lambda: None
        self._open: dict[str, float] = {}  # the loads, and when each is given up, in seconds of the monotonic clock
        self._is_alive = True
        self._worker = StoreWorker(store, lambda: self._wake())

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the blocks, from the first on, are in a tier now."""
        return self._worker.leading(keys) if self._is_alive else 0

    def keep(self, keys: Sequence[bytes], lender: Lender) -> None:
        """Store the blocks of one prompt, from its first on, as far as `lender` has them. Not done in a long queue."""
        self._worker.store_lent(keys, lender)

    def load(self, request_id: str, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Load blocks into `blocks` of the engine's memory: the store's, until `take_loaded` has the request."""
        is_queued = self._worker.load(request_id, keys, blocks)
        self._open[request_id] = time.monotonic() + LOAD_WAIT_S if is_queued else 0.0
        if not is_queued:
            self._wake()

    def take_loaded(self) -> dict[str, int]:
        """The loads that have ended, by request: how many of its blocks, from the first on, have their KV now."""
        try:
            results = self._worker.take_results()
        except StoreError as error:
            return self._lost(error)
        late = [request_id for request_id, until_s in self._open.items() if until_s <= time.monotonic()]
        loaded = {request_id: blocks for request_id, blocks in _leading_of(results).items() if request_id in self._open}
        for request_id in late:
            self._worker.give_up(request_id)
        loaded = dict.fromkeys(late, 0) | loaded
        for request_id in loaded:
            del self._open[request_id]
        return loaded

    def take_changes(self) -> Changes:
        """Which blocks have come into a tier (True) or gone (False) since the last call. Any thread may call it."""
        return self._worker.take_changes()

    @property
    def has_news(self) -> bool:
        """Whether `take_loaded` may have something."""
        return self._is_alive and (self._worker.has_news or 0.0 in self._open.values())

    def on_news(self, wake: Callable[[], None]) -> None:
        """The store's thread calls `wake` when there is news."""
        self._wake = wake

    def counters(self) -> dict[str, float]:
        """Those of the store; see `transfer.store.ledger.COUNTERS`."""
        return {f"tier_{name}": value for name, value in self._worker.counters().items()}

    def close(self) -> None:
        """End the store's thread; idempotent. What is on the disk stays."""
        self._worker.close()

    def _lost(self, error: StoreError) -> dict[str, int]:
        """Nothing is loaded any more: the thread has died."""
        if self._is_alive:
            logger.error("the engine goes on without its KV tiers: %r", error.__cause__)
        self._is_alive = False
        lost, self._open = dict.fromkeys(self._open, 0), {}
        return lost


def _leading_of(results: StoreResults) -> dict[str, int]:
    return {request_id: sum(1 for _ in takewhile(bool, done)) for request_id, done in results.loaded.items()}


def open_tiers(
    settings: Mapping[str, Any] | None, layout: KVLayout, caches: Sequence[torch.Tensor], weights: Callable[[], str]
) -> Tiers | None:
    """The tiers of a worker with these KV caches; None where `settings` has none.

    `settings`: `host_bytes`, and `disk_path` and `disk_bytes` or None. `weights`: names the weights. Raises OSError
    where there is no memory for the host tier.
    """
    if not settings:
        return None
    memory: BlockMemory = HostMemory(layout) if layout.device == "cpu" else TensorMemory(caches)
    place: dict[str, Any] = {"rank": layout.rank, "workers": layout.workers, "layers": layout.num_layers}
    place |= {"bytes": memory.block_bytes} | ({"stages": layout.stages} if layout.stages else {})
    fingerprint = json.dumps({**layout.facts, **place, "weights": weights()}, sort_keys=True)
    disk = DiskConfig(Path(settings["disk_path"]), settings["disk_bytes"]) if settings["disk_path"] else None
    return Tiers(BlockStore(memory, StoreConfig(fingerprint, settings["host_bytes"], disk)))
