"""Runs one line as an HTTP request to vLLM's server in this process, as a client's request runs. Pure ASGI.

It waits for what a client is told to wait for: no line gets 429 or 503 while there is time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from app.batches.line_request import LineRequest
from app.batches.line_rows import Result
from app.batches.records import Batch, new_id
from app.batches.results import answered
from app.batches.slots import Slots
from app.body_text import check_text
from app.body_types import check_types
from app.body_values import check_values
from app.bounds import parts_of
from app.errors import Answer, RequestError, answer
from app.held_response import ASGIApp, Exchange, Message, Scope
from app.request_identity import OWNER
from configs.schema import IngressConfig
from deployments.cluster.request_context import RequestContext, current
from deployments.errors import GrammarTooLong, TooManyParts

WAITS = (429, 503)
"""Statuses after which a line is tried again for as long as its batch has time."""
TRIED_AGAIN = (500, 504)
MOST_TRIES = 3
"""A line is tried so often where the server has failed or was too slow."""
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 60.0
_CHATS = ("/v1/chat/completions", "/v1/responses")
Observe = Callable[[RequestContext, int], None]


@dataclass(frozen=True)
class Response:
    """What came back for one try."""

    status: int
    body: bytes
    retry_after_s: float = 0.0
    may_retry: bool = True


logger = logging.getLogger("baton.batches")


class LineCaller:
    """`app`: vLLM's server. `most_parts`: answers that one line may ask for. `priority`: the class of lines."""

    def __init__(
        self, app: ASGIApp, config: IngressConfig, slots: Slots, priority: str, most_parts: int, observe: Observe
    ) -> None:
        self._app, self._config, self._slots = app, config, slots
        self._priority, self._most_parts, self._observe = priority, most_parts, observe

    async def result(self, batch: Batch, request: LineRequest) -> Result:
        """What a line becomes. It takes as long as admission lets it wait."""
        tries, backoff_s = 0, FIRST_BACKOFF_S
        while True:
            request_id = new_id("batch_req_")
            async with self._slots.place():
                response = await self._try(batch, request, request_id)
                self._learn(response)
            tries += 1
            waits = response.status in WAITS
            if not waits and not (response.status in TRIED_AGAIN and response.may_retry and tries < MOST_TRIES):
                return answered(request.line, request.custom_id, request_id, response.status, response.body)
            # Lines that were refused together do not come back together.
            await asyncio.sleep(max(response.retry_after_s, backoff_s) * random.uniform(0.5, 1.5))
            backoff_s = min(LONGEST_BACKOFF_S, 2 * backoff_s)

    def _learn(self, response: Response) -> None:
        if response.status in WAITS:
            self._slots.refused(response.retry_after_s)
        elif response.status < 500:
            self._slots.answered()

    async def _try(self, batch: Batch, request: LineRequest, request_id: str) -> Response:
        scope = self._scope(batch, request, request_id)
        context = RequestContext(
            request_id,
            priority=self._priority,
            client=f"batches of {batch.owner}",
            chat=batch.asked.endpoint in _CHATS,
            namespace=batch.owner if self._config.separate_caches else None,
            most_parts=self._most_parts,
        )
        try:
            check_values(scope, request.body, self._config.max_values, self._config.max_grammar_characters)
            check_text(request.body)
            check_types(request.body)
            if (parts := parts_of(request.body)) > self._most_parts:
                raise TooManyParts(f"the line would become {parts} answers, and may have {self._most_parts} at most")
        except (RequestError, GrammarTooLong, TooManyParts) as error:
            return _of(answer(error))
        return await self._exchange(context, scope, request.body)

    async def _exchange(self, context: RequestContext, scope: Scope, body: bytes) -> Response:
        taken = _Taken()
        token = current.set(context)
        try:
            await Exchange(context, body, _stays, taken.take).run(self._app, scope)
        except Exception as error:
            logger.error("a line of a batch: request %s: %r", context.request_id, error, exc_info=error)
            return _of(answer(error))
        finally:
            current.reset(token)
        self._observe(context, taken.status)
        return taken.response

    def _scope(self, batch: Batch, request: LineRequest, request_id: str) -> Scope:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(request.body)),
            (b"x-request-id", request_id.encode()),
        ]
        path = batch.asked.endpoint
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": None,
            "server": None,
            OWNER: batch.owner,
        }


class _Taken:
    """What the server has sent."""

    def __init__(self) -> None:
        self.status, self._body = 0, bytearray()
        self._headers: dict[bytes, bytes] = {}

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._headers = {name.lower(): value for name, value in message["headers"]}
        else:
            self._body += message.get("body", b"")

    @property
    def response(self) -> Response:
        told = self._headers.get(b"retry-after", b"0")
        may_retry = self._headers.get(b"x-should-retry") != b"false"
        return Response(self.status, bytes(self._body), float(told) if told.isdigit() else 0.0, may_retry)


async def _stays() -> Message:
    """What the client says: nothing. It does not leave."""
    await asyncio.Event().wait()
    raise AssertionError


def _of(refusal: Answer) -> Response:
    return Response(refusal.status, json.dumps(refusal.body).encode())
