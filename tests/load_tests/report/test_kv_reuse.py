"""The figures of the benchmark `kv_reuse`, from samples made by hand."""

from __future__ import annotations

import pytest

from load_tests.bench.kv_reuse import parse
from load_tests.report.kv_reuse import Sample, by_tokens, of_recomputing, slowdown, targets

GB = 10**9


def samples(way: str, *ttfts_s: float, history: int = 1000, brought_s: float = 0.0) -> list[Sample]:
    return [Sample(history, way, ttft_s, GB, brought_s) for ttft_s in ttfts_s]


def test_a_way_is_compared_with_recomputing_and_its_speed_is_what_it_adds_to_a_cached_turn() -> None:
    figures = by_tokens(
        [
            *samples("recompute", 9.0, 10.0, 11.0),
            *samples("cached", 1.0, 1.0, 1.0),
            *samples("host", 1.5, 1.4, 9.0, brought_s=0.3),
            *samples("disk", 3.0, 5.0, 4.0, brought_s=2.5),
            *samples("recompute", 20.0, history=2000),
        ]
    )
    assert list(figures) == ["1000", "2000"]
    assert figures["1000"]["host"] == {
        "repeats": 3,
        "ttft_s_p50": 1.5,
        "ttft_s_p99": 9.0,
        "gb_per_s": 2.0,
        "brought_s_p50": 0.3,
        "layered_saves_at_most": 0.2,
    }
    assert figures["1000"]["disk"]["gb_per_s"] == pytest.approx(0.33)
    assert figures["1000"]["disk"]["layered_saves_at_most"] == 0.25, "computing the rest takes 1 s of the 4"
    assert figures["1000"]["cached"]["layered_saves_at_most"] is None
    assert (figures["1000"]["cached"]["gb_per_s"], figures["1000"]["recompute"]["gb_per_s"]) == (None, None)
    ratios = of_recomputing(figures)
    assert ratios == {"1000": {"cached": 0.1, "host": 0.15, "disk": 0.4}, "2000": {}}
    assert targets(ratios, None) == {"host_at_most_0.25": True, "disk_at_most_0.4": True}
    assert targets({"1000": {"fetch_decode": 0.26}}, {"over_alone": {"p50": 0.03}}) == {
        "fetch_decode_at_most_0.25": False,
        "prefill_slowed_under_3_percent": False,
    }


def test_a_way_that_is_no_slower_than_a_cached_turn_has_no_speed() -> None:
    figures = by_tokens([*samples("cached", 1.0), *samples("host", 1.0)])
    assert figures["1000"]["host"]["gb_per_s"] is None
    assert of_recomputing(figures) == {}


def test_neighbours_are_compared() -> None:
    assert slowdown([1.0, 2.0, 4.0], [1.1, 2.0, 4.4]) == {"p50": 0.1, "least": 0.0, "most": 0.1}


def test_the_command_line() -> None:
    assert parse(["--ways", "host,recompute", "--tokens", "500"]).ways == ["host", "recompute"]
    with pytest.raises(SystemExit):
        parse(["--ways", "remember"])
