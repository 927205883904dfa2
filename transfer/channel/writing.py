"""A prefill worker's record of one handoff, and the reasons to keep a peer out of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from transfer.channel.digests import WrittenBlocks
from transfer.channel.library import lend
from transfer.channel.outbox import Key
from transfer.channel.pacing import Job
from transfer.control.handoff import Write, Writer, WriterEffect, WriterState
from transfer.control.messages import Fetch, Landed, Offer
from transfer.memory.layout import KVLayout
from transfer.memory.partition import sources


@dataclass(slots=True)
class Reader:
    """One decode worker's part of a handoff. `peer`: its connection, once it has offered its blocks or cancelled.

    `borrowed`: the cached blocks that a fetch reads. `written`: what has been written of them.
    """

    machine: Writer
    peer: bytes | None = None
    borrowed: tuple[int, ...] = ()
    written: WrittenBlocks | None = None

    @property
    def kind(self) -> str:
        """As counters name it."""
        return "fetches" if self.borrowed else "handoffs"

    def lend(
        self, borrowed: tuple[int, ...], peer: bytes, written: WrittenBlocks, remote: Sequence[int]
    ) -> list[WriterEffect]:
        """Hand borrowed blocks over to a worker that fetches them into its blocks `remote`."""
        self.borrowed, self.peer, self.written = borrowed, peer, written
        return lend(self.machine, borrowed, remote, written.blocks_at_once)

    def wrote(self, job: Job) -> int:
        """A write has ended well. Returns how many of its bytes moved while their prompt was still computed."""
        if self.written is not None:
            self.written.wrote(job.write)
        return 0 if self.machine.is_computed else job.size

    def landed(self, key: Key) -> Landed:
        """What the decode worker is told when all is written."""
        return Landed(*key, self.written.digests() if self.written else ())


@dataclass(slots=True)
class Writing:
    """A handoff. `readers`: the decode workers, by rank. `request_id`: the engine's request, once its prefill began.

    A fetch by another replica has no request: its blocks are borrowed.
    """

    deadline: float
    readers: dict[int, Reader] = field(default_factory=dict)
    request_id: str | None = None

    @property
    def borrowed(self) -> list[int]:
        """The cached blocks that its readers read; none of a handoff."""
        return [block for reader in self.readers.values() for block in reader.borrowed]


def objection(ours: KVLayout, theirs: KVLayout, writing: Writing | None, sender: bytes, rank: int) -> str | None:
    """The reason why `sender`, with the layout `theirs`, may not take part in a handoff as worker `rank`, or None.

    `writing`: the handoff, if it is open. No write of the handoff goes to a peer with an objection.
    """
    if rank != theirs.rank:
        return "a message in another worker's name"
    if ours.rank not in sources(rank, theirs.partition, ours.partition, ours.total_heads):
        return "this worker's KV is not ours to write"
    if writing is None:
        return None
    reader = writing.readers.get(rank)
    if reader is None and writing.request_id is not None:
        return "the prefill is for a replica of fewer workers"
    if reader is not None and reader.peer not in (None, sender):
        return "another worker has offered its blocks"
    if reader is not None and reader.machine.layers != ours.shared_layers(theirs.partition, rank):
        return "the worker has other layers than its endpoint says"
    return None


def objection_to_blocks(
    theirs: KVLayout, writing: Writing | None, all_writings: Iterable[Writing], sender: bytes, offer: Offer
) -> str | None:
    """The reason to refuse the blocks of an offer, or None. A repeated offer is not checked again."""
    has = theirs.num_blocks
    if writing and (reader := writing.readers.get(offer.rank)) and reader.machine.remote is not None:
        return None
    if offer.first_block < 0 or not offer.blocks or not all(0 <= block < has for block in offer.blocks):
        return "an offer of blocks that the peer does not have"
    if len(offer.blocks) + _unbegun(all_writings, sender) > has:
        return "more blocks are offered than the peer has"
    return None


def objection_to_fetch(theirs: KVLayout, writing: Writing | None, fetch: Fetch) -> str | None:
    """The reason to refuse a fetch, or None. `writing`: what is open under its key."""
    if writing is not None and not writing.borrowed:
        return "a handoff of this name is open"
    if not fetch.blocks or len(fetch.blocks) != len(fetch.hashes):
        return "a fetch needs one block for each hash"
    if not all(0 <= block < theirs.num_blocks for block in fetch.blocks):
        return "a fetch into blocks that the peer does not have"
    if len(set(fetch.blocks)) < len(fetch.blocks):
        return "a fetch of two blocks into one"
    return None


def job_of(key: Key, rank: int, reader: Reader, ours: KVLayout, theirs: KVLayout, write: Write) -> Job:
    """A write of one reader's part, as the pacer takes it. A fetch waits for handoffs: it could be computed instead."""
    descriptors = len(write.local) * ours.regions_per_layer
    size = descriptors * ours.window(theirs)[1]
    return Job((key, rank), reader.peer, size, descriptors, write, yields=bool(reader.borrowed))


def _unbegun(all_writings: Iterable[Writing], sender: bytes) -> int:
    """The number of blocks that a peer has offered to prefills that have not begun.

    The peer holds all of them, so it has at least as many.
    """
    return sum(
        len(reader.machine.remote or ())
        for writing in all_writings
        if writing.request_id is None
        for reader in writing.readers.values()
        if reader.peer == sender and reader.machine.state is WriterState.OPEN
    )
