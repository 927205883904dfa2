"""What a line becomes: a line of the output file, or one of the error file, in OpenAI's shape. Pure."""

from __future__ import annotations

import json

import msgspec

from app.batches.line_request import BadLine
from app.batches.line_rows import Result
from app.batches.records import Usage, new_id


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Chats and completions have the first names, responses the others."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_ANSWERS = msgspec.json.Decoder(_Answer)


def answered(line: int, custom_id: str, request_id: str, status: int, body: bytes) -> Result:
    """The result of a request that has an HTTP response. `body`: JSON."""
    if b"\n" in body:
        body = json.dumps(json.loads(body)).encode()
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    is_ok = status == 200
    return Result(line, is_ok, _text(custom_id, response, None), _usage(body) if is_ok else Usage())


def unanswered(line: int, custom_id: str | None, code: str, message: str) -> Result:
    """The result of a line that has no response."""
    return Result(line, False, _text(custom_id, None, {"code": code, "message": message}))


def refused(line: int, error: BadLine) -> Result:
    """The result of a line that is no request."""
    return unanswered(line, error.custom_id, error.code, str(error))


def _text(custom_id: str | None, response: object, error: object) -> bytes:
    made = {"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(made)


def _usage(body: bytes) -> Usage:
    try:
        found = _ANSWERS.decode(body).usage
    except (msgspec.MsgspecError, ValueError, RecursionError):
        found = None
    if found is None:
        return Usage()
    came = found.prompt_tokens_details or found.input_tokens_details or _Details()
    made = found.completion_tokens_details or found.output_tokens_details or _Details()
    return Usage(
        found.prompt_tokens or found.input_tokens,
        came.cached_tokens or 0,
        found.completion_tokens or found.output_tokens,
        made.reasoning_tokens or 0,
    )
