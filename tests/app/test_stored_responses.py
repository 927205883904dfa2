"""Stored responses over two ingresses that share a store. vLLM's real frontend runs in each, over a scripted core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from starlette.middleware import Middleware
from vllm.v1.engine import EngineCoreOutputs

from app.background import Runs
from app.frontend import build_server
from app.stored_responses import StoredResponses
from app.timings import Timings
from configs.schema import BatonConfig
from deployments.checkpoint.prepare import DEFAULT_CACHE_DIR, DEFAULT_SOURCE, resolve
from deployments.errors import Overloaded, StoreAway, Unavailable
from deployments.stored.calls import A, Call
from deployments.stored.store import LEASE_S, LOST, ResponseStore
from tests.app.streaming import StreamingTransport
from tests.app.test_frontend import MODEL, TEXT, FakeCore, Server

TIMINGS = Timings(report_s=0.02, store_s=2.0)
MOST, PATIENCE_S = 4, 30.0
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Core(FakeCore):
    def go_on(self) -> None:
        """Give the rest of what has stalled."""
        done, self.stall_after = self.stall_after or 0, None
        for request in self.requests:
            for output in list(self._outputs(request))[done:]:
                self.queue.put_nowait(EngineCoreOutputs(outputs=[output]))


class Line:
    """One ingress's way to the store."""

    def __init__(self) -> None:
        self.store = ResponseStore(1, 1.0)
        self.is_away = False

    async def ask(self, call: Call[A]) -> A:
        if self.is_away:
            raise StoreAway("the store of responses cannot be reached")
        return await self.store.ask(call)


class Ingress(Server):
    def __init__(self, llm: Any, app: Any, core: Core, config: BatonConfig, line: Line, runs: Runs) -> None:
        super().__init__(llm, app, core, config)
        self.stalls, self.line, self.runs = core, line, runs
        self.http = httpx.AsyncClient(
            transport=StreamingTransport(self.gateway), base_url="http://baton", timeout=PATIENCE_S
        )
        http: Any = self.http
        self.openai = openai.AsyncOpenAI(http_client=http, base_url="http://baton/v1", api_key="-", max_retries=0)

    def of(self, key: str) -> openai.AsyncOpenAI:
        return self.openai.with_options(api_key=key)

    async def create(self, text: Any = "Hi", key: str = "one", **more: Any) -> Any:
        return await self.of(key).responses.create(model=MODEL, input=text, **more)

    def prompt(self) -> str:
        """What the engine was asked last."""
        return str(self.llm.get_tokenizer().decode(self.core.requests[-1].prompt_token_ids))


class Two:
    """Both ingresses; `now_s`: the store's clock."""

    def __init__(self, a: Ingress, b: Ingress) -> None:
        self.a, self.b = a, b
        self.now_s = 0.0

    def renew(self) -> None:
        """Nothing is stored, and nothing has been asked."""
        self.put_store()
        for ingress in (self.a, self.b):
            ingress.line.is_away = False
            ingress.core.reset()

    def put_store(self) -> None:
        """A store that knows nothing takes the place of the one there is."""
        store = ResponseStore(1_000_000, 600.0, clock=lambda: self.now_s)
        self.a.line.store = self.b.line.store = store

    @property
    def held(self) -> int:
        self.a.line.store.sweep()
        return self.a.line.store.held[0]


async def _ingress(model_path: str) -> Ingress:
    ingress = {"server_args": {"api_key": ["one", "two"]}}
    config = BatonConfig.model_validate({"prefill": {}, "decode": {"main": {}}, "ingress": ingress})
    core, line = Core(), Line()
    runs = Runs(line, MOST, TIMINGS)
    stored = Middleware(StoredResponses, store=line, runs=runs, max_body_bytes=100_000, timings=TIMINGS)
    llm, app = await build_server(config, model_path, core, stored)
    core.script = [*llm.get_tokenizer().encode(TEXT), llm.get_tokenizer().eos_token_id]
    return Ingress(llm, app, core, config, line, runs)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Two]:
    model_path = str(Path(resolve(DEFAULT_SOURCE, DEFAULT_CACHE_DIR)))
    two = Two(await _ingress(model_path), await _ingress(model_path))
    yield two
    for ingress in (two.a, two.b):
        await ingress.http.aclose()
        await ingress.runs.close()
        ingress.llm.shutdown()
        assert ingress.llm.output_handler is not None
        await asyncio.wait([ingress.llm.output_handler], timeout=60)


