"""One handoff of a prompt's KV cache, as two pure state machines: events in, effects out.

`Receiver` runs in the decode worker: waiting -> done, or waiting -> fencing -> done. Decode blocks may be freed
only after it returns `Received` or `Broken`: until then a live peer may still write them.
`Writer` runs in the prefill worker, one for each decode worker that it writes to: open -> landed | failed. It returns
`Released` once its source blocks are not read any more. An event that is illegal in a state raises `IllegalEvent` and
changes nothing. Late and repeated messages of the peer are legal and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from transfer.memory.blocks import blocks_for, writable_blocks


class IllegalEvent(Exception):
    """The caller made a mistake: this event cannot happen in this state."""


class ReceiverState(Enum):
    WAITING = auto()
    FENCING = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Ask the peer to stop writing, and to answer when it has stopped."""


@dataclass(frozen=True, slots=True)
class Received:
    """The KV cache is here. `token` is the first token, or None when this rank does not carry it."""

    token: int | None


@dataclass(frozen=True, slots=True)
class Broken:
    """The handoff is over without its KV. The peer writes no more."""

    reason: str


ReceiverEffect = SendCancel | Received | Broken


@dataclass(slots=True)
class Receiver:
    """The decode side. `needs_token`: whether the first token must arrive as well.

    `writing`: the prefill workers that may still write. There may be several when prefill and decode split the KV
    differently. A single worker needs no name.
    """

    needs_token: bool = True
    writing: set[str] = field(default_factory=lambda: {""})
    state: ReceiverState = ReceiverState.WAITING
    token: int | None = None
    reason: str = ""

    @property
    def has_landed(self) -> bool:
        """Whether no peer writes any more."""
        return not self.writing

    def landed(self, source: str = "") -> list[ReceiverEffect]:
        """The peer reports that every block is written."""
        self.writing.discard(source)
        return self._settle()

    def first_token(self, token: int) -> list[ReceiverEffect]:
        """The first token arrived."""
        if self.state is ReceiverState.WAITING and self.token is None:
            self.token = token
        return self._settle()

    def failed(self, reason: str, source: str = "") -> list[ReceiverEffect]:
        """The peer reports that it will write no more. The other peers are then asked to stop, too."""
        self.writing.discard(source)
        if self.state is not ReceiverState.WAITING:
            return self._settle()
        self.state, self.reason = ReceiverState.FENCING, reason
        return [SendCancel()] if self.writing else self._settle()

    def peer_lost(self, source: str = "") -> list[ReceiverEffect]:
        """The peer's process is known to be dead."""
        return self.failed("the prefill replica was lost", source)

    def cancel(self, reason: str) -> list[ReceiverEffect]:
        """The request is aborted or out of time. A repeated cancel asks the peers again, as an answer may be lost."""
        if self.state is ReceiverState.FENCING:
            return [SendCancel()]
        if self.state is ReceiverState.DONE:
            return []
        self.state, self.reason = ReceiverState.FENCING, reason
        return [SendCancel()] if self.writing else self._settle()  # when all KV has landed, only the token is missing

    def _settle(self) -> list[ReceiverEffect]:
        if self.state is ReceiverState.DONE or self.writing:
            return []
        effect: ReceiverEffect = Broken(self.reason)
        if self.state is ReceiverState.WAITING:
            if self.needs_token and self.token is None:
                return []
            effect = Received(self.token)
        self.state = ReceiverState.DONE
        return [effect]


class WriterState(Enum):
    OPEN = auto()
    LANDED = auto()
    FENCING = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Write:
    """Copy blocks of one layer, `local[i]` here to `remote[i]` there. They are the prompt's blocks from `begin` on."""

    layer: int
    begin: int
    local: tuple[int, ...]
    remote: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendLanded:
    pass


@dataclass(frozen=True, slots=True)
class SendFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """The source blocks may be freed."""


WriterEffect = Write | SendLanded | SendFailed | Released


