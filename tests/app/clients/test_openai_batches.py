"""What a user of OpenAI's own client sees of files and batches: the real ingress over mock engines, over HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from configs.schema import BatchesConfig, BatonConfig, ClassConfig
from load_tests.harness.control_plane import PATIENCE_S, config, in_process
from load_tests.harness.control_plane.server import served
from tests.load_tests.traffic.servers import serving

MODEL = "smollm2-135m-instruct"
CHAT = "/v1/chat/completions"
pytestmark = pytest.mark.asyncio(loop_scope="module")


def settings(folder: Path) -> BatonConfig:
    """The room for waiting is small, so lines are refused and must come again."""
    made = config(scale=4)
    batches = BatchesConfig(database_url=f"sqlite:///{folder / 'batches.db'}", files_url=str(folder / "files"))
    ingress = made.ingress.model_copy(update={"batches": batches, "default_max_tokens": 8})
    classes = {"chat": ClassConfig(), "batch": ClassConfig(rank=1, max_queued=2)}
    placement = made.placement.model_copy(update={"classes": classes, "default_class": "chat"})
    return BatonConfig.model_validate(made.model_copy(update={"ingress": ingress, "placement": placement}).model_dump())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    made = settings(tmp_path_factory.mktemp("batches"))
    async with in_process(made) as plane, served(plane, made) as server, serving(server.gateway) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="a", max_retries=0) as asked:
            yield asked
        await server.settle(plane)


def lines(count: int, url: str = CHAT, **body: Any) -> bytes:
    made = []
    for number in range(count):
        asked = {"messages": [{"role": "user", "content": f"Line {number}"}]} if url == CHAT else {}
        whole = {"model": MODEL, **asked, **body}
        made.append(json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": url, "body": whole}))
    return "\n".join(made).encode()


async def begun(client: openai.AsyncOpenAI, content: bytes, url: Any = CHAT) -> Any:
    file = await client.files.create(file=("lines.jsonl", io.BytesIO(content)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")


async def over(client: openai.AsyncOpenAI, batch: Any) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline_s, batch
        await asyncio.sleep(0.05)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def read(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


async def test_a_batch_of_chats(client: openai.AsyncOpenAI) -> None:
    batch = await over(client, await begun(client, lines(60)))
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 60, 0)
    found = await read(client, batch.output_file_id)
    assert [each["custom_id"] for each in found] == [f"id-{number}" for number in range(60)]
    for each in found:
        answer = openai.types.chat.ChatCompletion.model_validate(each["response"]["body"])
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert each["response"]["request_id"]
    assert batch.usage.total_tokens == sum(each["response"]["body"]["usage"]["total_tokens"] for each in found)
    assert (await client.batches.list(limit=1)).data[0].id == batch.id


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 4}, "text_completion"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 8}, "response"),
    ],
)
async def test_batches_of_the_other_routes(client: openai.AsyncOpenAI, url: str, body: Any, kind: str) -> None:
    batch = await over(client, await begun(client, lines(3, url, **body), url))
    assert batch.request_counts.completed == 3, await read(client, batch.error_file_id)
    assert {each["response"]["body"]["object"] for each in await read(client, batch.output_file_id)} == {kind}


async def test_what_vllms_server_refuses_is_that_lines_error(client: openai.AsyncOpenAI) -> None:
    content = b"\n".join(
        [lines(1), lines(1, temperature=-1).replace(b"id-0", b"id-1"), lines(1, model="x").replace(b"id-0", b"id-2")]
    )
    batch = await over(client, await begun(client, content))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
    errors = await read(client, batch.error_file_id)
    assert [(each["custom_id"], each["response"]["status_code"]) for each in errors] == [("id-1", 400), ("id-2", 404)]
    assert all(each["response"]["body"]["error"]["message"] for each in errors)


async def test_a_batch_is_cancelled(client: openai.AsyncOpenAI) -> None:
    batch = await begun(client, lines(500, max_tokens=300, ignore_eos=True))
    while not batch.in_progress_at:
        batch = await client.batches.retrieve(batch.id)
        await asyncio.sleep(0.01)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    batch = await over(client, batch)
    assert batch.status == "cancelled"
    found = [each for file in (batch.output_file_id, batch.error_file_id) for each in await read(client, file)]
    assert sorted(each["custom_id"] for each in found) == sorted(f"id-{number}" for number in range(500))


async def test_files_are_listed_read_and_deleted(client: openai.AsyncOpenAI) -> None:
    content = lines(2)
    made = [await client.files.create(file=("a.jsonl", content), purpose="batch") for _ in range(3)]
    listed = [file async for file in client.files.list(purpose="batch", limit=2)]
    assert [file.id for file in listed][:3] == [file.id for file in reversed(made)]
    assert (await client.files.content(made[0].id)).content == content
    assert (await client.files.retrieve(made[0].id)).bytes == len(content)
    assert (await client.files.delete(made[0].id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made[0].id)


async def test_errors_are_openais(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.batches.retrieve("batch_x")
    assert missing.value.code == "batch_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.files.create(file=b"x", purpose="fine-tune")
    assert (wrong.value.code, wrong.value.param) == ("bad_batch_request", "purpose")
    with pytest.raises(openai.NotFoundError):
        await client.with_options(api_key="b").files.retrieve((await client.files.list()).data[0].id)
