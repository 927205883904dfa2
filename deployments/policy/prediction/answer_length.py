"""How long an answer will be, by quantile, from what is known when its request arrives.

Answers are counted in cells: of one conversation, of a client, of a prompt size, of all requests. A request is
predicted by the most specific of its cells that has seen enough answers. Before any has, the prediction is the
request's limit. A cell is a histogram over lengths that grow by 6%. Old answers fade in it, so its memory does not
grow.

The histogram's own quantile is not trusted. Its level moves until the share of answers below it is right (adaptive
conformal inference, Gibbs and Candes 2021). The mean is not corrected in this way: answers end long after their
prediction, so the correction oscillates (on real traces it tripled the error of sums). An answer that its limit cut off
counts as one of the longer answers, in proportion (redistribution to the right, Efron 1967).

A session that moved or was lost asks again for the rest of its answer. Its whole answer is what is learned, and its
rest is predicted from the answers that were longer than what it has.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.messages import SessionRequest

GROWTH = 1.06
"""How many times as long as the bucket before each bucket is."""

LONGEST_TOKENS = 4_000_000
"""The longest answer that has a bucket of its own."""

BUCKETS = math.ceil(math.log(LONGEST_TOKENS) / math.log(GROWTH)) + 1
UPPER = GROWTH ** np.arange(BUCKETS)
"""The longest length of each bucket in tokens; the first bucket holds lengths up to 1."""
MIDDLE = np.maximum(UPPER / math.sqrt(GROWTH), 1.0)
"""The length of each bucket's answers in the mean."""

RESCALE_AT = 1e9
"""The largest weight of an answer; beyond it all weights are scaled down."""


class Length(NamedTuple):
    """A predicted length in tokens. The answer is at most `p50` long with a chance of a half, `p90` of nine tenths."""

    p50: int
    p90: int
    mean: float


class _Cell:
    """A fading histogram. Old answers are not touched: each new answer weighs more than the one before it."""

    def __init__(self, memory: int) -> None:
        self._growth = math.exp(1.0 / memory)
        self._weight = 1.0
        self._total = 0.0
        self.counts: NDArray[np.float64] = np.zeros(BUCKETS)

    @property
    def count(self) -> float:
        """The number of answers that still count."""
        return self._total / self._weight

    def add(self, tokens: int, at_least: bool) -> None:
        self._weight *= self._growth
        self._total += self._weight
        bucket = _bucket(tokens)
        longer = self.counts[bucket:]
        if at_least and (mass := longer.sum()) > 0:
            longer *= 1.0 + self._weight / mass
        else:
            self.counts[bucket] += self._weight
        if self._weight > RESCALE_AT:
            self.counts /= self._weight
            self._total /= self._weight
            self._weight = 1.0

    def predict(self, max_tokens: int, levels: tuple[float, float], least: int) -> tuple[float, float, float] | None:
        """Quantiles and mean of the answers of more than `least` tokens; None where there are none."""
        counts = np.where(least < UPPER, self.counts, 0.0) if least else self.counts
        below = counts.cumsum()
        total = float(below[-1])
        if total <= 0.0:
            return None
        p50, p90 = UPPER[below.searchsorted((levels[0] * total, levels[1] * total))].tolist()
        return p50, p90, float(np.minimum(MIDDLE, max_tokens).dot(counts)) / total

    def longer(self, than: NDArray[np.int64], least: int) -> NDArray[np.float64] | None:
        """Of the answers of more than `least` tokens, the shares that are longer than each of `than`; None as above."""
        below = self.counts.cumsum()
        total = below[-1] - np.interp(least, UPPER, below, left=0.0)
        if total <= 0.0:
            return None
        return np.asarray((below[-1] - np.interp(than, UPPER, below, left=0.0)) / total)


