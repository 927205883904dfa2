"""The mutator: bodies for every route that takes one, by a seed. Most are valid, at some bound."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from load_tests.fuzz import values
from load_tests.fuzz.fields import CHAT, COMPLETION, DETOKENIZE, MESSAGES, MODEL, RESPONSES, SAMPLING, TOKENIZE
from load_tests.fuzz.values import Draw

SMALL_WORK = 512
"""Tokens that a case may ask for, over all of its answers, where it asks for no more answers than a server takes."""
MOST_PARTS = 256
SHOWN = 1500
"""Bytes of a body that are shown with a fault; `python -m load_tests.fuzz SEED NUMBER` prints all of it."""


def _prompt(draw: random.Random) -> dict[str, Any]:
    many = [values.text(draw) for _ in range(draw.choice((1, 2, 3, 300)))]
    kinds = (values.text(draw), values.text(draw), values.token_ids(draw), many, [values.token_ids(draw)] * 2)
    return {"prompt": draw.choice(kinds)}


def _items(draw: random.Random) -> Any:
    if draw.random() < 0.5:
        return values.text(draw)
    said: list[Any] = [{"role": "user", "content": values.text(draw)}]
    if draw.random() < 0.3:
        said += [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": draw.choice(("{}", "{", ""))},
            {"type": "function_call_output", "call_id": draw.choice(("c", "d")), "output": values.text(draw)},
        ]
    if draw.random() < 0.2:
        said += [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": values.text(draw)}]}]
    if draw.random() < 0.1:
        said += [{"type": draw.choice(("reasoning", "item_reference", "x")), "id": "r", "summary": []}]
    return said


def _blocks(draw: random.Random) -> list[Any]:
    said: list[Any] = [{"role": "user", "content": values.text(draw)}]
    if draw.random() < 0.3:
        use = {"type": "tool_use", "id": "t", "name": "f", "input": draw.choice(({}, {"a": 1}, values.nested(200)))}
        result = {"type": "tool_result", "tool_use_id": draw.choice(("t", "u")), "content": values.text(draw)}
        said += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    if draw.random() < 0.2:
        source = {"type": "base64", "media_type": "image/png", "data": draw.choice(("AAAA", "", "!"))}
        said += [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "x"}]}]
    return said


@dataclass(frozen=True, slots=True)
class _Route:
    """`base`: a valid body. `fields`: what may be changed in it or added to it. `tokens`: the field of its length."""

    path: str
    weight: int
    base: Draw
    fields: Mapping[str, Draw]
    tokens: str | None = None
    streams: bool = True


_ROUTES = (
    _Route("/v1/completions", 25, _prompt, SAMPLING | COMPLETION, "max_tokens"),
    _Route("/v1/chat/completions", 30, lambda d: {"messages": values.messages(d)}, SAMPLING | CHAT, "max_tokens"),
    _Route(
        "/v1/chat/completions/batch",
        8,
        lambda d: {"messages": [values.messages(d) for _ in range(d.choice((1, 2, 3, 300)))]},
        SAMPLING | CHAT,
        "max_tokens",
        streams=False,
    ),
    _Route("/v1/responses", 14, lambda d: {"input": _items(d)}, RESPONSES, "max_output_tokens"),
    _Route("/v1/messages", 14, lambda d: {"messages": _blocks(d), "max_tokens": 8}, MESSAGES, "max_tokens"),
    _Route("/v1/messages/count_tokens", 3, lambda d: {"messages": _blocks(d)}, MESSAGES, streams=False),
    _Route(
        "/tokenize",
        3,
        lambda d: {"prompt": values.text(d)} if d.random() < 0.5 else {"messages": values.messages(d)},
        TOKENIZE | {name: CHAT[name] for name in ("tools", "chat_template_kwargs", "add_generation_prompt")},
        streams=False,
    ),
    _Route("/detokenize", 3, lambda d: {"tokens": values.token_ids(d)}, DETOKENIZE, streams=False),
)
PATHS = tuple(route.path for route in _ROUTES)
GET_PATHS = (
    "/v1/models",
    "/version",
    "/metrics",
    "/openapi.json",
    "/health",
    "/ready",
    "/baton/status",
    "/none",
    "/v1/",
)
METHODS = ("GET", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "ODD")
NO_OBJECTS = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b"1",
    b'"a"',
    b"{",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"a": 1, "a": 2}',
    b"\x00",
    b"[" * 9999,
)
"""Bodies that are no request."""
ASKS_OTHERWISE = 0.03


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `leaves_s`: after so many seconds its client leaves; None: it stays."""

    seed: int
    number: int
    method: str
    path: str
    content: bytes
    streams: bool
    leaves_s: float | None

    def __str__(self) -> str:
        content = self.content[:SHOWN].decode(errors="replace") + ("..." if len(self.content) > SHOWN else "")
        return f"case {self.number} of seed {self.seed}: {self.method} {self.path[:80]} {content}"


