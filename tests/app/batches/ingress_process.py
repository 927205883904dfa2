"""An ingress with batches over mock engines, in a process that a test kills: `python -m ... FOLDER`.

It writes its URL into `FOLDER/url` when it is ready. Each time that vLLM's server has computed a whole answer to a
line, the line's prompt is appended to `FOLDER/computed`, which a killed process does not take with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from app.held_response import ASGIApp, Message, Receive, Scope, Send
from configs.schema import BatchesConfig, BatonConfig
from load_tests.harness.control_plane import config, in_process
from load_tests.harness.control_plane.server import served
from tests.load_tests.traffic.servers import serving

CONCURRENCY = 32


def settings(folder: Path) -> BatonConfig:
    made = config(scale=4)
    batches = BatchesConfig(
        database_url=f"sqlite:///{folder / 'batches.db'}",
        files_url=str(folder / "files"),
        max_concurrency=CONCURRENCY,
    )
    ingress = made.ingress.model_copy(update={"batches": batches})
    return BatonConfig.model_validate(made.model_copy(update={"ingress": ingress}).model_dump())


def counted(app: ASGIApp, file: int) -> ASGIApp:
    """The application; each answer of 200 to a prompt is noted in a file."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        prompt, status = "", 0

        async def read() -> Message:
            nonlocal prompt
            message = await receive()
            if message["type"] == "http.request":
                prompt = json.loads(message["body"])["prompt"]
            return message

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status == 200 and not message.get("more_body", False):
                os.write(file, f"{prompt}\n".encode())
            await send(message)

        await app(scope, read, noted)

    return run


async def main(folder: Path) -> None:
    made = settings(folder)
    file = os.open(folder / "computed", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    async with (
        in_process(made) as plane,
        served(plane, made, lambda app: counted(app, file)) as server,
        serving(server.gateway) as url,
    ):
        (folder / "url.new").write_text(url)
        (folder / "url.new").rename(folder / "url")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
