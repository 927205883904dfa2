"""`/v1/files` and `/v1/batches`, as OpenAI defines them. Pure ASGI, behind the check of API keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import StreamingResponse

from app.batches import batch_rows, file_rows, wishes
from app.batches.records import Asked, Batch, File, new_id, page
from app.batches.stores import Stores
from app.batches.uploads import ClientLeft, next_message, upload
from app.errors import Answer, BodyTooLarge, MethodNotAllowed, RequestError, answer
from app.held_response import ASGIApp, Receive, Scope, Send, respond
from app.request_identity import owner_of
from app.timings import TIMINGS, Timings
from deployments.errors import StoreAway

MOST_BODY_BYTES = 64 * 1024
"""Of a request for a new batch, whose metadata is the most of it."""


class BatchRoutes:
    """`most_file_bytes`: of an upload. `most_window_s`: the longest completion window.

    `check`: raises RequestError for a request whose key may have no batches. `wake`: is called when a batch has come or
    was cancelled.
    """

    def __init__(
        self,
        stores: Stores,
        most_file_bytes: int,
        most_window_s: int,
        check: Callable[[Scope], object] = lambda scope: None,
        wake: Callable[[], None] = lambda: None,
        timings: Timings = TIMINGS,
    ) -> None:
        self._stores, self._check, self._wake, self._timings = stores, check, wake, timings
        self._most_file_bytes, self._most_window_s = most_file_bytes, most_window_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        try:
            found = await self._answer(scope, receive, path)
        except (RequestError, StoreAway) as error:
            found = answer(error)
        except ClientLeft:
            return
        if isinstance(found, Answer):
            await respond(send, found)
        else:
            await found(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, path: str) -> Answer | ASGIApp:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        owner = owner_of(scope)
        match method, path.split("/")[2:]:
            case "POST", ["files"]:
                return await self._upload(scope, receive)
            case "GET", ["files"]:
                return await self._files(owner, scope["query_string"])
            case "GET", ["files", file_id]:
                return _shown(await self._file(file_id, owner))
            case "DELETE", ["files", file_id]:
                return await self._delete(file_id, owner)
            case "GET", ["files", file_id, "content"]:
                return await self._content(await self._file(file_id, owner))
            case "POST", ["batches"]:
                return await self._create(scope, receive, owner)
            case "GET", ["batches"]:
                return await self._batches(owner, scope["query_string"])
            case "GET", ["batches", batch_id]:
                return _shown(await self._stores.database.read(lambda c: batch_rows.get(c, batch_id, owner)))
            case "POST", ["batches", batch_id, "cancel"]:
                return await self._cancel(batch_id, owner)
        raise MethodNotAllowed(f"{scope['path'][:200]} does not answer {scope['method']}")

    # ---- files

    async def _upload(self, scope: Scope, receive: Receive) -> Answer:
        self._check(scope)
        return _shown(await upload(self._stores, scope, receive, self._most_file_bytes, self._timings.body_s))

    async def _file(self, file_id: str, owner: str) -> File:
        now_s = self._stores.clock()
        return await self._stores.database.read(lambda c: file_rows.get(c, file_id, owner, now_s))

    async def _files(self, owner: str, query: bytes) -> Answer:
        asked, purpose = wishes.page_of(query, 10_000, 10_000)
        now_s = self._stores.clock()
        files, more = await self._stores.database.read(lambda c: file_rows.listed(c, owner, asked, purpose, now_s))
        return Answer(200, page([file.shown() for file in files], more))

    async def _delete(self, file_id: str, owner: str) -> Answer:
        now_s = self._stores.clock()
        await self._stores.database.write(lambda c: file_rows.delete(c, file_id, owner, now_s))
        await self._stores.remove(file_id)
        return Answer(200, {"id": file_id, "object": "file", "deleted": True})

    async def _content(self, file: File) -> ASGIApp:
        reader = await self._stores.blobs.reader(file.id)

        async def send_it(scope: Scope, receive: Receive, send: Send) -> None:
            headers = {"content-length": str(file.bytes), "content-disposition": "attachment"}
            response = StreamingResponse(reader.pieces(), 200, headers, "application/octet-stream")
            try:
                await response(scope, receive, send)
            finally:
                await asyncio.shield(reader.close())

        return send_it

    # ---- batches

    async def _create(self, scope: Scope, receive: Receive, owner: str) -> Answer:
        self._check(scope)
        asked = wishes.asked(await self._body(receive), self._most_window_s)
        batch = await self._created(asked, owner)
        self._wake()
        return _shown(batch)

    async def _created(self, asked: Asked, owner: str) -> Batch:
        now_s, stores = self._stores.clock(), self._stores
        return await stores.database.write(
            lambda c: batch_rows.create(c, new_id("batch_"), owner, asked, stores.quota, now_s)
        )

    async def _batches(self, owner: str, query: bytes) -> Answer:
        asked, _ = wishes.page_of(query, 20, 100)
        batches, more = await self._stores.database.read(lambda c: batch_rows.listed(c, owner, asked))
        return Answer(200, page([batch.shown() for batch in batches], more))

    async def _cancel(self, batch_id: str, owner: str) -> Answer:
        now_s = self._stores.clock()
        batch = await self._stores.database.write(lambda c: batch_rows.cancel(c, batch_id, owner, now_s))
        self._wake()
        return _shown(batch)

    async def _body(self, receive: Receive) -> bytes:
        body, more = b"", True
        while more:
            message = await next_message(receive, self._timings.body_s)
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MOST_BODY_BYTES:
                raise BodyTooLarge(f"the request body is over {MOST_BODY_BYTES} bytes")
        return body


def _shown(what: File | Batch) -> Answer:
    return Answer(200, what.shown())
