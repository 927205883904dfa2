"""The outputs that wait for vLLM's frontend: what was added before a flush is one message."""

from __future__ import annotations

import asyncio

from vllm.v1.engine import EngineCoreOutput

from deployments.cluster.batch import Batch


async def test_each_flush_is_one_message_and_outputs_keep_their_order() -> None:
    batch = Batch()
    outputs = [EngineCoreOutput(name, [1]) for name in "abc"]
    asked = asyncio.create_task(batch.next())
    batch.flush()  # nothing was added, so there is no message
    batch.add(outputs[0])
    batch.add(outputs[1])
    await asyncio.sleep(0)
    assert not asked.done(), "it is not flushed"
    batch.flush()
    batch.flush()
    batch.add(outputs[2])
    batch.flush()
    assert (await asked).outputs == outputs[:2]
    assert (await batch.next()).outputs == outputs[2:]
