"""The order in which the lines of a window are asked. Pure.

Lines whose prompts begin alike are neighbours, so that a prefix is computed once. Of these groups, some are heavy in
prompt and some in answers: the first need an engine's arithmetic, the second its memory's bandwidth. They are taken
from both ends of the scale, so that at each moment the lines that run are a mix of both, as the whole window is
(BlendServe, arXiv 2411.16102).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from app.batches.line_request import LineRequest

SHARED_BYTES = 512
"""Lines are of one group where their prompts share so many bytes, behind what all lines of the window share."""

BYTES_PER_TOKEN = 4.0
"""What a token of a prompt is taken to have: what counts is the difference between lines."""


@dataclass(frozen=True, slots=True)
class Group:
    """Lines that begin alike, in order.

    `prompt_tokens`: about what is computed of their prompts. `answer_tokens`: about what is written.
    """

    lines: tuple[LineRequest, ...]
    prompt_tokens: float
    answer_tokens: float

    @property
    def density(self) -> float:
        """Prompt tokens for each token of the answers."""
        return self.prompt_tokens / self.answer_tokens


def in_mixed_order(requests: Iterable[LineRequest]) -> list[LineRequest]:
    """The requests of a window in the order in which they are asked. How they come in does not change it."""
    return [line for group in mixed(groups_of(requests)) for line in group.lines]


def groups_of(requests: Iterable[LineRequest]) -> list[Group]:
    """The requests in groups of those that begin alike, in the order of a walk through the tree of all prefixes."""
    lines = sorted(requests, key=lambda request: (request.prefix, request.line))
    if not lines:
        return []
    least = _shared_bytes(lines[0], lines[-1]) + SHARED_BYTES
    groups, group = [], [lines[0]]
    for before, line in pairwise(lines):
        if before.prefix[:least] != line.prefix[:least]:
            groups.append(_group(group))
            group = []
        group.append(line)
    return [*groups, _group(group)]


def _group(lines: Sequence[LineRequest]) -> Group:
    """What a line shares with the one before it is not computed again."""
    shared = sum(_shared_bytes(before, line) for before, line in pairwise(lines))
    computed = max(sum(line.prompt_bytes for line in lines) - shared, 0)
    return Group(tuple(lines), computed / BYTES_PER_TOKEN, float(sum(line.answer_tokens for line in lines)))


def _shared_bytes(one: LineRequest, other: LineRequest) -> int:
    """How many bytes two prompts begin with alike, as far as `prefix` goes."""
    low, high = 0, min(len(one.prefix), len(other.prefix))
    while low < high:
        middle = (low + high + 1) // 2
        if one.prefix[:middle] == other.prefix[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def mixed(groups: Sequence[Group]) -> list[Group]:
    """The groups so that what has been taken is always about as heavy in prompt as all of them together.

    What is too much or too little of prompt tokens is at no time more than that of the one group that has most of it.
    """
    prompt_tokens, answer_tokens = (
        sum(each.prompt_tokens for each in groups),
        sum(each.answer_tokens for each in groups),
    )
    mean = prompt_tokens / answer_tokens if answer_tokens else 0.0
    left = deque(sorted(groups, key=lambda each: (each.density, each.lines[0].line)))
    taken, surplus = [], 0.0
    while left:
        group = left.popleft() if surplus > 0 else left.pop()
        surplus += group.prompt_tokens - mean * group.answer_tokens
        taken.append(group)
    return taken
