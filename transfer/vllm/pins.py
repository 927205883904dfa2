"""Prefixes whose blocks stay in the prefix cache until they are unpinned.

A request pins where its `extra_args` have `baton_pin`: `id`, the pin's name, and `keep`, the names of all pins that are
to stay. With it, all other pins end as soon as the request comes to the engine. With an empty `id` it pins nothing. Its
prompt is computed, loaded or fetched like any other. Once the step that ends it is over, the whole blocks of the prompt
get one more reference each, as of a request that never ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from transfer.vllm.cached_blocks import CachedBlocks

PIN = "baton_pin"


class Pins:
    """The engine's thread calls all methods."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[str, tuple[int, ...]] = {}
        self._ended: list[tuple[str, list[bytes]]] = []
        self._is_news = False

    def begin(self, request: Request, lent: CachedBlocks) -> None:
        """A request has come."""
        if (asked := _asked(request)) is not None:
            for name in self._held.keys() - set(asked["keep"]):
                lent.release(self._held.pop(name))
            self._is_news = True

    def finished(self, request: Request) -> None:
        """A request is over. Its blocks may be free already when the step is over, but they are still cached then."""
        asked = _asked(request)
        is_whole = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if asked is not None and asked["id"] and is_whole:
            whole = int(request.num_prompt_tokens) // self._block_size
            self._ended.append((asked["id"], [bytes(name) for name in request.block_hashes[:whole]]))

    def end_step(self, lent: CachedBlocks) -> None:
        """A step is over: what it has computed may be held."""
        for name, hashes in self._ended:
            before = self._held.get(name, ())
            self._held[name] = lent.hold(hashes)
            lent.release(before)
            self._is_news = True
        self._ended.clear()

    def news(self) -> dict[str, int] | None:
        """How many blocks each pin holds; None: as when it was asked last."""
        if not self._is_news:
            return None
        self._is_news = False
        return {name: len(blocks) for name, blocks in self._held.items()}


def _asked(request: Request) -> dict[str, Any] | None:
    params = request.sampling_params
    extra = params.extra_args if params is not None else None
    asked: dict[str, Any] | None = (extra or {}).get(PIN)
    return asked
