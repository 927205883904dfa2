"""A fetch whose bytes are harmed on the way brings the blocks before the harm, and no wrong byte."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.transfer.channel.harmful_plane import Blow, Harm, HarmfulPlane, flip, lose, misplace
from tests.transfer.channel.test_fetch import FETCH, HELD, TARGET, Shelf, fetch, name, whole_of
from tests.transfer.channel.wire_peer import FakePrefill, Peer
from transfer.channel import digests
from transfer.control.messages import Found, Landed
from transfer.memory.partition import Partition

FETCHES, LAYERS, MOST = 300, 3, 12


@pytest.fixture
def harmful(make_side: Callable[..., Any]) -> Any:
    side = make_side("source", plane=HarmfulPlane("harmful", seed=3))
    side.plane = side.channel._plane
    return side


@pytest.mark.parametrize("harm", [flip, lose, misplace], ids=lambda harm: str(harm.__name__))
@pytest.mark.parametrize("at_once", [1, 3, MOST])
def test_what_comes_is_what_lies_before_the_harm(
    harmful: Any, decode: Any, monkeypatch: pytest.MonkeyPatch, harm: Harm, at_once: int
) -> None:
    """Any block of any write, in any place: the blocks before it come, and no block behind it."""
    monkeypatch.setattr(digests, "PIECE_BYTES", at_once * harmful.layout.layer_block_bytes)
    draw, shelf = random.Random(at_once), Shelf(*range(40))
    harmful.fill(list(range(40)), 1)
    harmful.channel.lend(shelf)
    harmed = 0
    for number in range(FETCHES // 3):
        held, into = (draw.sample(range(40), count := draw.randint(1, MOST)), draw.sample(range(64), count))
        harmful.plane.struck = None
        if number % 4:
            writes = LAYERS * -(-count // at_once)
            harmful.plane.next = Blow(draw.randrange(writes), draw.randrange(MOST), harm)
            harmed += 1
        decode.memory[:] = 0
        asked = [harmful.channel.address], into, [name(block) for block in held]
        decode.channel.fetch((f"s{number}", 1), f"r{number}", *asked, 60.0)
        came, struck = decode.wait("fetched", f"r{number}"), harmful.plane.struck
        assert came == (count if struck is None else held.index(struck))
        assert np.array_equal(decode.memory[:, :, into[:came]], harmful.memory[:, :, held[:came]])
    harmful.wait_idle()
    assert shelf.is_whole
    assert decode.counter("fetches_corrupt") == decode.counter("fetches_broken") == harmed
    assert decode.counter("fetch_digest_s") > 0
    assert harmful.counter("fetch_digest_s") > 0


@pytest.mark.parametrize(
    "partitions",
    [
        (Partition(2), Partition()),
        (Partition(), Partition(2)),
        (Partition(1, (1, 2)), Partition(1, (2, 1))),
        (Partition(2, (1, 2)), Partition(1, (2, 1))),
    ],
    ids=str,
)
def test_harm_to_one_part_of_a_block_is_harm_to_the_block(
    make_side: Callable[..., Any], partitions: tuple[Partition, Partition]
) -> None:
    """Replicas that split their KV in unlike ways: each worker checks what each source has written to it."""
    planes: list[HarmfulPlane] = []

    def workers(kind: str, partition: Partition) -> list[Any]:
        made = []
        for rank in range(partition.workers):
            planes.append(HarmfulPlane(f"{kind} {rank}", seed=rank))
            shape: dict[str, Any] = {"workers": partition.workers, "stages": partition.stages, "total_heads": 2}
            made.append(make_side(f"{kind} {rank}", plane=planes[-1], rank=rank, **shape))
        return made

    sources, targets = (workers(kind, each) for kind, each in zip(("source", "target"), partitions, strict=True))
    fill = np.random.default_rng(1)
    for source in sources:
        source.memory[:] = fill.integers(1, 256, source.memory.shape, dtype=np.uint8)
        source.channel.lend(Shelf(*HELD))
    asked = [source.channel.address for source in sources], TARGET, [name(block) for block in HELD]
    for number, harmful in enumerate(planes[: len(sources)]):
        for which in range(len(HELD)):
            key = f"{number}-{which}"
            harmful.next, harmful.struck = Blow(0, which, flip), None
            for target in targets:
                target.memory[:] = 0
            for target in targets:
                target.channel.fetch((key, 1), key, *asked, 60.0)
            came = [target.wait("fetched", key) for target in targets]
            assert harmful.struck == HELD[which]
            assert min(came) == which, "the engine takes what all of its workers have"
            assert sum(each < len(HELD) for each in came) == 1, "one write was harmed"
            assert np.array_equal(whole_of(targets, TARGET[:which]), whole_of(sources, HELD[:which]))
    for source in sources:
        source.wait_idle()


def test_the_log_names_session_block_and_source(harmful: Any, decode: Any, caplog: pytest.LogCaptureFixture) -> None:
    harmful.channel.lend(Shelf(*HELD))
    harmful.fill(HELD, 1)
    harmful.plane.next = Blow(0, 1, flip)
    with caplog.at_level(logging.WARNING, "baton.transfer"):
        fetch(decode, harmful)
        assert decode.wait("fetched", "r") == 1
    (line,) = caplog.messages
    assert line == (
        f"session fetched: block 1 of a fetch from {harmful.channel.address} is not as it was written, and is computed"
    )


def test_no_write_of_a_fetch_is_longer_than_a_piece(prefill: Any, decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other writes, and the channel's thread, wait for no more than that."""
    monkeypatch.setattr(digests, "PIECE_BYTES", 2 * prefill.layout.layer_block_bytes)
    prefill.channel.lend(Shelf(*HELD))
    prefill.fill(HELD, 1)
    fetch(decode, prefill)
    assert decode.wait("fetched", "r") == 3
    prefill.wait_idle()
    written = [fields["blocks"] for event, fields in prefill.events if event == "layer_write"]
    assert written == [2, 1] * LAYERS
    assert np.array_equal(decode.memory[:, :, TARGET], prefill.memory[:, :, HELD])


