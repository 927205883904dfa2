"""What requests to `/v1/files` and `/v1/batches` ask for, checked. Pure. Everything raises BadBatchRequest."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from app.batches.file_rows import Page
from app.batches.line_request import ENDPOINTS
from app.batches.records import Asked
from app.errors import BadBatchRequest

MOST_KEYS, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512
LEAST_TTL_S, MOST_TTL_S = 3600, 2_592_000
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_KNOWN = {"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"}


def asked(body: bytes, most_window_s: int) -> Asked:
    """The body of a request for a new batch. `most_window_s`: the longest completion window."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadBatchRequest("the body is no JSON") from error
    if not isinstance(found, dict):
        raise BadBatchRequest("the body must be a JSON object")
    if unknown := sorted(found.keys() - _KNOWN):
        raise BadBatchRequest(f"unknown parameter {unknown[0]!r}", unknown[0][:LONGEST_KEY])
    file_id, endpoint = found.get("input_file_id"), found.get("endpoint")
    if not isinstance(file_id, str) or not file_id:
        raise BadBatchRequest("input_file_id must be the id of a file", "input_file_id")
    if endpoint not in ENDPOINTS:
        raise BadBatchRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
    window = found.get("completion_window")
    window_s = _window_s(window, most_window_s)
    ttl_s = _ttl_s(found.get("output_expires_after"), "output_expires_after")
    return Asked(endpoint, file_id, str(window), window_s, _metadata(found.get("metadata")), ttl_s)


def _window_s(value: Any, most_s: int) -> int:
    matched = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    if matched is None:
        raise BadBatchRequest("completion_window must be a time such as 24h, 30m or 7d", "completion_window")
    window_s = int(matched[1]) * _SECONDS[matched[2]]
    if window_s > most_s:
        raise BadBatchRequest(f"completion_window is over {most_s} s, the most of this server", "completion_window")
    return window_s


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    is_text = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    if not is_text or len(value) > MOST_KEYS:
        raise BadBatchRequest(f"metadata must be an object of at most {MOST_KEYS} strings", "metadata")
    if any(len(key) > LONGEST_KEY or len(text) > LONGEST_VALUE for key, text in value.items()):
        raise BadBatchRequest(
            f"metadata: keys have at most {LONGEST_KEY} characters, values {LONGEST_VALUE}", "metadata"
        )
    return dict(value)


def form_ttl_s(fields: Mapping[str, str]) -> int | None:
    """The seconds after which an uploaded file expires; None where the form does not say it."""
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    number = int(seconds) if seconds is not None and seconds.isdecimal() and len(seconds) < 10 else seconds
    return _ttl_s({"anchor": anchor, "seconds": number}, "expires_after")


def _ttl_s(value: Any, name: str) -> int | None:
    if value is None:
        return None
    seconds = value.get("seconds") if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.get("anchor") not in ("created_at", "file_created_at"):
        raise BadBatchRequest(f"{name} must have the anchor created_at", name)
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not LEAST_TTL_S <= seconds <= MOST_TTL_S:
        raise BadBatchRequest(f"{name}: seconds must be from {LEAST_TTL_S} to {MOST_TTL_S}", name)
    return seconds


def page_of(query: bytes, default: int, most: int) -> tuple[Page, str]:
    """The page that a list's query asks for, and the purpose of files; "": any."""
    found = {name: values[-1] for name, values in parse_qs(query.decode("latin-1")).items()}
    limit, order = found.get("limit", str(default)), found.get("order", "desc")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= most:
        raise BadBatchRequest(f"limit must be from 1 to {most}", "limit")
    if order not in ("asc", "desc"):
        raise BadBatchRequest("order must be asc or desc", "order")
    return Page(int(limit), found.get("after", ""), order == "desc"), found.get("purpose", "")
