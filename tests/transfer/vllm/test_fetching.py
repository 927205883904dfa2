"""The scheduler's side of a fetch: what is asked for, once, and what a request goes on with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from transfer.vllm.fetching import Fetches

SIZE = 16


class MadeBy(Scheduler):
    """The connector looks for the scheduler that makes it."""

    def __init__(self) -> None:
        self.failed_recving_kv_req_ids: set[str] = set()
        self.fetches = Fetches(SIZE)


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
    fetching = fetches.begin(asks, [7, 8, 9, 10, 11, 12, 13], 32)
    assert (fetching.key, fetching.peers, fetching.timeout_s) == (("s", 2), ["tcp://a"], 1.5)
    assert (fetching.blocks, fetching.hashes) == ([9, 10], [bytes([2]) * 32, bytes([3]) * 32])
    assert fetches.missing_tokens(asks, 0) == 0, "a request fetches once"


@pytest.mark.parametrize(("brought", "goes_on_from"), [([2], None), ([1], 48), ([0], 32), ([2, 1], 48), ([], 32)])
def test_a_request_goes_on_from_what_every_worker_has(brought: list[int], goes_on_from: int | None) -> None:
    made, asks = MadeBy(), request(100, 64)
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
    made.fetches.begin(asks, list(range(7)), 32)
    assert made.fetches.end(asks) == ("s", 2)
    made.fetches.brought({"r": 0})
    made.fetches.ended(["r"])
    assert not made.failed_recving_kv_req_ids
    assert made.fetches.end(asks) is None
