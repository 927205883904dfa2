"""A process of a benchmark that is told and asked things in lines of JSON, over its standard input and output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from load_tests.harness.application import ROOT
from load_tests.harness.processes import Guard

STOP_TIMEOUT_S = 30.0
LONGEST_LINE = 2**24
Answering = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]


class Child:
    """The side of the process that has started it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message that has no answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a message. Raises RuntimeError when the process has ended."""
        assert self._process.stdout is not None
        self.tell(message)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} has ended with {self._process.wait(STOP_TIMEOUT_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def child(module: str, *arguments: str, nice: int = 0) -> Iterator[Child]:
    """A module as a process of its own, which ends at the latest with this process. `nice`: its priority, as `nice`."""
    process = subprocess.Popen(
        ["nice", f"-n{nice}", sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    guard = Guard()
    guard.watch([process.pid])
    try:
        yield Child(process)
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    finally:
        guard.close()
        process.wait(STOP_TIMEOUT_S)


class Parent:
    """The side of the process that was started. Make it first: what else the process prints goes nowhere then."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)

    def first(self) -> dict[str, Any]:
        """The first message. Call it before `answer`; it has no answer yet."""
        with os.fdopen(0, "rb", buffering=0, closefd=False) as lines:
            message: dict[str, Any] = json.loads(lines.readline())
        return message

    def say(self, answer: dict[str, Any]) -> None:
        """Answer the last message."""
        print(json.dumps(answer), file=self._out)

    async def answer(self, answering: Answering) -> None:
        """Answer every message until there are no more. `answering` gives None for one that has no answer."""
        lines = asyncio.StreamReader(limit=LONGEST_LINE)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            if (answer := await answering(json.loads(line))) is not None:
                self.say(answer)
