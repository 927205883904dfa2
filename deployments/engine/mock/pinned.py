"""The blocks that pinned prefixes hold in a mock engine. It has no prefix cache, so no request uses them."""

from __future__ import annotations

from collections.abc import Collection

from deployments.engine.mock.sequence import Sequence
from deployments.engine.mock.wire import ExtraArgs, Pinning, Request, Sampling
from deployments.messages import Pin


def pin_request(request_id: str, keep: Collection[str], pin: Pin | None) -> Request:
    """See `Engine.pin`. The prompt of a request that only unpins is one token."""
    pinning = Pinning(pin.id if pin else "", list(keep))
    sampling = Sampling(max_tokens=1, ignore_eos=True, extra_args=ExtraArgs(baton_pin=pinning))
    return Request(request_id, list(pin.tokens) if pin else [1], None, sampling)


class PinnedBlocks:
    """By pin. The methods return blocks that are free now."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[str, list[int]] = {}

    def begin(self, sequence: Sequence) -> list[int]:
        """A request has come: what it does not keep is unpinned."""
        if (pinning := sequence.request.pinning) is None:
            return []
        gone = self._held.keys() - set(pinning.keep)
        return [block for name in gone for block in self._held.pop(name)]

    def finished(self, sequence: Sequence) -> list[int]:
        """A request is over. If it pins its prompt, and has computed it, it leaves the whole blocks here."""
        pinning = sequence.request.pinning
        if pinning is None or not pinning.id or not sequence.generated:
            return []
        whole = sequence.prompt_tokens // self._block_size
        before = self._held.get(pinning.id, [])
        self._held[pinning.id], sequence.blocks = sequence.blocks[:whole], sequence.blocks[whole:]
        return before

    def blocks(self) -> dict[str, int]:
        """How many blocks each pin holds."""
        return {name: len(blocks) for name, blocks in self._held.items()}
