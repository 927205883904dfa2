"""A worker tells the scheduler's process what its tiers have, as soon as that changes and not with the next step."""

from __future__ import annotations

import logging
import threading
from multiprocessing import AuthenticationError

from transfer.vllm.remote_library import TIERS, connected
from transfer.vllm.tiers import Tiers

logger = logging.getLogger("baton.store")


class TierNews:
    """In a worker's process, on a thread of its own. Where it cannot connect, this engine loads nothing."""

    def __init__(self, address: str, secret: bytes, rank: int, tiers: Tiers) -> None:
        self._tiers, self._rank = tiers, rank
        self._is_due, self._is_closed = threading.Event(), False
        self._is_due.set()
        tiers.on_news(self._is_due.set)
        threading.Thread(target=self._run, args=(address, secret), name="baton-tier-news", daemon=True).start()

    def close(self) -> None:
        """End the thread, and the connection with it."""
        self._is_closed = True
        self._is_due.set()

    def _run(self, address: str, secret: bytes) -> None:
        try:
            with connected(address, secret, TIERS) as connection:
                while self._is_due.wait() and not self._is_closed:
                    self._is_due.clear()
                    if changes := self._tiers.take_changes():
                        connection.send((self._rank, changes))
        except (OSError, EOFError, AuthenticationError) as error:
            if not self._is_closed:
                logger.warning("the scheduler does not hear what this worker's KV tiers have: %s", repr(error))