@dataclass(slots=True)
class Writer:
    """The prefill side of one handoff: of these layers, in blocks of `block_size` tokens.

    `layers`: those that both workers have, as the model numbers them. Computed layers and offered blocks arrive in any
    order. A layer's blocks are written once both are known.
    """

    layers: range
    block_size: int
    state: WriterState = WriterState.OPEN
    first_block: int = 0
    remote: tuple[int, ...] | None = None
    local: tuple[int, ...] = ()
    prompt: int = 0
    computed: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    in_flight: int = 0
    source_over: bool = False
    released: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        self.computed = dict.fromkeys(self.layers, 0)
        self.written = dict.fromkeys(self.layers, 0)

    def offered(self, first_block: int, remote: Sequence[int]) -> list[WriterEffect]:
        """Decode offers its blocks `remote` for the prompt's blocks from `first_block` on."""
        if self.remote is not None:
            return []
        if self.state is not WriterState.OPEN:
            return [SendFailed(self.reason or "the prefill is over")]
        self.first_block, self.remote = first_block, tuple(remote)
        self.written = dict.fromkeys(self.layers, first_block)
        writes = [write for layer in self.layers for write in self._writes(layer)]
        return [*writes, *self._settle()]

    def saved(self, layer: int, computed: int, prompt: int, local: Sequence[int]) -> list[WriterEffect]:
        """A layer's KV of the first `computed` of `prompt` tokens is now in this worker's blocks `local`.

        A layer that is not one of this handoff's changes nothing.
        """
        if self.source_over:
            raise IllegalEvent("a layer was saved after the prefill had ended")
        if self.state is not WriterState.OPEN or layer not in self.layers:
            return []
        self.prompt, self.local = prompt, tuple(local)
        self.computed[layer] = computed
        return self._writes(layer)

    def preempted(self, unposted: Sequence[Write] = ()) -> None:
        """The engine takes the source blocks back, and will compute the prompt again in other blocks.

        `unposted`: writes that have not begun and never will. Their blocks are written when they are computed again.
        """
        if self.source_over:
            raise IllegalEvent("a prefill was preempted after it had ended")
        self.computed = dict.fromkeys(self.layers, 0)
        self.in_flight -= len(unposted)
        for write in unposted:
            self.written[write.layer] = min(self.written[write.layer], write.begin)

    def dropped(self, writes: int) -> list[WriterEffect]:
        """The handoff is being stopped, and this many of its writes have not begun and never will."""
        if self.state is WriterState.OPEN or writes > self.in_flight:
            raise IllegalEvent("writes were dropped of a handoff that goes on")
        self.in_flight -= writes
        return self._settle()

    def write_done(self, ok: bool) -> list[WriterEffect]:
        """One write of this handoff is complete, or has failed."""
        if not self.in_flight:
            raise IllegalEvent("a write ended that was never begun")
        self.in_flight -= 1
        if not ok and self.state is WriterState.OPEN:
            self._fence("a write failed")
        return self._settle()

    def ended(self, ok: bool) -> list[WriterEffect]:
        """The engine is done with the request and wants its blocks back. `ok`: the whole prompt is computed."""
        if self.source_over:
            raise IllegalEvent("the prefill ended twice")
        self.source_over = True
        if not ok and self.state is WriterState.OPEN:
            self._fence("the prefill was aborted")
        return self._settle()

    def stop(self, reason: str) -> list[WriterEffect]:
        """Write no more: decode cancels, the deadline has passed, or decode is gone."""
        if self.state is WriterState.OPEN:
            self._fence(reason)
        elif self.state is WriterState.FAILED:
            return [SendFailed(self.reason)]  # the answer may have been lost
        return self._settle()

    @property
    def over(self) -> bool:
        """Whether this handoff can have no further effect."""
        return self.released

    @property
    def is_computed(self) -> bool:
        """Whether each of its layers is computed for the whole prompt: its prefill is over."""
        return bool(self.prompt) and min(self.computed.values()) >= self.prompt

    def _fence(self, reason: str) -> None:
        self.state, self.reason = WriterState.FENCING, reason

    def _writes(self, layer: int) -> list[WriterEffect]:
        if self.state is not WriterState.OPEN or self.remote is None or not self.computed[layer]:
            return []
        begin = self.written[layer]
        end = writable_blocks(self.computed[layer], self.prompt, self.block_size)
        if end <= begin:
            return []
        if end - self.first_block > len(self.remote):
            self._fence("decode offered too few blocks")
            return self._settle()
        self.written[layer] = end
        self.in_flight += 1
        offset = self.first_block
        return [Write(layer, begin, self.local[begin:end], self.remote[begin - offset : end - offset])]

    def _settle(self) -> list[WriterEffect]:
        effects: list[WriterEffect] = []
        if not self.in_flight:
            if self.state is WriterState.OPEN and self._all_written():
                self.state = WriterState.LANDED
                effects.append(SendLanded())
            elif self.state is WriterState.FENCING:
                self.state = WriterState.FAILED
                effects.append(SendFailed(self.reason))
            settled = self.state in (WriterState.LANDED, WriterState.FAILED)
            if settled and self.source_over and not self.released:
                self.released = True
                effects.append(Released())
        return effects

    def _all_written(self) -> bool:
        if self.remote is None or not self.prompt:
            return False
        total = blocks_for(self.prompt, self.block_size)
        return all(done >= total for done in self.written.values())
