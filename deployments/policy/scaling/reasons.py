"""The reasons for a pool's size, as codes that stay the same; the sentences beside them may change. Pure."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a pool gets its size. `docs/guides/scaling.md` explains each."""

    # it grows: what strains it most
    PREFILL_TTFT = "prefill_ttft"
    PREFILL_BUSY = "prefill_busy"
    DECODE_TPOT = "decode_tpot"
    DECODE_MEMORY = "decode_memory"
    DECODE_PLACES = "decode_places"
    FORECAST_FLOOR = "forecast_floor"
    WAKE = "wake"
    # it shrinks
    SPARE = "spare"
    IDLE_ZERO = "idle_zero"
    # it stays as it is
    NEEDED = "needed"
    NEEDED_LATELY = "needed_lately"
    HOLD = "hold"
    LEAST = "least"
    MOST = "most"
    OTHER_POOL = "other_pool"
    NO_LOAD = "no_load"
    SPEED_UNKNOWN = "speed_unknown"
    # it gets less than it should
    BUDGET = "budget"
    CANNOT_PLACE = "cannot_place"
