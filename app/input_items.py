"""`GET /v1/responses/{id}/input_items`: what a stored response was made from, in pages, as in OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from app.errors import BadResponseRequest
from deployments.stored.calls import Stored

DEFAULT_LIMIT, MOST = 20, 100
_TEXT_OF = {"assistant": "output_text"}


def page(found: Stored, response_id: str, query: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """One page, the newest item first unless `order=asc`. Raises BadResponseRequest."""
    limit, order = query.get("limit", [str(DEFAULT_LIMIT)])[-1], query.get("order", ["desc"])[-1]
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MOST):
        raise BadResponseRequest(f"limit must be a number from 1 to {MOST}")
    if order not in ("asc", "desc"):
        raise BadResponseRequest("order must be asc or desc")
    given = [item for item in json.loads(found.items) if isinstance(item, dict)]
    items = [_shown(item, response_id, number) for number, item in enumerate(given)]
    if order == "desc":
        items.reverse()
    if "after" in query:
        items = items[_place(items, query["after"][-1]) + 1 :]
    data = items[: int(limit)]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(items) > len(data)}


def _place(items: list[dict[str, Any]], after: str) -> int:
    """Where the item is. The last one of its id, so that pages come to an end where a client has given an id twice."""
    places = [place for place, item in enumerate(items) if item["id"] == after]
    if not places:
        raise BadResponseRequest("after must be the id of an input item of this response")
    return places[-1]


def _shown(item: dict[str, Any], response_id: str, number: int) -> dict[str, Any]:
    """An item with an id, the same at every call, and its text as a list of contents."""
    own = item.get("id")
    kind = item.get("type") or "message"
    prefix = "msg" if kind == "message" else "item"
    shown = {**item, "type": kind}
    shown["id"] = own if isinstance(own, str) and own else f"{prefix}_{response_id.removeprefix('resp_')}_{number}"
    if kind == "message" and isinstance(item.get("content"), str):
        text = {"type": _TEXT_OF.get(str(item.get("role")), "input_text"), "text": item["content"]}
        shown["content"] = [{**text, "annotations": []} if text["type"] == "output_text" else text]
    return shown
