"""vLLM's KV events, as a prefix cache of our hashes. test_vllm_contract.py holds the events against vLLM's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from deployments.engine.cache_log import CacheLog
from deployments.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, KVEvents, Translator
from deployments.messages import CacheChange
from transfer.memory.blocks import chained_hashes, salt_of

TOKENS = list(range(100, 140))
HASHES = chained_hashes(TOKENS, 10)
WAIT_S = 60.0


def stored(first: int, *names: int, parent: int | None = None, **rest: Any) -> BlockStored:
    tokens = TOKENS[first * 10 : (first + len(names)) * 10]
    return BlockStored(list(names), parent, tokens, **{"block_size": 10, **rest})


def told(*events: Event) -> CacheChange:
    log = CacheLog()
    translator = Translator(10, log)
    for event in events:
        translator.take(event)
    change = log.change(whole=True)
    assert change is not None
    return change


def cached(*events: Event) -> set[int]:
    return set(told(*events).stored)


def tiered(*events: Event) -> set[int]:
    return set(told(*events).left)


def test_chains_go_on_from_the_parent() -> None:
    assert cached(stored(0, 71, 72), stored(2, 73, 74, parent=72)) == set(HASHES)


def test_an_evicted_block_is_gone_and_its_children_stay() -> None:
    assert cached(stored(0, 71, 72, 73), BlockRemoved([72]), BlockRemoved([72])) == {HASHES[0], HASHES[2]}


def test_a_block_is_cached_until_its_last_copy_is_evicted() -> None:
    twice = (stored(0, 71), stored(0, 71), BlockRemoved([71]))
    assert cached(*twice) == {HASHES[0]}
    assert cached(*twice, BlockRemoved([71])) == set()


def test_a_reset_empties_the_cache() -> None:
    assert cached(stored(0, 71, 72), AllBlocksCleared(), stored(0, 75)) == {HASHES[0]}
    assert cached(stored(0, 71), AllBlocksCleared(), stored(1, 72, parent=71)) == set()


def in_tier(*names: int, medium: str = "CPU") -> BlockStored:
    return BlockStored(list(names), None, [], 10, medium=medium)


def out_of_tier(*names: int, medium: str = "CPU") -> BlockRemoved:
    return BlockRemoved(list(names), medium=medium)


def test_a_block_is_cached_while_memory_or_a_tier_has_it() -> None:
    both = (stored(0, 71, 72, medium="GPU"), in_tier(71, 72), BlockRemoved([71, 72], medium="GPU"))
    assert cached(*both) == set(HASHES[:2])
    assert cached(*both, out_of_tier(71)) == {HASHES[1]}
    assert cached(*both, in_tier(71, medium="STORAGE"), out_of_tier(71)) == set(HASHES[:2])
    assert cached(*both, stored(0, 71), out_of_tier(71)) == set(HASHES[:2]), "it came back into memory"
    assert cached(stored(0, 71), in_tier(71), out_of_tier(71)) == {HASHES[0]}


def test_what_has_left_memory_and_is_in_a_tier_is_told() -> None:
    both = (stored(0, 71, 72), in_tier(71, 72))
    assert tiered(*both) == set()
    assert tiered(*both, BlockRemoved([71])) == {HASHES[0]}
    assert tiered(*both, BlockRemoved([71]), stored(0, 71)) == set()
    assert tiered(*both, BlockRemoved([71]), out_of_tier(71)) == set()
    assert tiered(*both, AllBlocksCleared()) == set(HASHES[:2])


def test_what_a_tier_had_before_the_engine_started_counts_once_its_tokens_are_known() -> None:
    found = (in_tier(71, 72, medium="STORAGE"),)
    assert cached(*found) == set()
    assert cached(*found, stored(0, 71), BlockRemoved([71])) == {HASHES[0]}
    assert cached(*found, out_of_tier(71, medium="STORAGE"), stored(0, 71), BlockRemoved([71])) == set()


def test_a_reset_of_the_engines_memory_leaves_the_tiers_as_they_are() -> None:
    assert cached(stored(0, 71, 72), in_tier(71), AllBlocksCleared()) == {HASHES[0]}
    assert cached(stored(0, 71, 72), in_tier(71), AllBlocksCleared(), out_of_tier(71)) == set()


def test_a_block_that_leaves_memory_in_the_step_that_tells_of_its_tier_is_cached() -> None:
    log = CacheLog()
    translator = Translator(10, log)
    translator.take_all([stored(0, 71)])
    translator.take_all([BlockRemoved([71]), in_tier(71)])
    change = log.change(whole=True)
    assert change is not None
    assert set(change.stored) == {HASHES[0]}


def test_an_adapters_blocks_are_its_own() -> None:
    of_adapter = stored(0, 71, 72, lora_name="tuned", extra_keys=[["tuned"], ["tuned"]])
    assert cached(of_adapter) == set(chained_hashes(TOKENS[:20], 10, salt="tuned"))
    assert not cached(of_adapter) & set(HASHES)


@pytest.mark.parametrize(("adapter", "keys"), [(None, []), ("tuned", ["tuned"])])
def test_blocks_with_a_cache_salt_are_its_own(adapter: str | None, keys: list[str]) -> None:
    """The salt is a key of the first block alone; the ones that follow have it from their parent."""
    first = stored(0, 71, 72, lora_name=adapter, extra_keys=[[*keys, "salt"], keys])
    salted = cached(first, stored(2, 73, parent=72, lora_name=adapter, extra_keys=[keys or None]))
    assert salted == set(chained_hashes(TOKENS[:30], 10, salt=salt_of(adapter or "", "salt")))
    plain = cached(stored(0, 71, 72, 73, lora_name=adapter, extra_keys=[keys] * 3))
    other = cached(stored(0, 71, 72, 73, lora_name=adapter, extra_keys=[[*keys, "other"], keys, keys]))
    assert not salted & plain
    assert not salted & other


def test_an_adapter_and_a_salt_of_its_name_are_not_the_same() -> None:
    adapter = cached(stored(0, 71, lora_name="tuned", extra_keys=[["tuned"]]))
    salt = cached(stored(0, 71, extra_keys=[["tuned"]]))
    assert len(adapter | salt) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"extra_keys": [["salt", "more"]]},
        {"extra_keys": [[["image", 3]]]},
        {"extra_keys": [[b"embedding"]]},
        {"group_idx": 1},
        {"block_size": 5},
    ],
    ids=["salt and more", "image", "embedding", "another kind of cache", "another block size"],
)
def test_what_the_cluster_core_does_not_hash_is_left_out(change: dict[str, Any]) -> None:
    assert cached(stored(0, 71, **change), stored(1, 72, parent=71)) == set()
    assert cached(stored(0, 71, extra_keys=[None], group_idx=0)) == {HASHES[0]}
    assert cached(stored(0, 71), BlockRemoved([71], group_idx=1)) == {HASHES[0]}


class Publisher:
    """Publishes as vLLM does: topic, number, batch."""

    def __init__(self, events: KVEvents) -> None:
        self._topic, self.number = events.topic.encode(), 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.connect(events.endpoint)
        deadline_s = time.monotonic() + WAIT_S
        while not self._socket.poll(1):
            events.drain()  # which subscribes
            assert time.monotonic() < deadline_s, "there is no subscriber"
        self._socket.recv()

    def send(self, *events: Event, topic: bytes | None = None, payload: bytes | None = None) -> None:
        packed = payload or msgspec.msgpack.encode([0.0, list(events), 0])
        self._socket.send_multipart([topic or self._topic, self.number.to_bytes(8, "big"), packed])
        self.number += 1

    def close(self) -> None:
        self._context.destroy(0)


@pytest.fixture
def events() -> Iterator[KVEvents]:
    made = KVEvents(10)
    yield made
    made.close()


@pytest.fixture
def publisher(events: KVEvents) -> Iterator[Publisher]:
    made = Publisher(events)
    yield made
    made.close()


def drained(events: KVEvents, *hashes: int) -> bool:
    """Whether exactly these are cached, at last."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        events.drain()
        change = events.log.change(whole=True)
        assert change is not None
        if set(change.stored) == set(hashes):
            return True
        time.sleep(0.001)
    return False