@pytest_asyncio.fixture(loop_scope="module")
async def two(running: Two) -> AsyncIterator[Two]:
    running.renew()
    yield running
    await until(lambda: not len(running.a.runs) and not len(running.b.runs), "nothing runs in the background")
    for ingress in (running.a, running.b):
        await until(lambda i=ingress: i.llm.get_num_unfinished_requests() == 0, "the frontend has nothing")  # type: ignore[misc]


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition holds, which may be a coroutine."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = condition()
                if isinstance(found, Awaitable):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited for: {what}") from None


async def status_of(ingress: Ingress, response_id: str) -> str:
    return str((await ingress.of("one").responses.retrieve(response_id)).status)


async def reaches(ingress: Ingress, response_id: str, status: str) -> Any:
    async def look() -> bool:
        return await status_of(ingress, response_id) == status

    await until(look, f"it is {status}")
    return await ingress.of("one").responses.retrieve(response_id)


async def test_a_response_is_there_for_its_key_in_every_ingress_until_it_is_deleted(two: Two) -> None:
    made = await two.a.create()
    assert made.output_text == TEXT
    assert made.id.startswith("resp_")
    found = await two.b.of("one").responses.retrieve(made.id)
    assert found.model_dump() == made.model_dump()
    with pytest.raises(openai.NotFoundError):
        await two.b.of("two").responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await two.b.of("two").responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await two.b.create(key="two", previous_response_id=made.id)
    await two.b.of("one").responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await two.a.of("one").responses.retrieve(made.id)
    assert caught.value.code == "response_not_found"
    assert two.held == 0


async def test_a_key_that_the_server_does_not_know_gets_no_further_than_before(two: Two) -> None:
    made = await two.a.create()
    for key in ("three", ""):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        for method, path in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
            answer = await two.a.http.request(method, f"/v1/responses/{made.id}{path}", headers=headers)
            assert answer.status_code == 401


async def test_a_client_does_not_choose_the_id(two: Two) -> None:
    made = await two.a.create()
    again = await two.a.create(key="two", extra_body={"request_id": made.id})
    assert again.id != made.id
    assert (await two.a.of("one").responses.retrieve(made.id)).id == made.id


