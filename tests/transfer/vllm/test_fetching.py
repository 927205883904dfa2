"""The scheduler's side of a fetch: what is asked for, once, and what a request goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from transfer.vllm.fenced_blocks import FencedBlocks
from transfer.vllm.fetching import Fetches
from transfer.vllm.step_messages import Fetching, Loading

SIZE = 16


class MadeBy(Scheduler):
    """The connector looks for the scheduler that makes it."""

    def __init__(self) -> None:
        self.failed_recving_kv_req_ids: set[str] = set()
        self.fetches = Fetches(SIZE)
        self.fenced = Fence()
        self.fetches.bind(None, self.fenced)


class Fence(FencedBlocks):
    """Keeps the blocks of these requests."""

    def __init__(self, *late: str) -> None:
        self.is_late, self.kept = set(late), dict[str, list[int]]()

    def keep(self, request_id: str, blocks: Sequence[int]) -> bool:
        if request_id in self.is_late:
            self.kept[request_id] = list(blocks)
        return request_id in self.is_late


def request(tokens: int, fetch: int | None, is_over: bool = False) -> Any:
    source = {"session": "s", "epoch": 2, "peers": ["tcp://a"], "tokens": fetch, "timeout_s": 1.5}
    return SimpleNamespace(
        request_id="r",
        num_tokens=tokens,
        num_computed_tokens=0,
        block_hashes=[bytes([block]) * 32 for block in range(tokens // SIZE)],
        kv_transfer_params=None if fetch is None else {"baton_fetch": source},
        is_finished=lambda: is_over,
    )


@pytest.mark.parametrize(
    ("tokens", "fetch", "computed", "missing"),
    [
        (100, None, 0, 0),
        (100, 64, 0, 64),
        (100, 64, 32, 32),
        (100, 64, 64, 0),
        (100, 64, 80, 0),
        (100, 70, 0, 64),
        (64, 64, 0, 48),
        (65, 64, 0, 64),
        (16, 16, 0, 0),
        (10, 500, 0, 0),
    ],
)
def test_whole_blocks_that_are_missing_are_asked_for(tokens: int, fetch: int, computed: int, missing: int) -> None:
    assert MadeBy().fetches.missing_tokens(request(tokens, fetch), computed) == missing


def test_the_blocks_after_those_that_are_here_are_fetched() -> None:
    fetches = MadeBy().fetches
    asks = request(100, 64)
    assert fetches.missing_tokens(asks, 32) == 32
    fetching = fetches.begin(asks, [7, 8, 9, 10, 11, 12, 13], 32)
    assert isinstance(fetching, Fetching)
    assert (fetching.key, fetching.peers, fetching.timeout_s) == (("s", 2), ["tcp://a"], 1.5)
    assert (fetching.blocks, fetching.hashes) == ([9, 10], [bytes([2]) * 32, bytes([3]) * 32])
    assert fetches.missing_tokens(asks, 0) == 0, "a request fetches once"


@pytest.mark.parametrize(("brought", "goes_on_from"), [([2], None), ([1], 48), ([0], 32), ([2, 1], 48), ([], 32)])
def test_a_request_goes_on_from_what_every_worker_has(brought: list[int], goes_on_from: int | None) -> None:
    made, asks = MadeBy(), request(100, 64)
    assert made.fetches.missing_tokens(asks, 32) == 32
    made.fetches.begin(asks, list(range(7)), 32)
    asks.num_computed_tokens = 64
    for blocks in brought:
        made.fetches.brought({"r": blocks})
    made.fetches.ended(["r"])
    assert made.fetches.end(asks) is None
    assert asks.num_computed_tokens == (goes_on_from or 64)
    assert made.failed_recving_kv_req_ids == (set() if goes_on_from is None else {"r"})


def test_a_request_that_is_over_is_left_alone() -> None:
    made, asks = MadeBy(), request(100, 64, is_over=True)
    assert made.fetches.missing_tokens(asks, 32) == 32
    made.fetches.begin(asks, list(range(7)), 32)
    waits = made.fetches.end(asks)
    assert waits is not None
    assert waits.key == ("s", 2)
    made.fetches.brought({"r": 0})
    made.fetches.ended(["r"])
    assert not made.failed_recving_kv_req_ids
    assert made.fetches.end(asks) is None


@pytest.mark.parametrize("is_over", [False, True])
def test_a_request_whose_fetch_has_not_stopped_begins_anew_in_other_blocks(is_over: bool) -> None:
    made, asks = MadeBy(), request(100, 64, is_over)
    made.fenced.is_late.add("r")
    assert made.fetches.missing_tokens(asks, 32) == 32
    made.fetches.begin(asks, list(range(20, 27)), 32)
    asks.num_computed_tokens = 64
    made.fetches.ended(["r"])
    assert made.fenced.kept == {"r": [22, 23]}
    assert made.failed_recving_kv_req_ids == (set() if is_over else {"r"})
    assert asks.num_computed_tokens == (64 if is_over else 0)
    assert made.fetches.missing_tokens(asks, 0) == 0, "it fetches no more"


class Holds:
    """Tiers with the blocks of these numbers; see `request`."""

    def __init__(self, *blocks: int) -> None:
        self.keys = {bytes([block]) * 32 for block in blocks}

    def leading(self, keys: list[bytes]) -> int:
        return next((place for place, key in enumerate(keys) if key not in self.keys), len(keys))


@pytest.mark.parametrize(
    ("tokens", "fetch", "computed", "missing", "is_loaded"),
    [
        (100, None, 0, 48, True),
        (100, None, 16, 32, True),
        (100, None, 48, 0, False),
        (40, None, 0, 32, True),
        (48, None, 0, 32, True),
        (100, 32, 0, 48, True),
        (100, 48, 0, 48, True),
        (100, 64, 0, 64, False),
        (100, None, 64, 0, False),
    ],
)
def test_what_the_tiers_have_is_loaded_unless_another_replica_has_more(
    tokens: int, fetch: int | None, computed: int, missing: int, is_loaded: bool
) -> None:
    fetches, asks = MadeBy().fetches, request(tokens, fetch)
    tiers: Any = Holds(0, 1, 2)
    fetches.bind(tiers, Fence())
    assert fetches.missing_tokens(asks, computed) == missing
    if missing:
        begun = fetches.begin(asks, list(range(20, 27)), missing)
        first, end = computed // SIZE, (computed + missing) // SIZE
        assert isinstance(begun, Loading if is_loaded else Fetching)
        assert (begun.blocks, begun.hashes) == (list(range(20 + first, 20 + end)), asks.block_hashes[first:end])
        waits = fetches.end(asks)
        assert waits is not None
        assert (waits.key is None) == is_loaded


def test_a_request_that_waits_for_memory_is_planned_anew() -> None:
    """vLLM asks again in each step until it has blocks for it. Meanwhile the tiers change."""
    fetches, asks, holds = MadeBy().fetches, request(100, None), Holds(0, 1, 2)
    tiers: Any = holds
    fetches.bind(tiers, Fence())
    assert fetches.missing_tokens(asks, 0) == 48
    holds.keys.clear()
    assert fetches.missing_tokens(asks, 0) == 0
    assert fetches.end(asks) is None