@pytest.fixture
def comparing(prefill: Any, decode: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """All has come, and nothing of it is compared."""
    monkeypatch.setattr(decode.channel._decode, "progress", lambda: None)
    prefill.channel.lend(Shelf(*HELD))
    prefill.fill(HELD, 1)
    return decode


def test_what_is_not_compared_when_the_request_ends_has_not_come(prefill: Any, comparing: Any) -> None:
    fetch(comparing, prefill)
    comparing.until(lambda: comparing.channel._decode.is_comparing)
    assert comparing.counter("open_receiving") == 1
    assert not comparing.collect().fetched
    comparing.channel.cancel(FETCH, "aborted")
    assert comparing.wait("fetched", "r") == 0
    comparing.wait_idle()
    assert not comparing.counter("fetches_corrupt")


def test_comparing_has_an_end_with_the_time_of_the_fetch(prefill: Any, comparing: Any) -> None:
    fetch(comparing, prefill, timeout_s=2.0)
    assert comparing.wait("fetched", "r") == 0
    comparing.wait_idle()
    assert not comparing.results.late, "nothing is written any more"


@pytest.mark.parametrize("digests_sent", [(), (bytes(16),) * 3], ids=["none", "others"])
def test_a_source_without_the_right_digests_brings_nothing(
    decode: Any, fake_prefill: FakePrefill, digests_sent: tuple[bytes, ...]
) -> None:
    """One of another version, say."""
    decode.channel.fetch(FETCH, "r", [fake_prefill.address], TARGET, [name(block) for block in HELD], 60.0)
    identity = fake_prefill.accept()
    for message in (Found(*FETCH, 3), Landed(*FETCH, digests_sent)):
        fake_prefill.say(identity, Peer.seal.pack(message))
    assert decode.wait("fetched", "r") == 0
    assert decode.counter("fetches_corrupt") == 1
    decode.wait_idle()
