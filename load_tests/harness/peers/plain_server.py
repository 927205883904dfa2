"""A plain Starlette server that streams what vLLM's server would stream.

`python -m load_tests.harness.peers.plain_server` starts it.

It parses the request and answers `max_tokens` events, one every `--step-s`. Nothing is computed.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TOKEN_ID = 1000
_HEAD = (
    b'{"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1790000000,"model":"mock",'
    b'"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":'
)
_TAIL = b',"stop_reason":null,"token_ids":[1000],"prompt_token_ids":null}],"usage":null}'
EVENT = b"data: " + _HEAD + b"null" + _TAIL + b"\n\n"
LAST = b"data: " + _HEAD + b'"length"' + _TAIL + b"\n\ndata: [DONE]\n\n"


def application(step_s: float) -> Starlette:
    """The server; each event comes a step after the one before it."""

    async def completions(request: Request) -> Response:
        body = await request.json()
        count = int(body["max_tokens"])
        if body.get("stream"):
            return StreamingResponse(_events(count, step_s), media_type="text/event-stream")
        await asyncio.sleep(count * step_s)
        return JSONResponse({"choices": [{"index": 0, "text": " token" * count, "token_ids": [TOKEN_ID] * count}]})

    return Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])


async def _events(count: int, step_s: float) -> AsyncIterator[bytes]:
    for number in range(count):
        await asyncio.sleep(step_s)
        yield EVENT if number + 1 < count else LAST


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    options = parser.parse_args()
    uvicorn.run(
        application(options.step_s),
        host="127.0.0.1",
        port=options.port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=600,  # by default 5 s: a client that stands still for so long sends into a closed connection
    )