def test_published_events_arrive_and_only_by_the_loopback_interface(events: KVEvents, publisher: Publisher) -> None:
    assert events.endpoint.startswith("tcp://127.0.0.1:")
    publisher.send(stored(0, 71), stored(1, 72, parent=71))
    publisher.send(BlockRemoved([72]), stored(1, 73, 74, parent=71))
    assert drained(events, *HASHES[:3])


def test_what_comes_without_the_topic_is_dropped(events: KVEvents, publisher: Publisher) -> None:
    publisher.send(stored(0, 71), topic=b"guessed")
    publisher.number = 0
    publisher.send(stored(0, 71, 72))
    assert drained(events, *HASHES[:2])


def test_after_a_gap_only_what_comes_is_known(events: KVEvents, publisher: Publisher) -> None:
    publisher.send(stored(0, 71, 72))
    assert drained(events, *HASHES[:2])
    publisher.number += 1
    publisher.send(stored(2, 73, parent=72), stored(0, 75))
    assert drained(events, HASHES[0])
    change = events.log.change()
    assert change is None, "what went with the gap was told"


def test_what_cannot_be_read_counts_as_a_gap(events: KVEvents, publisher: Publisher) -> None:
    publisher.send(stored(0, 71, 72))
    publisher.send(payload=b"\x93\x00\x01\x02")
    publisher.send(stored(0, 75))
    assert drained(events, HASHES[0])
