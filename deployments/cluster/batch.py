"""The outputs that wait for vLLM's frontend. One engine step of one replica stays one batch."""

from __future__ import annotations

import asyncio

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs


class Batch:
    """Outputs are added one by one; `flush` makes what was added one message for the frontend."""

    def __init__(self) -> None:
        self._outputs: list[EngineCoreOutput] = []
        self._batches: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    def add(self, output: EngineCoreOutput) -> None:
        self._outputs.append(output)

    def flush(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._batches.put_nowait(EngineCoreOutputs(outputs=outputs))

    async def next(self) -> EngineCoreOutputs:
        """Wait for the next message."""
        return await self._batches.get()
