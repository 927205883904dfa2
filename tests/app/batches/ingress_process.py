"""An ingress with batches over mock engines, in a process that a test kills: `python -m ... FOLDER LINES`.

So many lines are answered; then answers are computed, and held. With `python -m ... FOLDER LINES real` the engines are
real ones: prefill and decode, each in a process of its own.

It writes its URL into `FOLDER/url` when it is ready. Each time that vLLM's server has computed a whole answer to a
line, the line's prompt is appended to `FOLDER/computed`, which a killed process does not take with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from app.held_response import ASGIApp, Message, Receive, Scope, Send
from configs.schema import BatchesConfig, BatonConfig, ModelConfig, PoolConfig, VllmEngineConfig
from deployments.engine.build import environment
from load_tests.harness.control_plane import PREFILL, SMALL, InProcess, config, in_process
from load_tests.harness.control_plane.server import served
from tests.deployments.real_engines import RealEngines
from tests.load_tests.traffic.servers import serving

CONCURRENCY = 32
REAL = "real"


def settings(folder: Path, is_real: bool) -> BatonConfig:
    made = real() if is_real else config(scale=4)
    batches = BatchesConfig(
        database_url=f"sqlite:///{folder / 'batches.db'}",
        files_url=str(folder / "files"),
        max_concurrency=CONCURRENCY,
    )
    ingress = made.ingress.model_copy(update={"batches": batches})
    return BatonConfig.model_validate(made.model_copy(update={"ingress": ingress}).model_dump())


def real() -> BatonConfig:
    """A prefill and a decode engine with the model that comes with the tests."""
    engine = VllmEngineConfig(kv_cache_memory_bytes=256 << 20, max_num_seqs=CONCURRENCY, max_num_batched_tokens=256)
    pool = PoolConfig(engine=engine)
    model = ModelConfig(dtype="float32", max_model_len=512)
    return BatonConfig(model=model, prefill=pool, decode={"small": pool})


@contextlib.asynccontextmanager
async def plane_of(made: BatonConfig, is_real: bool) -> AsyncIterator[InProcess]:
    """The control plane, with its engines."""
    if not is_real:
        async with in_process(made) as plane:
            yield plane
        return
    os.environ.update(environment(made, PREFILL.rpartition("-")[0]))
    engines = RealEngines(made)
    try:
        await engines.start(PREFILL, SMALL)
        yield engines
    finally:
        await engines.close()


def counted(app: ASGIApp, file: int, most: int) -> ASGIApp:
    """The application; each answer of 200 to a prompt is noted in a file, and those after `most` do not end."""
    noted_here = 0

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        prompt, status = "", 0

        async def read() -> Message:
            nonlocal prompt
            message = await receive()
            if message["type"] == "http.request":
                prompt = json.loads(message["body"])["prompt"]
            return message

        async def noted(message: Message) -> None:
            nonlocal status, noted_here
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status == 200 and not message.get("more_body", False):
                os.write(file, f"{prompt}\n".encode())
                noted_here += 1
                if noted_here > most:
                    await asyncio.Event().wait()
            await send(message)

        await app(scope, read, noted)

    return run


async def main(folder: Path, most: int, is_real: bool) -> None:
    made = settings(folder, is_real)
    file = os.open(folder / "computed", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    async with (
        plane_of(made, is_real) as plane,
        served(plane, made, lambda app: counted(app, file, most)) as server,
        serving(server.gateway) as url,
    ):
        (folder / "url.new").write_text(url)
        (folder / "url.new").rename(folder / "url")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == [REAL]))
