"""One line of an input file: what it asks for, or what is wrong with it. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from app.batches.line_reader import Line

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""What a batch may ask: every route of OpenAI's API that writes an answer here. There are no embeddings."""
LONGEST_ID = 512
PREFIX_BYTES = 8192
_RAW = msgspec.Raw(b"")


class _Line(msgspec.Struct):
    custom_id: msgspec.Raw = _RAW
    method: msgspec.Raw = _RAW
    url: msgspec.Raw = _RAW
    body: msgspec.Raw = _RAW


class _Body(msgspec.Struct):
    model: msgspec.Raw = _RAW
    tools: msgspec.Raw = _RAW
    instructions: msgspec.Raw = _RAW
    messages: msgspec.Raw = _RAW
    prompt: msgspec.Raw = _RAW
    input: msgspec.Raw = _RAW
    stream: msgspec.Raw = _RAW
    background: msgspec.Raw = _RAW
    store: msgspec.Raw = _RAW
    n: msgspec.Raw = _RAW
    max_tokens: msgspec.Raw = _RAW
    max_completion_tokens: msgspec.Raw = _RAW
    max_output_tokens: msgspec.Raw = _RAW


_LINES = msgspec.json.Decoder(_Line)
_BODIES = msgspec.json.Decoder(_Body)
_PREFIX = ("model", "tools", "instructions", "messages", "prompt", "input")
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
USUAL_TOKENS = 512
"""What the answer of a line without a limit is taken to have."""
MOST_DIGITS = 9


class BadLine(Exception):
    """A line that cannot be a request. `custom_id`: None where it says none."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.custom_id = code, custom_id


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A request. `body`: of the HTTP request. `prefix`: requests whose prompts begin alike have it alike so far.

    `prompt_bytes`: about its prompt, beyond `prefix`, too. `answer_tokens`: the most that it asks for; about that.
    """

    line: int
    custom_id: str
    body: bytes
    prefix: bytes
    prompt_bytes: int = 0
    answer_tokens: int = USUAL_TOKENS


def request_of(line: Line, endpoint: str) -> LineRequest:
    """What a line of a batch for `endpoint` asks for. Raises BadLine."""
    if line.text is None:
        raise BadLine("line_too_long", "the line is longer than `ingress.max_body_bytes`")
    try:
        found = _LINES.decode(line.text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"the line is no JSON object: {error}") from error
    custom_id = _custom_id(found)
    if _value(found.method) != "POST":
        raise BadLine("invalid_method", "`method` must be POST", custom_id)
    if _value(found.url) != endpoint:
        raise BadLine("mismatched_endpoint", f"`url` must be the endpoint of the batch, {endpoint}", custom_id)
    text = bytes(found.body)
    try:
        body = _BODIES.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadLine("invalid_request", "`body` must be a JSON object", custom_id) from error
    for name in ("stream", "background"):
        if bytes(getattr(body, name)) == b"true":
            raise BadLine("invalid_request", f"`{name}` cannot be true in a batch", custom_id)
    if endpoint == "/v1/responses" and not bytes(body.store):
        # A batch has the answer in its output file. Only a line that asks for it puts it into the store as well.
        text = json.dumps({**json.loads(text), "store": False}).encode()
    prompt = b"\0".join(bytes(getattr(body, name)) for name in _PREFIX if bytes(getattr(body, name)))
    return LineRequest(line.number, custom_id, text, prompt[:PREFIX_BYTES], len(prompt), _answer_tokens(body))


def _custom_id(found: _Line) -> str:
    custom_id = _value(found.custom_id)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= LONGEST_ID:
        raise BadLine("missing_custom_id", f"`custom_id` must be a string of 1 to {LONGEST_ID} characters")
    return custom_id


def _value(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw) if bytes(raw) else None


def _answer_tokens(body: _Body) -> int:
    """What all of its answers have together at the most. What is wrong with a limit is for the server to say."""
    limits = (number for name in _LIMITS if (number := _number(getattr(body, name))))
    return next(limits, USUAL_TOKENS) * (_number(body.n) or 1)


def _number(raw: msgspec.Raw) -> int:
    """A whole number over 0; 0 for anything else."""
    text = bytes(raw)
    return int(text) if text.isdigit() and len(text) <= MOST_DIGITS else 0
