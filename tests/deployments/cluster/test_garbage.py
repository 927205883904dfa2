"""Outputs at the ingress that are no engine outputs, or are not meant for its sessions."""

from __future__ import annotations

import logging
import random
from collections import Counter

import msgspec
import pytest

from load_tests.harness.control_plane import InProcess
from tests.deployments.cluster.asking import LENGTH, STOP, forged, prompt

GARBAGE: dict[str, list[bytes]] = {
    "no frame": [],
    "an empty frame": [b""],
    "no list": [b"\x00"],
    "no msgpack": [b"\xc1\xc1"],
    "another message": [msgspec.msgpack.encode({"outputs": "all of them"})],
    "cut off": [forged("request-0")[:-1]],
    "an unknown extension": [forged("x", kv_transfer_params={"a": msgspec.msgpack.Ext(99, b"x")})],
    "a pickle": [forged("x", kv_transfer_params={"a": msgspec.msgpack.Ext(1, b"x")})],
    "a tensor of no known type": [
        msgspec.msgpack.encode([0, [["x", [1], None, [["rubbish", [1], b"x"]] * 3 + [None]]]]),
    ],
    "a tensor that is not there": [
        msgspec.msgpack.encode([0, [["x", [1], None, [["int64", [1], 77]] * 3 + [None]]]]),
    ],
    "a finish reason that does not exist": [
        msgspec.msgpack.encode([0, [["request-0", [1], None, None, None, 77]]]),
    ],
}


HARMLESS: dict[str, tuple[str, bytes]] = {
    "an unknown request": ("decode-small-0", forged("unknown", finish_reason=STOP)),
    "another replica's request": ("stranger", forged("request-0", finish_reason=STOP)),
}


async def test_garbage_is_dropped_and_harmless(cluster: InProcess, caplog: pytest.LogCaptureFixture) -> None:
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=200)).has(2)
    noise = random.Random(1)
    rubbish = [*GARBAGE.values(), *([b"\xc1" + noise.randbytes(n)] for n in range(20))]
    with caplog.at_level(logging.WARNING, "baton.core"):
        for replica_id, frame in HARMLESS.values():
            cluster.core._take(replica_id, [frame])
        for frames in rubbish:
            cluster.core._take("decode-small-0", frames)
    assert Counter(record.msg[:17] for record in caplog.records)["dropped a message"] == len(rubbish)
    await answer.over()
    assert answer.tokens == await cluster.local(asked, max_tokens=200)
    assert answer.context.error is None
    await cluster.settle()


@pytest.mark.parametrize("name", GARBAGE)
async def test_each_kind_of_garbage_alone(cluster: InProcess, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """In a burst one kind could hide behind another."""
    first = await cluster.answer(prompt(5), max_tokens=2)
    with caplog.at_level(logging.WARNING, "baton.core"):
        cluster.core._take("decode-small-0", GARBAGE[name])
    assert "dropped a message" in caplog.text
    assert (await cluster.answer(prompt(5), max_tokens=2)).reason is first.reason is LENGTH
    await cluster.settle()
