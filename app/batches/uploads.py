"""`POST /v1/files`: a form whose file goes to the store as it comes, and is held in memory by no more than a piece."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from app.batches import file_rows
from app.batches.form import FILE, Form
from app.batches.records import UPLOAD, File
from app.batches.stores import NewFile, Stores
from app.batches.wishes import form_ttl_s
from app.errors import BadBatchRequest, BatchFileTooLarge, BodyTimeout
from app.held_response import Message, Receive, Scope
from app.request_identity import owner_of

LONGEST_NAME = 255


class ClientLeft(Exception):
    """The client went away while it was sending."""


async def upload(stores: Stores, scope: Scope, receive: Receive, most_bytes: int, piece_s: float) -> File:
    """The file that a form has. `piece_s`: the longest wait for each piece of it.

    Raises BadBatchRequest, BatchFileTooLarge, BatchQuotaSpent, BodyTimeout, StoreAway and ClientLeft; then nothing
    is kept.
    """
    headers = {name.lower(): value for name, value in scope["headers"]}
    form = Form(headers.get(b"content-type", b""))
    begun = stores.new_file(owner_of(scope), UPLOAD, "")
    made = await NewFile.begin(stores, begun, stores.quota)
    try:
        await _fill(made, form, receive, most_bytes, piece_s)
        return await _finished(stores, made, form)
    except BaseException:
        await asyncio.shield(made.drop())
        raise


async def _fill(made: NewFile, form: Form, receive: Receive, most_bytes: int, piece_s: float) -> None:
    while not form.is_over:
        message = await next_message(receive, piece_s)
        data = form.feed(message.get("body", b""))
        if made.file.bytes + len(data) > most_bytes:
            raise BatchFileTooLarge(f"the file is over {most_bytes} bytes")
        await made.write(data)
        if not message.get("more_body", False):
            break
    if not form.is_over:
        raise BadBatchRequest("the form ends too early")
    await made.close()


async def next_message(receive: Receive, piece_s: float) -> Message:
    """The next piece of a body. Raises BodyTimeout and ClientLeft."""
    try:
        async with asyncio.timeout(piece_s):
            message = await receive()
    except TimeoutError:
        raise BodyTimeout(f"no more of the body came within {piece_s:.0f} s") from None
    if message["type"] == "http.disconnect":
        raise ClientLeft
    return message


async def _finished(stores: Stores, made: NewFile, form: Form) -> File:
    if form.filename is None:
        raise BadBatchRequest(f"the form has no file: its part must have the name {FILE!r}", FILE)
    if form.fields.get("purpose") != UPLOAD:
        raise BadBatchRequest(f"purpose must be {UPLOAD!r}: files have no other use here", "purpose")
    ttl_s = form_ttl_s(form.fields)
    expires_s = made.file.expires_s if ttl_s is None else made.file.created_s + ttl_s
    file = replace(made.file, filename=form.filename[:LONGEST_NAME], expires_s=expires_s)
    now_s = stores.clock()
    await stores.database.write(lambda connection: file_rows.finish_upload(connection, file, stores.quota, now_s))
    return file