async def test_a_conversation_goes_on_in_another_ingress(two: Two) -> None:
    first = await two.a.create("Where am I?", instructions="Be short.")
    second = await two.b.create("And where is that?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    await two.a.create([{"role": "user", "content": "Thanks"}], previous_response_id=second.id)
    turns = [
        "user\nWhere am I?",
        f"assistant\n{TEXT.strip()}",
        "user\nAnd where is that?",
        f"assistant\n{TEXT.strip()}",
    ]
    assert [
        part.split("<|im_end|>")[0].replace("\n ", "\n") for part in two.a.prompt().split("<|im_start|>")[2:6]
    ] == turns
    assert "user\nThanks" in two.a.prompt()
    assert "Be short." not in two.a.prompt()


async def test_a_tool_call_is_part_of_the_conversation(two: Two) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    first = await two.a.create([{"role": "user", "content": "Ask f"}, call, result])
    second = await two.b.create("And now?", previous_response_id=first.id)
    assert second.output_text == TEXT
    assert "42" in two.b.prompt()


async def test_input_items_come_in_pages(two: Two) -> None:
    first = await two.a.create("Hi")
    given = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    second = await two.a.create(given, previous_response_id=first.id)
    of = two.b.of("one").responses.input_items
    items: list[Any] = [item async for item in of.list(second.id, order="asc", limit=1)]
    assert [item.role for item in items] == ["user", "assistant", "user", "user"]
    assert [item.content[0].text for item in items] == ["Hi", first.output_text, "one", "two"]
    newest = [item.id async for item in of.list(second.id, limit=3)]
    assert newest == [item.id for item in reversed(items)], "the newest is first, and an id stays"
    assert len(set(newest)) == 4
    page = await of.list(second.id, after=items[2].id, order="asc", limit=100)
    assert ([item.id for item in page.data], page.has_more) == ([items[3].id], False)
    with pytest.raises(openai.NotFoundError):
        await two.b.of("two").responses.input_items.list(second.id)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=nothing"])
async def test_a_wrong_page_is_refused(two: Two, query: str) -> None:
    made = await two.a.create("Hi")
    headers = {"authorization": "Bearer one"}
    reply = await two.a.http.get(f"/v1/responses/{made.id}/input_items?{query}", headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "bad_response_request")


async def test_an_empty_answer_can_be_continued(two: Two) -> None:
    before, two.a.core.script = two.a.core.script, two.a.core.script[-1:]
    try:
        empty = await two.a.create()
    finally:
        two.a.core.script = before
    assert empty.output_text == ""
    assert (await two.a.create(previous_response_id=empty.id)).output_text == TEXT


async def test_a_stream_is_stored_before_it_ends(two: Two) -> None:
    events = [event async for event in await two.a.create(stream=True)]
    last = events[-1]
    assert last.type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    found = await two.b.of("one").responses.retrieve(last.response.id)
    assert found.model_dump() == last.response.model_dump()
    assert events[0].response.id == found.id


async def test_store_false_is_not_stored(two: Two) -> None:
    made = await two.a.create(store=False)
    assert made.output_text == TEXT
    assert two.held == 0
    first = await two.a.create()
    await two.a.create(store=False, previous_response_id=first.id)
    assert TEXT.strip() in two.a.prompt()
    assert two.held == 1


async def test_a_background_response_is_seen_from_any_ingress(two: Two) -> None:
    two.a.core.stall_after = 2
    made = await two.a.create(background=True, metadata={"a": "b"})
    assert (made.status, made.background, made.metadata) == ("queued", True, {"a": "b"})
    await reaches(two.b, made.id, "in_progress")
    with pytest.raises(openai.BadRequestError, match="in_progress"):
        await two.b.create(previous_response_id=made.id)
    two.a.stalls.go_on()
    found = await reaches(two.b, made.id, "completed")
    assert found.output_text == TEXT
    assert found.background
    assert found.usage.output_tokens > 2
    await two.b.create("And?", previous_response_id=made.id)
    assert TEXT.strip() in two.b.prompt()


async def test_a_background_response_is_cancelled_from_any_ingress(two: Two) -> None:
    two.a.core.stall_after = 1
    made = await two.a.create(background=True)
    with pytest.raises(openai.NotFoundError):
        await two.b.of("two").responses.cancel(made.id)
    assert (await two.b.of("one").responses.cancel(made.id)).status == "cancelled"
    await until(lambda: two.a.core.aborted, "its ingress ends it")
    assert (await two.b.of("one").responses.cancel(made.id)).status == "cancelled"
    here = await two.a.create(background=True)
    assert (await two.a.of("one").responses.cancel(here.id)).status == "cancelled"
    await until(lambda: len(two.a.core.aborted) == 2, "this ingress ends it")


async def test_only_a_background_response_can_be_cancelled(two: Two) -> None:
    made = await two.a.create()
    with pytest.raises(openai.BadRequestError, match="background"):
        await two.a.of("one").responses.cancel(made.id)
    with pytest.raises(openai.NotFoundError):
        await two.a.of("one").responses.cancel("resp_unknown")


async def test_a_deleted_background_response_ends(two: Two) -> None:
    two.a.core.stall_after = 1
    made = await two.a.create(background=True)
    await two.b.of("one").responses.delete(made.id)
    await until(lambda: two.a.core.aborted, "its ingress ends it")
    with pytest.raises(openai.NotFoundError):
        await two.a.of("one").responses.retrieve(made.id)
    await until(lambda: two.held == 0, "nothing is kept of it")


async def test_a_background_stream_is_read_from_any_ingress(two: Two) -> None:
    two.a.core.stall_after = 2
    stream = await two.a.create(background=True, stream=True)
    first = await anext(aiter(stream))
    response_id = first.response.id
    await stream.close()
    await reaches(two.b, response_id, "in_progress")
    following = await two.b.of("one").responses.retrieve(response_id, stream=True)
    reader = asyncio.create_task(_all(following))
    two.a.stalls.go_on()
    events = await asyncio.wait_for(reader, PATIENCE_S)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == TEXT
    rest = await _all(await two.b.of("one").responses.retrieve(response_id, stream=True, starting_after=3))
    assert [event.model_dump() for event in rest] == [event.model_dump() for event in events[4:]]


async def test_the_client_that_stays_gets_the_whole_background_stream(two: Two) -> None:
    events = await _all(await two.a.create(background=True, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == TEXT


async def test_what_has_no_events_says_so(two: Two) -> None:
    made = await two.a.create()
    with pytest.raises(openai.BadRequestError, match="stream: true"):
        await two.a.of("one").responses.retrieve(made.id, stream=True)
    with pytest.raises(openai.NotFoundError):
        await two.a.of("one").responses.retrieve("resp_unknown", stream=True)


async def _all(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def test_a_background_request_that_is_wrong_is_refused_at_once(two: Two) -> None:
    with pytest.raises(openai.BadRequestError):
        await two.a.create(background=True, temperature=-1)
    with pytest.raises(openai.BadRequestError):
        await two.a.create("hi " * 3000, background=True)
    with pytest.raises(openai.BadRequestError, match="store"):
        await two.a.create(background=True, store=False)
    with pytest.raises(openai.NotFoundError):
        await two.a.of("one").responses.create(model="other", input="Hi", background=True)
    assert two.a.core.requests == []
    assert two.held == 0


@pytest.mark.parametrize("wrong", [{"background": "yes"}, {"store": 1}, {"stream": "no"}, {"previous_response_id": 5}])
async def test_a_wrong_type_is_refused(two: Two, wrong: dict[str, Any]) -> None:
    body = {"model": MODEL, "input": "Hi", **wrong}
    answer = await two.a.http.post("/v1/responses", json=body, headers={"authorization": "Bearer one"})
    assert answer.status_code == 400
    assert next(iter(wrong)) in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"{nope", b"[1]", b'{"input": {}}', b"[" * 100_000, b'{"input": "\xff"}'])
async def test_a_body_that_is_no_request_is_for_vllms_server_to_refuse(two: Two, content: bytes) -> None:
    headers = {"authorization": "Bearer one", "content-type": "application/json"}
    answer = await two.a.http.post("/v1/responses", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


async def test_a_background_response_that_fails_says_why(two: Two) -> None:
    two.a.core.failure = Overloaded("full", 2.5)
    made = await two.a.create(background=True)
    found = await reaches(two.b, made.id, "failed")
    assert "full" in found.error.message
    with pytest.raises(openai.BadRequestError, match="failed"):
        await two.a.create(previous_response_id=made.id)
    events = await _all(await two.a.create(background=True, stream=True))
    assert events[-1].type == "response.failed"
    assert "full" in events[-1].response.error.message


async def test_an_ingress_that_is_stopped_fails_its_background_responses(two: Two) -> None:
    two.a.core.stall_after = 1
    made = await two.a.create(background=True)
    await reaches(two.b, made.id, "in_progress")
    two.a.core.fail(Unavailable("this server is being stopped"))
    found = await reaches(two.b, made.id, "failed")
    assert "being stopped" in found.error.message
    made = await two.a.create(background=True)
    await two.a.runs.close()
    await two.a.runs.ended()
    found = await two.b.of("one").responses.retrieve(made.id)
    assert found.status == "failed"
    assert found.error is not None
    assert "being stopped" in found.error.message


async def test_the_background_responses_of_an_ingress_that_is_gone_have_failed(two: Two) -> None:
    two.a.core.stall_after = 1
    made = await two.a.create(background=True)
    streamed = await two.a.create(background=True, stream=True)
    response_id = (await anext(aiter(streamed))).response.id
    await streamed.close()
    await reaches(two.b, response_id, "in_progress")
    two.a.line.is_away = True
    following = asyncio.create_task(_all(await two.b.of("one").responses.retrieve(response_id, stream=True)))
    two.now_s += LEASE_S
    found = await two.b.of("one").responses.retrieve(made.id)
    assert found.error is not None
    assert (found.status, found.error.message) == ("failed", LOST)
    events = await asyncio.wait_for(following, PATIENCE_S)
    assert (events[-1].type, events[-1].response.error.message) == ("response.failed", LOST)
    two.a.line.is_away = False  # it was only cut off
    await until(lambda: len(two.a.core.aborted) == 2, "it ends what counts as failed")
    assert await status_of(two.b, made.id) == "failed"


async def test_a_background_response_outlives_the_store(two: Two) -> None:
    two.a.core.stall_after = 2
    over = await two.a.create(background=False, max_output_tokens=1)
    made = await two.a.create(background=True)
    two.put_store()
    with pytest.raises(openai.NotFoundError):
        await two.b.of("one").responses.retrieve(over.id)
    await until(lambda: two.held == 1, "it is there again")
    two.a.stalls.go_on()
    assert (await reaches(two.b, made.id, "completed")).output_text == TEXT


async def test_what_needs_a_store_that_is_away_fails_and_all_else_is_served(two: Two) -> None:
    first = await two.a.create()
    two.a.line.is_away = True
    attempts: list[Callable[[], Awaitable[Any]]] = [
        lambda: two.a.create(previous_response_id=first.id),
        lambda: two.a.create(background=True),
        lambda: two.a.of("one").responses.retrieve(first.id),
        lambda: two.a.of("one").responses.cancel(first.id),
        lambda: two.a.of("one").responses.delete(first.id),
    ]
    for attempt in attempts:
        with pytest.raises(openai.InternalServerError) as caught:
            await attempt()
        assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
    made = await two.a.create()
    assert (made.output_text, made.store) == (TEXT, False)
    assert (await two.a.of("one").chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])).id


async def test_background_responses_are_bounded(two: Two) -> None:
    two.a.core.stall_after = 1
    made = {key: [await two.a.create(key=key, background=True) for _ in range(MOST // 2)] for key in ("one", "two")}
    with pytest.raises(openai.RateLimitError) as caught:
        await two.a.create(background=True)
    assert caught.value.code == "too_many_background"
    await two.a.of("two").responses.cancel(made["two"].pop().id)
    await until(lambda: len(two.a.runs) < MOST, "the cancelled one ends")
    with pytest.raises(openai.RateLimitError) as caught:
        await two.a.create(background=True)
    assert caught.value.code == "too_many_for_client"
    for key, responses in made.items():
        for each in responses:
            await two.a.of(key).responses.cancel(each.id)


async def test_a_conversation_is_bounded_as_a_body_is(two: Two) -> None:
    first = await two.a.create("a")
    body = {"model": MODEL, "input": "x" * 99_900, "previous_response_id": first.id}
    answer = await two.a.http.post("/v1/responses", json=body, headers={"authorization": "Bearer one"})
    assert answer.status_code == 413


async def test_a_failure_of_a_response_that_its_client_waits_for_is_not_stored(two: Two) -> None:
    two.a.core.failure = Overloaded("full", 2.5)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError):
            await two.a.create(stream=stream)
    assert two.held == 0


async def test_a_client_that_leaves_has_stored_nothing(two: Two) -> None:
    two.a.core.stall_after = 1
    asked = asyncio.create_task(two.a.create())
    await until(lambda: two.a.core.requests, "the engine has the request")
    asked.cancel()
    await asyncio.wait([asked])
    two.a.stalls.go_on()
    assert asked.cancelled()
    assert len(two.a.core.aborted) == 1
    assert two.held == 0
