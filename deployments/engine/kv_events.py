"""What vLLM reports of its prefix cache, as the chained hashes that the cluster core makes of prompts.

The engine's process publishes an event for every block that it caches or evicts; blocks whose KV came from a peer are
among them. vLLM names blocks by hashes of its own, so the tokens in the events are hashed again, our way.
Imports no vLLM: tests/deployments/engine/vllm/test_contract.py holds the structs here against its own.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from deployments.engine.cache_log import CacheLog
from transfer.memory.blocks import chained_hashes, salt_of

logger = logging.getLogger("baton.engine")

HIGH_WATER_MARK = 100_000
"""The most steps whose events wait to be taken. Later ones are dropped, which is noticed as a gap."""

BlockName = int | bytes


GPU = "GPU"
"""What vLLM calls an engine's own memory, on CPU, too."""


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks that follow `parent_block_hash` were cached; `token_ids`: of all of them, one after the other.

    `medium`: where they are; None: in the engine's memory. Of a tier only names are told, and no tokens.
    """

    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks were evicted."""

    block_hashes: list[BlockName]
    group_idx: int | None = None
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The prefix cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The leading fields of a step's events."""

    ts: float
    events: list[Event]


class Translator:
    """Keeps a CacheLog by vLLM's events.

    vLLM may hold several copies of a block under one name, and reports each; they count as one. A block is cached while
    the engine's memory or a tier has it. Blocks that depend on more than tokens, an adapter and a cache salt (images)
    are left out, and so are the blocks that follow them: the cluster core does not hash them either. Of a model with
    several kinds of KV cache only the first kind counts.
    """

    def __init__(self, block_size: int, log: CacheLog) -> None:
        self._block_size, self._log = block_size, log
        self._hashes: dict[BlockName, int] = {}
        self._copies: dict[BlockName, int] = {}
        self._tiers: dict[BlockName, set[str]] = {}  # also of names whose tokens are not known yet

    def take_all(self, events: Sequence[Event]) -> None:
        """Enter the events of one step. What came into a tier goes first: a block may have left memory since then."""
        for event in sorted(events, key=lambda event: not (isinstance(event, BlockStored) and _tier(event))):
            self.take(event)

    def take(self, event: Event) -> None:
        """Enter one event."""
        match event:
            case BlockStored() if tier := _tier(event):
                for name in event.block_hashes:
                    self._tiers.setdefault(name, set()).add(tier)
            case BlockStored():
                self._stored(event)
            case BlockRemoved() if tier := _tier(event):
                for name in event.block_hashes:
                    self._left_tier(name, tier)
            case BlockRemoved():
                self._removed(event)
            case _:
                self._reset()

    def clear(self) -> None:
        """Nothing is known of the cache."""
        self._hashes.clear()
        self._copies.clear()
        self._tiers.clear()
        self._log.clear()

    def _reset(self) -> None:
        """The engine's memory has no blocks; tiers keep theirs."""
        self._copies.clear()
        self._hashes = {name: chained for name, chained in self._hashes.items() if name in self._tiers}
        self._log.clear()
        self._log.stored(self._hashes.values())
        self._log.left(self._hashes.values())

    def _left_tier(self, name: BlockName, tier: str) -> None:
        tiers = self._tiers.get(name, set())
        tiers.discard(tier)
        if not tiers:
            self._tiers.pop(name, None)
            if name in self._hashes and name not in self._copies:
                self._log.removed([self._hashes.pop(name)])

    def _left_memory(self, name: BlockName) -> None:
        if name in self._tiers:
            self._log.left([self._hashes[name]])
        else:
            self._log.removed([self._hashes.pop(name)])

    def _stored(self, event: BlockStored) -> None:
        names = event.block_hashes
        is_ours = not event.group_idx and event.block_size == self._block_size
        salt = _salt(event)
        if not is_ours or len(event.token_ids) != len(names) * self._block_size or salt is None:
            return
        parent = 0
        if event.parent_block_hash is not None:
            if event.parent_block_hash not in self._hashes:
                return
            parent = self._hashes[event.parent_block_hash]
        hashes = chained_hashes(event.token_ids, self._block_size, parent, salt)
        for name, chained in zip(names, hashes, strict=True):
            self._hashes[name] = chained
            self._copies[name] = self._copies.get(name, 0) + 1
        self._log.stored(hashes)

    def _removed(self, event: BlockRemoved) -> None:
        if event.group_idx:
            return
        for name in event.block_hashes:
            if name not in self._copies:
                continue
            self._copies[name] -= 1
            if not self._copies[name]:
                del self._copies[name]
                self._left_memory(name)


def _tier(event: BlockStored | BlockRemoved) -> str | None:
    """The tier that an event is of; None: the engine's own memory."""
    return event.medium if event.medium != GPU else None


def _salt(event: BlockStored) -> str | None:
    """The salt of the blocks; None where one of them depends on more than tokens, the adapter and a cache salt.

    A cache salt is a key of a prompt's first block alone. The blocks that follow have it from their parent.
    """
    adapter = event.lora_name or ""
    first, *others = [_without(adapter, keys) for keys in event.extra_keys or [None]]
    cache_salt = first[0] if len(first) == 1 and event.parent_block_hash is None else None
    if any(others) or (first and not isinstance(cache_salt, str)):
        return None
    return salt_of(adapter, cache_salt)


def _without(adapter: str, keys: list[Any] | None) -> list[Any]:
    """What a block depends on beside its tokens and the adapter, which is the first of its keys."""
    return keys[1:] if keys and adapter and keys[0] == adapter else keys or []


class KVEvents:
    """Takes the events of one engine on this machine.

    The engine's publisher connects to a port of the loopback interface. So no other machine can connect, and nothing is
    left in the file system. `topic` is a secret between the two: a message without it is dropped.
    """

    def __init__(self, block_size: int) -> None:
        self.log = CacheLog()
        self.topic = secrets.token_hex(16)
        self._translator = Translator(block_size, self.log)
        self._decoder = msgspec.msgpack.Decoder(EventBatch)
        self._expected = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.SUBSCRIBE, self.topic.encode())
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def drain(self) -> None:
        """Enter what has come into `log`, without waiting. The first call with the publisher up subscribes.

        After a gap in vLLM's numbers, what was cached before is not known any more; what is cached later is.
        """
        while True:
            try:
                _, number, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            sequence = int.from_bytes(number, "big")
            if sequence != self._expected:
                logger.warning("%d messages of the KV cache were lost", sequence - self._expected)
                self._translator.clear()
            self._expected = sequence + 1
            self._take(payload)

    def _take(self, payload: bytes) -> None:
        try:
            batch = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            logger.warning("a message of the KV cache cannot be read: %r", error)
            self._translator.clear()
            return
        self._translator.take_all(batch.events)

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._context.destroy(0)
