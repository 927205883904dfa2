"""The HTTP client: what it sends and when, what it counts as a token, and what it makes of servers that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from load_tests.harness.peers.plain_server import application
from load_tests.traffic.client import Ask, Client, StreamError, Talk, closed_loop, open_loop, tokens_of
from load_tests.traffic.workloads import talks
from tests.load_tests.traffic.servers import serving

pytestmark = pytest.mark.timeout(200)


def event(tokens: list[int]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "x", "token_ids": tokens}]}).encode() + b"\n\n"


def answering(*chunks: bytes, bodies: list[dict[str, Any]] | None = None, pause_s: float = 0.0) -> Starlette:
    """A server that answers every request with these bytes."""

    async def completions(request: Request) -> Response:
        if bodies is not None:
            bodies.append(await request.json())

        async def stream() -> AsyncIterator[bytes]:
            for chunk in chunks:
                await asyncio.sleep(pause_s)
                yield chunk

        return StreamingResponse(stream(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])


async def test_every_token_of_a_stream_has_its_time() -> None:
    async with serving(application(step_s=0.02)) as url, Client([url], "mock") as client:
        (answer,) = await open_loop(client, [Ask(0.05, (1, 2), 5, "short")])
    assert (answer.error, answer.kind, answer.tokens, len(answer.events)) == ("", "short", 5, 5)
    times = [at_s for at_s, _ in answer.events]
    assert times == sorted(times)
    assert answer.due_s == 0.05 <= answer.sent_s < times[0]
    assert times[-1] - answer.sent_s >= 5 * 0.02 * 0.9


async def test_what_is_asked_is_in_the_body() -> None:
    bodies: list[dict[str, Any]] = []
    async with (
        serving(answering(event([1, 2]), bodies=bodies)) as url,
        Client([url], "m", {"top_p": 0.5}) as client,
    ):
        await client.ask(Ask(0.0, (7, 8, 9), 2))
    assert bodies[0].items() >= {"model": "m", "prompt": [7, 8, 9], "max_tokens": 2, "top_p": 0.5}.items()
    assert bodies[0].items() >= {"stream": True, "ignore_eos": True, "temperature": 0}.items()


async def test_an_event_cut_anywhere_is_one_event() -> None:
    whole = event([1]) + event([2, 3])
    for cut in (1, 7, len(whole) // 2, len(whole) - 1):
        async with (
            serving(answering(whole[:cut], whole[cut:], pause_s=0.01)) as url,
            Client([url], "m") as client,
        ):
            answer = await client.ask(Ask(0.0, (1,), 3))
        assert [count for _, count in answer.events] == [1, 2], cut
        assert answer.error == ""


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ((event([1]),), "1 tokens of 3"),
        ((event([1]), b'data: {"error": {"message": "lost"}}\n\n'), "lost"),
        ((event([1]), b"data: {nonsense\n\n"), "StreamError"),
    ],
    ids=["short", "error event", "no event"],
)
async def test_an_answer_that_is_not_whole_says_why(chunks: tuple[bytes, ...], why: str) -> None:
    async with serving(answering(*chunks)) as url, Client([url], "m") as client:
        answer = await client.ask(Ask(0.0, (1,), 3))
    assert why in answer.error
    assert answer.tokens == 1


async def test_a_refusal_and_a_server_that_is_not_there_are_errors() -> None:
    async def refuse(_: Request) -> Response:
        return JSONResponse({"error": {"message": "full"}}, status_code=429)

    refusing = Starlette(routes=[Route("/v1/completions", refuse, methods=["POST"])])
    async with serving(refusing) as url, Client([url], "m") as client:
        answer = await client.ask(Ask(0.0, (1,), 3))
    assert "429" in answer.error
    assert "full" in answer.error
    async with Client([url], "m") as client:
        assert "Connect" in (await client.ask(Ask(0.0, (1,), 3))).error


async def test_a_server_that_does_not_answer_is_given_up() -> None:
    async with serving(application(step_s=30.0)) as url, Client([url], "m", timeout_s=0.2) as client:
        answer = await client.ask(Ask(0.0, (1,), 3))
    assert "Timeout" in answer.error


async def test_urls_take_turns() -> None:
    first: list[dict[str, Any]] = []
    second: list[dict[str, Any]] = []
    async with (
        serving(answering(event([1]), bodies=first)) as one,
        serving(answering(event([1]), bodies=second)) as other,
        Client([one, other], "m") as client,
    ):
        await open_loop(client, [Ask(0.01 * number, (number,), 1) for number in range(6)])
    assert sorted(body["prompt"] for body in first) == [[0], [2], [4]]
    assert sorted(body["prompt"] for body in second) == [[1], [3], [5]]


async def test_the_open_loop_does_not_wait_for_answers() -> None:
    """A server that answers the first request once it has the tenth."""
    all_here = asyncio.Barrier(10)

    async def completions(_: Request) -> Response:
        await all_here.wait()
        return Response(event([1]))

    server = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
    async with serving(server) as url, Client([url], "m") as client:
        answers = await open_loop(client, [Ask(0.01 * number, (1,), 1) for number in range(10)])
    assert not any(answer.error for answer in answers)
    assert all(answer.due_s <= answer.sent_s for answer in answers)


async def test_the_closed_loop_keeps_so_many_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers three at a time, and the clock goes on by a second with each three."""
    waiting: list[asyncio.Event] = []
    turns = 0

    async def completions(_: Request) -> Response:
        nonlocal turns
        waiting.append(asyncio.Event())
        mine = waiting[-1]
        if len(waiting) == 3:
            turns += 1
            while waiting:
                waiting.pop().set()
        await mine.wait()
        return Response(event([1]))

    server = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
    async with serving(server) as url, Client([url], "m") as client:
        monkeypatch.setattr(client, "now_s", lambda: float(turns))
        answers = await closed_loop(client, lambda: Ask(0.0, (1,), 1, "closed"), 3, 3.0)
    assert sorted(answer.due_s for answer in answers) == [0.0] * 3 + [1.0] * 3 + [2.0] * 3
    assert all(answer.kind == "closed" and not answer.error for answer in answers)


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        (b"data: [DONE]", None),
        (b"", None),
        (b": a comment", None),
        (b'data: {"choices": []}', 0),
        (b'data: {"choices": [{"text": "x"}]}', 1),
        (b'data: {"choices": [{"text": ""}]}', 0),
        (b'data: {"choices": [{"text": "", "token_ids": [1, 2]}]}', 2),
        (b'data: {"choices": [{"text": "x", "token_ids": null}]}', 1),
        (b'data: {"choices": [{"text": "x", "token_ids": []}], "usage": null, "error": null}', 0),
    ],
)
def test_tokens_of_a_line(line: bytes, tokens: int | None) -> None:
    found = tokens_of(line)
    assert (found and found[0]) == tokens


def test_a_line_that_is_no_event_raises() -> None:
    with pytest.raises(StreamError):
        tokens_of(b"data: 3")


async def test_a_conversation_repeats_all_that_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []

    async def completions(request: Request) -> Response:
        prompts.append((await request.json())["prompt"])
        return Response(event([7, 8]))

    server = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
    async with serving(server) as url, Client([url], "m") as client:
        monkeypatch.setattr(client, "now_s", lambda: float(len(prompts)))  # a second for each turn
        answers = await closed_loop(client, lambda: Talk(((1, 2), (3,), (4,)), 2, "talk"), 1, 4.0)
    assert prompts == [[1, 2], [1, 2, 7, 8, 3], [1, 2, 7, 8, 3, 7, 8, 4], [1, 2]]
    assert all(answer.kind == "talk" and not answer.error for answer in answers)


def test_turns_grow_by_an_answer_and_a_question() -> None:
    first, second = talks(1), talks(1)
    talk = next(first)
    assert talk == next(second), "a seed makes the same conversations"
    assert [len(question) for question in talk.questions] == [384, 100, 100, 100]
    assert next(first) != talk
