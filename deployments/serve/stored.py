"""The Serve side of the store of responses: a process of its own, so that no admission waits behind an answer's bytes.

Calls go over a Serve handle. That costs milliseconds, once for each stored response, and twice a second for each
ingress that runs background responses.
"""

from __future__ import annotations

import asyncio

from ray.serve.handle import DeploymentHandle

from configs.schema import StoredResponsesConfig
from deployments.errors import StoreAway
from deployments.serve.ports import GONE, ask_handle, last_line
from deployments.stored.calls import A, Call
from deployments.stored.store import ResponseStore

ANSWER_S = 2.0
"""The longest wait for an answer, in seconds."""


class ServeResponseStore(ResponseStore):
    """See `ResponseStore`."""

    def __init__(self, config: StoredResponsesConfig) -> None:
        super().__init__(config.max_bytes, config.ttl_s)

    async def check_health(self) -> None:
        """Serve calls this now and then: what has had its time leaves, also where no call comes."""
        self.sweep()


class StoreClient:
    """`stored.calls.Store` over a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def ask(self, call: Call[A]) -> A:
        """The answer to a call. Raises StoreAway when there is none in time."""
        try:
            async with asyncio.timeout(ANSWER_S):
                answer: A = await ask_handle(self._handle, "ask", call)
        except TimeoutError:
            raise StoreAway(f"the store of responses did not answer within {ANSWER_S:g} s") from None
        except GONE as error:
            raise StoreAway(f"the store of responses cannot be reached: {last_line(error)}") from error
        return answer
