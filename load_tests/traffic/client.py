"""An HTTP client of an OpenAI server. The client notes when every token of a streamed completion arrives.

Open loop: every request is sent at its time and does not wait for those before it. Closed loop: a fixed number of
requests run at a time, and each is followed by the next, which may be the next turn of a conversation. Requests go to
the base URLs in turn.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

REQUEST_TIMEOUT_S = 600.0
FAILED_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `at_s`: when it is due, in seconds from the start of the run. `prompt`: token ids or text.

    `kind`: groups the figures.
    """

    at_s: float
    prompt: tuple[int, ...] | str
    output_tokens: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation: the prompt of each turn is all that was said before, and the next of `questions`."""

    questions: tuple[tuple[int, ...], ...]
    output_tokens: int
    kind: str = ""


@dataclass(slots=True)
class Answer:
    """The outcome of one request. Times are in seconds from the start of the run.

    `events`: arrival time and number of tokens of each event that had tokens. `error`: why the answer is not whole,
    else "". `token_ids`: the answer, where the server returns them.
    """

    kind: str
    due_s: float
    asked_tokens: int
    sent_s: float = 0.0
    events: list[tuple[float, int]] = field(default_factory=list)
    error: str = ""
    token_ids: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that arrived."""
        return sum(count for _, count in self.events)


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: msgspec.Raw | None = None


_DECODER = msgspec.json.Decoder(_Event)


class StreamError(Exception):
    """The server answered with an error status, or its stream had an error event or a line that is no event."""


def tokens_of(line: bytes) -> tuple[int, list[int]] | None:
    """The number of tokens in one line of an event stream, and their ids where the server returns them.

    None where the line has no data or ends the stream. Without ids, each event with text counts as one token. Raises
    StreamError.
    """
    if not line.startswith(b"data: ") or line == b"data: [DONE]":
        return None
    try:
        event = _DECODER.decode(line[6:])
    except msgspec.DecodeError as error:
        raise StreamError(f"{error}: {line[:200]!r}") from error
    if event.error is not None:
        raise StreamError(bytes(event.error).decode()[:300])
    count = sum(len(c.token_ids) if c.token_ids is not None else bool(c.text) for c in event.choices)
    return count, [token for choice in event.choices for token in choice.token_ids or ()]


class Client:
    """Sends completion requests to `urls` in turn. Use as an async context manager.

    `body`: further fields of every request's body. `timeout_s`: from sending a request to the end of its answer. `key`:
    the API key, if it has one.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        body: dict[str, Any] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        key: str | None = None,
    ) -> None:
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._urls = itertools.cycle(urls)
        fixed = {"model": model, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        self._body = fixed | (body or {})
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._began_s = 0.0

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, connector=connector)
        self.restart()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    def restart(self) -> None:
        """Starts the run now: times count from this call on."""
        self._began_s = asyncio.get_running_loop().time()

    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return asyncio.get_running_loop().time() - self._began_s

    async def ask(self, ask: Ask) -> Answer:
        """Sends one request now and reads its answer to the end. A failure is in the answer's `error`."""
        answer = Answer(ask.kind, ask.at_s, ask.output_tokens, self.now_s())
        body = self._body | {"prompt": ask.prompt, "max_tokens": ask.output_tokens}
        try:
            async with self._http.post(f"{next(self._urls)}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise StreamError(f"status {response.status}: {(await response.text())[:300]}")
                async for line in _lines(response.content):
                    if (found := tokens_of(line)) and found[0]:
                        answer.events.append((self.now_s(), found[0]))
                        answer.token_ids += found[1]
        except (aiohttp.ClientError, TimeoutError, StreamError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        if not answer.error and answer.tokens != answer.asked_tokens:
            answer.error = f"{answer.tokens} tokens of {answer.asked_tokens}"
        return answer


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a body as its bytes arrive. A line may have any length."""
    rest = b""
    async for some in content.iter_any():
        *lines, rest = (rest + some).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


async def open_loop(client: Client, asks: Sequence[Ask]) -> list[Answer]:
    """Sends every request when it is due, and waits for all answers. They are in the order of the requests."""
    client.restart()

    async def one(ask: Ask) -> Answer:
        await asyncio.sleep(ask.at_s - client.now_s())
        return await client.ask(ask)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(ask)) for ask in asks]
    return [task.result() for task in tasks]


async def closed_loop(
    client: Client, make: Callable[[], Ask | Talk], concurrency: int, seconds: float, ramp_s: float = 0.0
) -> list[Answer]:
    """Keeps `concurrency` requests or conversations under way for `seconds`.

    Requests under way at the end are read to their ends, and conversations have no further turn. The first ones are
    spread over `ramp_s`. A request is due when it is sent. After one that failed, the next comes after a short pause.
    """
    client.restart()
    answers: list[Answer] = []

    async def answered(prompt: tuple[int, ...] | str, made: Ask | Talk) -> Answer:
        answer = await client.ask(Ask(client.now_s(), prompt, made.output_tokens, made.kind))
        answers.append(answer)
        if answer.error:
            await asyncio.sleep(FAILED_PAUSE_S)
        return answer

    async def talk(made: Talk) -> None:
        said: tuple[int, ...] = ()
        for question in made.questions:
            answer = await answered(said + question, made)
            if answer.error or client.now_s() >= seconds:
                return
            said += (*question, *answer.token_ids)

    async def worker(number: int) -> None:
        await asyncio.sleep(number / concurrency * ramp_s)
        while client.now_s() < seconds:
            made = make()
            await (talk(made) if isinstance(made, Talk) else answered(made.prompt, made))

    async with asyncio.TaskGroup() as group:
        for number in range(concurrency):
            group.create_task(worker(number))
    return answers
