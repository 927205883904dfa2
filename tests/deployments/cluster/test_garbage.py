"""Messages at the ingress that are no engine outputs, or are not meant for its sessions."""

from __future__ import annotations

import logging
import random
from collections import Counter

import msgspec
import pytest
import zmq
import zmq.asyncio

from load_tests.harness.control_plane import InProcess, until
from tests.deployments.cluster.asking import LENGTH, STOP, forged, prompt

GARBAGE: dict[str, list[bytes]] = {
    "only a name": [b"decode-small-0"],
    "nothing": [b"", b""],
    "a name that is no text": [b"\xff\xfe", b"\x00"],
    "no msgpack": [b"decode-small-0", b"\xc1\xc1"],
    "another message": [b"decode-small-0", msgspec.msgpack.encode({"outputs": "all of them"})],
    "cut off": [b"decode-small-0", forged("request-0")[:-1]],
    "an unknown extension": [b"d", forged("x", kv_transfer_params={"a": msgspec.msgpack.Ext(99, b"x")})],
    "a pickle": [b"d", forged("x", kv_transfer_params={"a": msgspec.msgpack.Ext(1, b"x")})],
    "a tensor of no known type": [
        b"d",
        msgspec.msgpack.encode([0, [["x", [1], None, [["rubbish", [1], b"x"]] * 3 + [None]]]]),
    ],
    "a tensor that is not there": [
        b"d",
        msgspec.msgpack.encode([0, [["x", [1], None, [["int64", [1], 77]] * 3 + [None]]]]),
    ],
    "a finish reason that does not exist": [
        b"d",
        msgspec.msgpack.encode([0, [["request-0", [1], None, None, None, 77]]]),
    ],
}


HARMLESS: dict[str, list[bytes]] = {
    "an unknown request": [b"decode-small-0", forged("unknown", finish_reason=STOP)],
    "another replica's request": [b"stranger", forged("request-0", finish_reason=STOP)],
}


async def test_garbage_is_dropped_and_harmless(cluster: InProcess, caplog: pytest.LogCaptureFixture) -> None:
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=200)).has(2)
    noise = random.Random(1)
    with caplog.at_level(logging.WARNING, "baton.core"), zmq.Context() as context:
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(cluster.pools["prefill"].tasks[0].reply_to)
        rubbish = [*GARBAGE.values(), *([b"d", b"\xc1" + noise.randbytes(n)] for n in range(20))]
        for frames in [*HARMLESS.values(), *rubbish]:
            socket.send_multipart(frames)

        async def all_were_dropped() -> bool:
            return Counter(record.msg[:17] for record in caplog.records)["dropped a message"] >= len(rubbish)

        await until(all_were_dropped)
        socket.close(0)
    await answer.over()
    assert answer.tokens == await cluster.local(asked, max_tokens=200)
    assert answer.context.error is None
    await cluster.settle()


@pytest.mark.parametrize("name", GARBAGE)
async def test_each_kind_of_garbage_alone(cluster: InProcess, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """In a burst one kind could hide behind another."""
    first = await cluster.answer(prompt(5), max_tokens=2)
    with caplog.at_level(logging.WARNING, "baton.core"), zmq.Context() as context:
        socket = context.socket(zmq.PUSH)
        socket.connect(cluster.pools["prefill"].tasks[0].reply_to)
        socket.send_multipart(GARBAGE[name])

        async def was_dropped() -> bool:
            return any("dropped a message" in record.message for record in caplog.records)

        await until(was_dropped)
        socket.close(0)
    assert (await cluster.answer(prompt(5), max_tokens=2)).reason is first.reason is LENGTH
    await cluster.settle()