class LengthPredictor:
    """Learns from every answer that ends; there is one per cluster. A call costs about ten microseconds.

    `memory`: after this many answers, an answer has faded to a third. `enough`: the answers that a cell needs to be
    asked, fewer than `memory`. `max_cells`: the most cells, of 2 KiB each; the one unused for longest is dropped first.
    `max_pending`: the most predictions that are remembered until their answers end. `window`: the newest answers that
    the calibration is about.
    """

    def __init__(
        self,
        *,
        memory: int = 160,
        enough: int = 32,
        max_cells: int = 4096,
        max_pending: int = 65_536,
        window: int = 1024,
    ) -> None:
        self._memory, self._enough = memory, enough
        self._max_cells, self._max_pending = max_cells, max_pending
        self._cells: OrderedDict[Hashable, _Cell] = OrderedDict()
        self._pending: OrderedDict[str, Length] = OrderedDict()
        self._judge = _Judge(window)

    def predict(self, request: SessionRequest) -> Length:
        """The predicted length of what is to be written, never above `max_tokens`.

        It is remembered, and `observe` compares it with the answer.
        """
        length = self.guess(request)
        self._pending[request.session_id] = length
        self._pending.move_to_end(request.session_id)
        if len(self._pending) > self._max_pending:
            self._pending.popitem(last=False)
        return length

    def guess(self, request: SessionRequest) -> Length:
        """The same, and nothing is remembered."""
        limit, answered = request.max_tokens, request.answered_tokens
        for key in _keys(request):
            cell = self._cells.get(key)
            if cell is None or cell.count < self._enough:
                continue
            if (found := cell.predict(limit + answered, self._judge.levels, answered)) is not None:
                p50, p90, mean = (max(each - answered, 1.0) for each in found)
                p50_tokens = min(math.floor(p50), limit)
                p90_tokens = max(min(math.floor(p90), limit), p50_tokens)
                return Length(p50_tokens, p90_tokens, min(mean, float(limit)))
        return Length(limit, limit, float(limit))

    def lasting(self, request: SessionRequest, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The chances that what is to be written is longer than each of `tokens`. Nothing is remembered."""
        limit, answered = request.max_tokens, request.answered_tokens
        within = tokens < limit
        for key in _keys(request):
            cell = self._cells.get(key)
            if cell is None or cell.count < self._enough:
                continue
            if (found := cell.longer(tokens + answered, answered)) is not None:
                return np.where(within, found, 0.0)
        return within.astype(np.float64)

    def observe(self, request: SessionRequest, output_tokens: int, finished_by_limit: bool = False) -> None:
        """An answer ended. Do not report answers that the client or a failure cut short: they say too little.

        `output_tokens`: without those that were answered before this request; below 1, they are ignored.
        `finished_by_limit`: without its limit the answer would have been longer.
        """
        predicted = self._pending.pop(request.session_id, None)
        if output_tokens < 1:
            return
        if predicted is not None:
            self._judge.observe(predicted, output_tokens, request.max_tokens)
        for key in _keys(request):
            self._cell(key).add(output_tokens + request.answered_tokens, finished_by_limit)

    def _cell(self, key: Hashable) -> _Cell:
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell(self._memory)
            if len(self._cells) > self._max_cells:
                self._cells.popitem(last=False)
        self._cells.move_to_end(key)
        return cell

    def calibration(self) -> dict[str, float | None]:
        """How good the newest predictions were. A value is None while too few answers were judged.

        `coverage_p50`, `coverage_p90`: the share of answers no longer than predicted. `sum_error_256`: the mean, over
        spans of 256 answers, of the error of their summed means relative to their real sum. `count`: answers judged.
        """
        return self._judge.calibration()

    def __len__(self) -> int:
        return len(self._cells)


class _Judge:
    """Compares predictions with answers, and moves the levels of the next predictions."""

    SPAN = 256
    LEVEL_STEP = 0.005
    BOUNDS = ((0.3, 0.7), (0.75, 0.985))

    def __init__(self, window: int) -> None:
        self._judged: deque[tuple[bool, bool, float, int]] = deque(maxlen=window)
        self._count = 0
        self.levels = (0.5, 0.9)

    def observe(self, predicted: Length, tokens: int, limit: int) -> None:
        covered = tokens <= predicted.p50, tokens <= predicted.p90
        self._judged.append((*covered, predicted.mean, tokens))
        self._count += 1
        # A prediction at the limit covers every answer, so it says nothing about the level.
        p50 = self._moved(0, 0.5, covered[0]) if predicted.p50 < limit else self.levels[0]
        p90 = self._moved(1, 0.9, covered[1]) if predicted.p90 < limit else self.levels[1]
        self.levels = p50, p90

    def _moved(self, index: int, target: float, covered: bool) -> float:
        low, high = self.BOUNDS[index]
        return min(max(self.levels[index] + self.LEVEL_STEP * (target - covered), low), high)

    def calibration(self) -> dict[str, float | None]:
        judged = list(self._judged)
        count = len(judged)
        spans = [judged[end - self.SPAN : end] for end in range(count, self.SPAN - 1, -self.SPAN)]
        errors = [abs(sum(one[2] for one in span) / sum(one[3] for one in span) - 1.0) for span in spans]
        return {
            "coverage_p50": sum(one[0] for one in judged) / count if count else None,
            "coverage_p90": sum(one[1] for one in judged) / count if count else None,
            "sum_error_256": sum(errors) / len(errors) if errors else None,
            "count": float(self._count),
        }


def _bucket(tokens: int) -> int:
    return min(int(np.searchsorted(UPPER, tokens)), BUCKETS - 1)


def _keys(request: SessionRequest) -> list[Hashable]:
    """The cells of a request, the most specific first; the last is the cell of all requests."""
    answered = request.answered_tokens
    prompt, limit = (request.prompt_tokens - answered).bit_length(), (request.max_tokens + answered).bit_length()
    kind = request.chat, limit
    keys: list[Hashable] = [("affinity", request.affinity)] if request.affinity else []
    if request.client:
        keys += [("client", request.client, kind, prompt), ("client", request.client, kind)]
    return [*keys, ("prompt", kind, prompt), ("kind", kind), ("all",)]