def case(seed: int, number: int) -> Case:
    """The case of this number; the same for the same seed."""
    draw = random.Random(f"{seed} {number}")
    if draw.random() < ASKS_OTHERWISE:
        path, query = draw.choice((*PATHS, *GET_PATHS)), draw.choice(("", "", "?a=%00&a=%ff", "?" + "a" * 4000))
        return Case(seed, number, draw.choice(METHODS), path + query, draw.choice(NO_OBJECTS), False, None)
    (route,) = draw.choices(_ROUTES, [route.weight for route in _ROUTES])
    body = {"model": MODEL, **route.base(draw)}
    if route.streams and draw.random() < 0.4:
        body["stream"] = True
    for name in draw.sample(sorted(route.fields), k=min(len(route.fields), draw.choice((0, 1, 1, 1, 2, 2, 4)))):
        body[name] = route.fields[name](draw)
    if draw.random() < 0.12:
        _spoil(draw, body)
    if body.get("echo"):
        body.pop("logprobs", None)  # the mock engines give no logprobs of a prompt
    if route.tokens is not None:
        _bound_work(route.tokens, body)
    leaves_s = draw.choice((0.0, 0.005, 0.05)) if draw.random() < 0.03 else None
    return Case(seed, number, "POST", route.path, _encoded(draw, body), body.get("stream") is True, leaves_s)


def _spoil(draw: random.Random, body: dict[str, Any]) -> None:
    """Take a field away, or put something odd into one, at the top or deeper."""
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = draw.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and draw.random() < 0.6:
            place[key] = place[key].copy()  # the values are shared between cases
            place = place[key]
            continue
        if draw.random() < 0.2:
            del place[key]
        else:
            place[key] = draw.choice((*values.ODD, values.nested(draw.choice(values.DEEP), draw.random() < 0.5)))
        return


def _bound_work(field: str, body: dict[str, Any]) -> None:
    """Many answers that a server takes are short ones, so that a case costs no minutes."""
    prompts = [body[name] for name in ("prompt", "messages") if isinstance(body.get(name), list)]
    parts = max([len(each) for each in prompts if each and isinstance(each[0], str | list)], default=1)
    if isinstance(body.get("n"), int):
        parts *= body["n"]
    if not 1 < parts <= MOST_PARTS:
        return
    most = max(1, SMALL_WORK // parts)
    for name in {field, "max_completion_tokens"} & body.keys() | {field}:
        asked = body.get(name)
        if asked is None or (isinstance(asked, int) and most < asked <= 2048):
            body[name] = most


def _encoded(draw: random.Random, body: dict[str, Any]) -> bytes:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 4 * max(values.DEEP))  # the server, in this process perhaps, keeps its own
    try:
        content = json.dumps(body, ensure_ascii=draw.random() < 0.7).encode(errors="surrogatepass")
    finally:
        sys.setrecursionlimit(limit)
    if draw.random() < 0.004:  # as large as a server takes, and larger
        content += b" " * (draw.choice((4 * 2**20, 4 * 2**20 + 1)) - len(content))
    return content
