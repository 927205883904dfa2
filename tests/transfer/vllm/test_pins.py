"""Blocks of pinned prefixes, with vLLM's own KV cache manager. No engine is started."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request, RequestStatus

from tests.transfer.vllm.test_cached_blocks import SIZE, Cache, tokens
from transfer.vllm.pins import PIN, Pins


class Pinned:
    """A KV cache of 15 blocks, and the pins in it."""

    def __init__(self) -> None:
        self.cache, self.pins = Cache(), Pins(SIZE)

    def run(self, prompt: list[int], pin: dict[str, Any] | None = None, **status: Any) -> Request:
        """Run a request to its end, as the connector is told of it."""
        request = self.cache.request(f"r{id(prompt)}", prompt)
        if pin is not None and request.sampling_params is not None:
            request.sampling_params.extra_args = {PIN: pin}
        self.pins.begin(request, self.cache.cached)
        assert self.cache.schedule(request)
        self.cache.cached.begin_step()
        request.status = status.get("status", RequestStatus.FINISHED_LENGTH_CAPPED)
        self.pins.finished(request)
        self.cache.manager.free(request)
        self.cache.cached.end_step()
        self.pins.end_step(self.cache.cached)
        return request

    def unpin(self, *keep: str) -> None:
        self.run(tokens(1, seed=9), {"id": "", "keep": list(keep)})


def test_the_whole_blocks_of_a_prompt_stay_until_they_are_unpinned() -> None:
    pinned = Pinned()
    free = pinned.cache.free
    pinned.run(tokens(3 * SIZE + 5), {"id": "a", "keep": ["a"]})
    assert (pinned.pins.news(), pinned.pins.news(), pinned.cache.free) == ({"a": 3}, None, free - 3)
    pinned.unpin()
    assert (pinned.pins.news(), pinned.cache.free) == ({}, free)
    assert len(pinned.cache.cached.borrow(pinned.cache.names(tokens(3 * SIZE)))) == 3, "they are cached still"


def test_other_requests_find_them_after_any_number_of_prompts_and_never_get_them() -> None:
    pinned = Pinned()
    pinned.run(tokens(3 * SIZE), {"id": "a", "keep": ["a"]})
    names = pinned.cache.names(tokens(3 * SIZE))
    mine = set(pinned.cache.cached.hold(names))
    pinned.cache.cached.release(tuple(mine))
    for seed in range(1, 6):
        taken = pinned.cache.run(f"other-{seed}", tokens(11 * SIZE, seed=seed))
        assert not mine & set(taken)
    too_large = pinned.cache.request("large", tokens(13 * SIZE, seed=7))
    assert not pinned.cache.schedule(too_large), "it does not get them either, and no time passes"
    pinned.cache.manager.free(too_large)
    again = pinned.cache.request("again", tokens(3 * SIZE + 1))
    _, found, _ = pinned.cache.manager.get_computed_blocks(again)
    assert found == 3 * SIZE


def test_pins_share_blocks_and_each_keeps_its_own() -> None:
    pinned = Pinned()
    free = pinned.cache.free
    pinned.run(tokens(2 * SIZE), {"id": "a", "keep": ["a"]})
    pinned.run(tokens(4 * SIZE), {"id": "b", "keep": ["a", "b"]})
    assert (pinned.pins.news(), pinned.cache.free) == ({"a": 2, "b": 4}, free - 4)
    pinned.unpin("b")
    assert (pinned.pins.news(), pinned.cache.free) == ({"b": 4}, free - 4)
    pinned.run(tokens(4 * SIZE), {"id": "b", "keep": ["b"]})
    assert (pinned.pins.news(), pinned.cache.free) == ({"b": 4}, free - 4), "twice is once"
    pinned.unpin()
    assert pinned.cache.free == free


def test_a_request_that_pins_nothing_or_is_aborted_leaves_nothing() -> None:
    pinned = Pinned()
    free = pinned.cache.free
    pinned.run(tokens(3 * SIZE), None)
    assert pinned.pins.news() is None
    pinned.run(tokens(3 * SIZE), {"id": "a", "keep": ["a"]}, status=RequestStatus.FINISHED_ABORTED)
    assert (pinned.pins.news(), pinned.cache.free) == ({}, free)
