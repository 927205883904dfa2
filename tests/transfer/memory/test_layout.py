"""KV layouts: arithmetic, and which two can exchange blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from transfer.memory.layout import KVLayout, mismatch

LAYOUT = KVLayout(
    num_layers=3,
    regions_per_layer=2,
    num_blocks=10,
    block_size=16,
    block_bytes=64,
    bases=(0, 1000, 2000, 3000, 4000, 5000),
    facts={"model": "one"},
)


def test_sizes() -> None:
    assert LAYOUT.layer_block_bytes == 128
    assert LAYOUT.kv_bytes(5) == 5 * 3 * 128


def test_index_counts_every_block_of_every_region_once() -> None:
    found = [LAYOUT.index(layer, b, r) for layer in range(3) for r in range(2) for b in range(10)]
    assert found == list(range(60))


def test_regions_must_match_the_layers() -> None:
    with pytest.raises(ValueError, match="5 regions for 3 layers x 2"):
        replace(LAYOUT, bases=LAYOUT.bases[:-1])


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 6, "regions_per_layer": 1},
        {"num_layers": 2, "bases": LAYOUT.bases[:4]},
        {"block_size": 32},
        {"block_bytes": 65},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_difference_is_named_with_both_values(change: dict[str, Any]) -> None:
    other = replace(LAYOUT, **change)
    name = next(iter(change)).replace("block_bytes", "head_bytes").replace("num_layers", "total_layers")
    reason = mismatch(LAYOUT, other)
    assert reason is not None
    assert name in reason
    assert repr(getattr(LAYOUT, name)) in reason
    assert repr(getattr(other, name)) in reason


def test_an_unlike_fact_is_named_with_both_values() -> None:
    assert mismatch(LAYOUT, replace(LAYOUT, facts={"model": "two"})) == "model differs: 'one' here, 'two' there"
    more = replace(LAYOUT, facts={"model": "one", "vllm": "9"})
    assert mismatch(LAYOUT, more) == "vllm differs: None here, '9' there"


@pytest.mark.parametrize(
    "change", [{"num_blocks": 99}, {"bases": (9,) * 6}, {"device": "cuda", "device_id": 3}], ids=str
)
def test_place_and_amount_of_memory_may_differ(change: dict[str, Any]) -> None:
    assert mismatch(LAYOUT, replace(LAYOUT, **change)) is None


STAGE = replace(LAYOUT, rank=3, workers=4, total_heads=2, stages=(2, 3))


def test_a_worker_of_a_stage_has_the_layers_and_heads_of_its_place() -> None:
    assert (STAGE.layers, STAGE.total_layers, STAGE.heads) == (range(2, 5), 5, range(1, 2))
    assert (LAYOUT.layers, LAYOUT.total_layers) == (range(3), 3)


def test_layers_are_numbered_as_in_the_model() -> None:
    found = [STAGE.index(layer, b, r) for layer in (2, 3, 4) for r in range(2) for b in range(10)]
    assert found == list(range(60))
    assert [STAGE.address(layer, 1, 1) for layer in (2, 3, 4)] == [1064, 3064, 5064]


def test_stages_may_differ_where_layers_are_shared() -> None:
    whole = replace(LAYOUT, num_layers=5, bases=tuple(range(10)), total_heads=2, block_bytes=128)
    assert mismatch(STAGE, whole) is None
    assert mismatch(whole, STAGE) is None
    first = replace(STAGE, rank=1, stages=(3, 2))
    assert mismatch(STAGE, first) is None
    assert STAGE.shared_layers(first.partition, 1) == range(2, 3)
    assert mismatch(STAGE, replace(first, num_layers=2, bases=LAYOUT.bases[:4], stages=(2, 3))) == (
        "no layers in common: range(2, 5) here, range(0, 2) there"
    )


@pytest.mark.parametrize(
    "change",
    [{"stages": (3, 2)}, {"stages": (2, 3, 1)}, {"stages": (0, 3)}, {"stages": (5,)}, {"stages": (2, 2**31)}],
    ids=str,
)
def test_stages_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="stages of"):
        replace(STAGE, **change)
