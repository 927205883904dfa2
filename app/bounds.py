"""What a request would become, counted from its body before any of it is placed, and what one client may have at once.

The body is parsed here for its sizes alone: vLLM's server parses and validates it later. What cannot be parsed counts
as one answer, and vLLM's server says what is wrong with it.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import Any

import msgspec

from app.errors import TooManyForClient
from configs.schema import IngressConfig
from deployments.errors import TooManyParts

_RAW = msgspec.Raw(b"")
_LISTED = ("prompt", "prompt_embeds")


class _Sizes(msgspec.Struct):
    n: msgspec.Raw = _RAW
    prompt: msgspec.Raw = _RAW
    prompt_embeds: msgspec.Raw = _RAW
    messages: msgspec.Raw = _RAW


_SIZES = msgspec.json.Decoder(_Sizes)
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_ANY = msgspec.json.Decoder()


def parts_of(body: bytes) -> int:
    """The number of answers that a request asks for: `n` for each of its prompts or conversations."""
    if not body:
        return 1
    try:
        sizes = _SIZES.decode(body)
        count, prompts = _ANY.decode(sizes.n) if sizes.n else 1, _prompts(sizes)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        count, prompts = _leniently(body)
    return max(1, _number(count)) * max(1, prompts)


def _prompts(sizes: _Sizes) -> int:
    """A list of numbers is one prompt, and a list of messages is one conversation."""
    return max(
        _items(sizes.prompt, of=b'"['),
        _items(sizes.prompt_embeds, of=b'"'),
        _items(sizes.messages, of=b"["),
    )


def _items(value: msgspec.Raw, of: bytes) -> int:
    """The length of a list whose first item begins with one of these characters; otherwise 1."""
    text = bytes(memoryview(value)[:64]).lstrip() if value else b""
    first = text[1:].lstrip()[:1]
    return len(_ITEMS.decode(value)) if text[:1] == b"[" and first and first in of else 1


def _leniently(body: bytes) -> tuple[Any, int]:
    """The same of a body that Python's own parser takes and a strict one does not, such as one with a NaN."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return 1, 1
    if not isinstance(parsed, dict):
        return 1, 1
    listed = [value for name in _LISTED if isinstance(value := parsed.get(name), list)]
    prompts = [len(value) for value in listed if value and isinstance(value[0], str | list)]
    messages = parsed.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[0], list):
        prompts.append(len(messages))
    return parsed.get("n", 1), max(prompts, default=1)


def _number(value: Any) -> int:
    """As vLLM's server reads a whole number: it takes 2.0 and "2" as well."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return int(value)
    return 1


class Bounds:
    """The most answers of a request, and of all requests of one client, in this process."""

    def __init__(self, config: IngressConfig, max_queued_requests: int) -> None:
        self.most_parts = min(config.max_parts, max_queued_requests or config.max_parts)
        self._most_of_client = config.max_client_parts
        self._open: Counter[str] = Counter()

    def enter(self, client: str, body: bytes) -> int:
        """The answers that a request would become; they count as its client's until `leave`.

        Raises TooManyParts and TooManyForClient.
        """
        parts = parts_of(body)
        if parts > self.most_parts:
            raise TooManyParts(f"the request would become {parts} answers, and one may have {self.most_parts} at most")
        if self._open[client] + parts > self._most_of_client:
            most = self._most_of_client
            raise TooManyForClient(f"this client has {self._open[client]} answers open, and may have {most}")
        self._open[client] += parts
        return parts

    def leave(self, client: str, parts: int) -> None:
        """The request of a client is over."""
        self._open[client] -= parts
        if not self._open[client]:
            del self._open[client]
