"""How well the lengths of answers are predicted, for an engine that plans its memory by them.

`make bench NAME=lengths`, or with `ARGS="--traces azure"`. No engine runs; it takes a minute. Progress goes to stderr;
the last line of stdout is one JSON object.

**What runs.** The requests of a trace in their order through the placement policy's predictor. An answer is learned
when `--late` (256) later requests have come. The first 1,024 requests are learned from and not judged. A trace says of
a request only its prompt's length, so the predictor knows no client and no conversation. All ask for 4,096 tokens: the
limits that the simulator makes up for traces follow from the answers, and would give them away.

**What is measured, beside a constant.** The constant is the mean of all answers that were learned so far.
`bucket_accuracy`: the share of answers that are in the predicted one of five buckets, which each hold a fifth of the
trace's answers. The constant's is that of its own bucket, and chance gives 0.2. `sum_error`: the mean relative error of
the sum over 256 requests. `future`: of 256 requests that begin at once, the KV blocks that are expected at points 32 to
1,024 decode steps ahead over those that are really held then (`ratio`, 1 is right), and the mean size of the error
relative to the most that is held (`error`). A request that ends between two points counts at the second, so a little
more than 1 is meant. `chance_N`: each request counts with its chance to be there, as engines count it; `end_N`: up to
one predicted end, as TD-Pipe counts it. N: the tokens that each of the 256 has by then; behind 0, it is how well the
prediction is corrected while answers are written.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from deployments.messages import SessionRequest
from deployments.policy.prediction.answer_length import LengthPredictor
from deployments.policy.temporal.lengths import AnswerLengths, Job
from deployments.policy.temporal.memory import AT, POINT_STEPS, POINTS, FutureMemory, until
from load_tests.harness.machine import conditions
from load_tests.simulator.traces import Trace, TraceError, TraceRequest, find

TRACES = ("azure", "mooncake")
WARM, GROUP, BUCKETS, BLOCK_TOKENS = 1024, 256, 5, 16
WRITTEN = (0, 64, 256)
LIMIT = 4096
"""What every client asks for, in tokens; no answer of the traces is longer."""
SHOWN = (32, 64, 128, 256, 512, 1024)
"""The points of the future that are told one by one."""


class Replay:
    """A trace through the predictor. `late`: requests that come before an answer is learned."""

    def __init__(self, trace: Trace, late: int) -> None:
        self._trace, self._late = trace, late
        self.predictor = LengthPredictor()
        self._sum, self._count = 0, 0

    @property
    def constant(self) -> float:
        """The mean of all answers that were learned."""
        return self._sum / max(self._count, 1)

    def groups(self, size: int) -> Iterator[Sequence[TraceRequest]]:
        """Requests that begin together, once the first are learned. What comes before each group is learned by then,
        but for the last `late` answers."""
        open_answers: deque[tuple[SessionRequest, int]] = deque()
        requests = self._trace.requests
        for begin in range(0, len(requests) - size + 1, size):
            group = requests[begin : begin + size]
            if begin >= WARM:
                yield group
            for number, each in enumerate(group, begin):
                open_answers.append((_request(number, each), each.output_tokens))
            while len(open_answers) > self._late:
                self._learn(*open_answers.popleft())

    def _learn(self, request: SessionRequest, tokens: int) -> None:
        self.predictor.observe(request, tokens)
        self._sum, self._count = self._sum + tokens, self._count + 1


def _request(number: int, request: TraceRequest) -> SessionRequest:
    return SessionRequest(f"s{number}", request.prompt_tokens, LIMIT)


def measure(trace: Trace, late: int) -> dict[str, Any]:
    """The figures of one trace."""
    bounds = np.quantile([each.output_tokens for each in trace.requests], np.arange(1, BUCKETS) / BUCKETS).tolist()
    replay, hits, errors = Replay(trace, late), [], []
    futures: dict[tuple[str, int], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for group in replay.groups(GROUP):
        real = [each.output_tokens for each in group]
        guessed = [replay.predictor.guess(_request(0, each)) for each in group]
        constant = bisect_left(bounds, replay.constant)
        buckets = [bisect_left(bounds, tokens) for tokens in real]
        hits += [
            (bisect_left(bounds, guess.mean) == bucket, bisect_left(bounds, guess.p50) == bucket, constant == bucket)
            for guess, bucket in zip(guessed, buckets, strict=True)
        ]
        predicted = sum(guess.mean for guess in guessed)
        errors.append((abs(predicted / sum(real) - 1.0), abs(GROUP * replay.constant / sum(real) - 1.0)))
        for written in WRITTEN:
            if live := [each for each in group if each.output_tokens > written]:
                futures["chance", written].append(future(replay, live, written, by_end=False))
                futures["end", written].append(future(replay, live, written, by_end=True))
    return {
        "requests": len(hits),
        "bucket_accuracy": dict(zip(("mean", "p50", "constant"), _means(hits), strict=True)),
        "sum_error": dict(zip(("predicted", "constant"), _means(errors), strict=True)),
        "future": {f"{way}_{written}": calibration(found) for (way, written), found in futures.items()},
    }


def future(replay: Replay, live: Sequence[TraceRequest], written: int, by_end: bool) -> tuple[np.ndarray, np.ndarray]:
    """The blocks that are expected at each point, and those that are held. `by_end`: as if each ended where the mean of
    what is predicted is."""
    lengths, memory = AnswerLengths(replay.predictor), FutureMemory(BLOCK_TOKENS)
    held = np.zeros(POINTS)
    for number, each in enumerate(live):
        job = Job(str(number), each.prompt_tokens, LIMIT)
        outlook = until(lengths.left(job, written)) if by_end else lengths.outlook(job, written)
        memory.put(number, each.prompt_tokens + written, outlook)
        tokens = each.prompt_tokens + written + AT
        held += np.where(written + AT <= each.output_tokens, np.ceil(tokens / BLOCK_TOKENS), 0)
    return np.array(memory.usage, dtype=float), held


def calibration(found: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """`ratio` at points of the future, and `error` over all of them."""
    expected, held = (np.sum([pair[side] for pair in found], axis=0) for side in range(2))
    at = {point: point // POINT_STEPS - 1 for point in SHOWN}
    ratio = {str(point): round(expected[i] / held[i], 3) if held[i] else None for point, i in at.items()}
    errors = [np.abs(one - other).mean() / other.max() for one, other in found if other.max() > 0]
    peaks = [one.max() / other.max() for one, other in found if other.max() > 0]
    return {"ratio": ratio, "error": round(float(np.mean(errors)), 3), "peak_ratio": round(float(np.mean(peaks)), 3)}


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [round(float(mean), 4) for mean in np.mean(np.array(rows, dtype=float), axis=0)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default=",".join(TRACES), help="files' beginnings, by comma")
    parser.add_argument("--late", type=int, default=256, help="requests that come before an answer is learned")
    options = parser.parse_args(arguments)
    before, figures = conditions(), {}
    for name in options.traces.split(","):
        print(f"{name} ...", file=sys.stderr, flush=True)
        figures[name] = measure(find(name), options.late)
    asked = {"late": options.late, "max_tokens": LIMIT, "group": GROUP, "warm": WARM, "block_tokens": BLOCK_TOKENS}
    print(json.dumps({"benchmark": "lengths", "conditions": before | asked, "traces": figures}))


if __name__ == "__main__":
    try:
        main()
    except TraceError as error:
        sys.exit(str(error))
