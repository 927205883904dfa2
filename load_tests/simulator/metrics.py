"""What clients saw, in a few numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Objectives:
    """A priority class for prompts of up to `most_prompt_tokens`; None: for all that no earlier class takes.

    A request is good when its first token came within `ttft_s`, and the other tokens came every `tpot_s` on average.
    `yields`: the class promises neither, and takes what the others leave; it is the last one.
    """

    name: str
    ttft_s: float
    tpot_s: float
    most_prompt_tokens: int | None = None
    yields: bool = False


HOT = "hot-"
"""How the names of clients begin whose prompts have a hot prefix. They have figures of their own."""

Classes = tuple[Objectives, ...]
"""Classes by prompt length, the shortest first. The last class takes all other prompts."""


def class_of(classes: Classes, prompt_tokens: int) -> Objectives:
    """The class of a prompt."""
    for each in classes[:-1]:
        if each.most_prompt_tokens is None or prompt_tokens <= each.most_prompt_tokens:
            return each
    return classes[-1]


@dataclass(frozen=True, slots=True)
class Record:
    """One request. `refused`: the reason, else "". `pool`: of the replica that wrote its answer. Times in seconds."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    refused: str = ""
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    cached_blocks: int = 0
    prompt_blocks: int = 0
    pool: str = ""
    mode: str = ""
    client: str = ""

    @property
    def end_s(self) -> float:
        """When its last token came. Of a request that was served."""
        return self.at_s + self.ttft_s + self.tpot_s * (self.output_tokens - 1)

    def meets(self, classes: Classes) -> bool:
        """Whether the request was served, and within both objectives of its class."""
        objectives = class_of(classes, self.prompt_tokens)
        return not self.refused and self.ttft_s <= objectives.ttft_s and self.tpot_s <= objectives.tpot_s


def summarise(records: Sequence[Record], classes: Classes, warmup_share: float = 0.5) -> dict[str, Any]:
    """Figures over the requests that arrived after the first `warmup_share` of the time, which is the warm-up.

    Goodput is per second of the rest. Percentiles are over the served requests, and 0.0 where there are none.
    `whole_*`: figures over all requests. They show when a policy gains by refusing many requests during the warm-up.
    """
    if not records:
        raise ValueError("no requests")
    last_s = max(record.at_s for record in records)
    begin_s = last_s * warmup_share
    counted = [record for record in records if record.at_s >= begin_s]
    served = [record for record in counted if not record.refused]
    length_s = max(last_s - begin_s, 1e-9)
    blocks = sum(record.prompt_blocks for record in served)
    return {
        "offered": _rounded(len(counted) / length_s),
        "goodput": _rounded(sum(record.meets(classes) for record in counted) / length_s),
        **_percentiles("ttft", [record.ttft_s for record in served]),
        **_percentiles("hot_ttft", [record.ttft_s for record in served if record.client.startswith(HOT)]),
        **_percentiles("tpot", [record.tpot_s for record in served if record.output_tokens > 1]),
        "hit_rate": _rounded(sum(record.cached_blocks for record in served) / blocks if blocks else 0.0),
        "refused": len(counted) - len(served),
        "whole_goodput": _rounded(sum(record.meets(classes) for record in records) / max(last_s, 1e-9)),
        "whole_refused": sum(bool(record.refused) for record in records),
        "counted": len(counted),
        "warmup_s": _rounded(begin_s),
        "counted_s": _rounded(length_s),
        "pool_share": _shares([record.pool for record in served]),
        "mode_share": _shares([record.mode for record in served]),
        "refusals": dict(Counter(record.refused for record in counted if record.refused)),
    }


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, (50, 99)) if values else (0.0, 0.0)
    return {f"{name}_p50_s": _rounded(float(p50)), f"{name}_p99_s": _rounded(float(p99))}


def _shares(values: Sequence[str]) -> dict[str, float]:
    return {value: _rounded(number / len(values)) for value, number in sorted(Counter(values).items())}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
