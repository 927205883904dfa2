"""What a channel asks an engine for when another replica fetches cached blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from transfer.control.handoff import Writer, WriterEffect
from transfer.control.messages import Failed, Fetch, Found


class Library(Protocol):
    """The blocks in an engine's prefix cache, by their hashes. The channel's thread calls it, and no engine step waits.

    A block's hash covers all tokens up to the block's end, and everything else that its KV depends on.
    """

    def borrow(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """The leading blocks of `hashes` that are here and computed. Each keeps its KV until it is given back.

        It ends before the first hash that is not here.
        """

    def give_back(self, blocks: Sequence[int]) -> None:
        """No write reads these borrowed blocks any more."""


class NoLibrary:
    """Of a worker whose engine lends nothing."""

    def borrow(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Never a block."""
        del hashes
        return ()

    def give_back(self, blocks: Sequence[int]) -> None:
        """Nothing was borrowed."""


def lend(writer: Writer, borrowed: Sequence[int], remote: Sequence[int], at_once: int) -> list[WriterEffect]:
    """Hand the leading blocks over into `remote`. All of their layers are computed, and no engine waits for them.

    `at_once`: the most blocks of one write.
    """
    tokens = len(borrowed) * writer.block_size
    effects = writer.offered(0, remote[: len(borrowed)])
    ends = [*range(at_once * writer.block_size, tokens, at_once * writer.block_size), tokens]
    for layer, end in itertools.product(writer.layers, ends):
        effects += writer.saved(layer, end, tokens, borrowed)
    return [*effects, *writer.ended(ok=True)]


def answer(fetch: Fetch, borrowed: Sequence[int], reason: str | None) -> Found | Failed:
    """What the worker that asks is told at once. `reason`: why the fetch is refused."""
    if borrowed:
        return Found(fetch.session, fetch.epoch, len(borrowed))
    return Failed(fetch.session, fetch.epoch, reason or "the blocks are not here")
