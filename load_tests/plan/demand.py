"""The part of a trace that a fleet has to carry, and the least work in it: what no cache and no policy can save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from load_tests.plan.devices import Device
from load_tests.plan.fleets import PROMPT_CHUNK, Counts, Kind
from load_tests.simulator.metrics import Classes, class_of
from load_tests.simulator.traces import Trace, TraceError, TraceRequest

WARMUP_SHARE = 0.5
"""Requests of the first half of the time fill the fleet and its caches, and do not count."""
SURE = 0.9
"""The share of the estimated work below which a fleet is not even simulated: the estimate takes contexts as means."""
BUSY = 0.7
"""The share of its time that a replica of a first guess is busy."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked. `target`: the least share of requests within the objectives of their class."""

    trace: Trace
    classes: Classes
    target: float
    max_model_len: int

    @property
    def counted_from_s(self) -> float:
        """The arrival of the first request that counts."""
        return self.trace.requests[-1].at_s * WARMUP_SHARE

    @property
    def counted(self) -> int:
        return sum(request.at_s >= self.counted_from_s for request in self.trace.requests)

    @property
    def misses_allowed(self) -> int:
        """The most requests that may miss."""
        return int(self.counted * (1.0 - self.target) + 1e-9)


def busiest(trace: Trace, count: int, requests_per_s: float | None = None) -> Trace:
    """The `count` requests in a row that come in the shortest time, from time 0 on.

    `requests_per_s`: the mean rate of the whole trace, to which its times are compressed or stretched; None: its own.
    Raises TraceError where the requests do not span any time.
    """
    requests = trace.requests
    length_s = requests[-1].at_s - requests[0].at_s
    if length_s <= 0:
        raise TraceError(f"{trace.name}: its requests all come at once, so they have no rate")
    factor = 1.0 if requests_per_s is None else (len(requests) - 1) / length_s / requests_per_s
    count = min(count, len(requests))
    begins = range(len(requests) - count + 1)
    begin = min(begins, key=lambda each: requests[each + count - 1].at_s - requests[each].at_s)
    taken = requests[begin : begin + count]
    moved = tuple(replace(request, at_s=(request.at_s - taken[0].at_s) * factor) for request in taken)
    return replace(trace, requests=moved)


@dataclass(frozen=True, slots=True)
class Work:
    """Replica-seconds that a device needs for each second of demand, at least: of prompts, and of answers."""

    prompts: float
    answers: float

    @property
    def whole(self) -> float:
        return self.prompts + self.answers


def uncached(demand: Demand) -> Iterator[tuple[TraceRequest, int]]:
    """The requests that count, each with the tokens of its prompt that an endless cache would have."""
    seen: set[int] = set()
    block = demand.trace.block_tokens
    for request in demand.trace.requests:
        hits = 0
        while hits < len(request.hashes) and request.hashes[hits] in seen:
            hits += 1
        seen.update(request.hashes)
        seen.update(request.answered)
        if request.at_s >= demand.counted_from_s:
            yield request, min(hits * block, request.prompt_tokens - 1)


def least_work(demand: Demand, device: Device) -> Work:
    """The work of all requests but the largest, which may miss."""
    steps, each = device.steps, list[tuple[float, float]]()
    for request, cached in uncached(demand):
        context = request.prompt_tokens + request.output_tokens / 2
        batch = _most_at_once(device, context, class_of(demand.classes, request.prompt_tokens).tpot_s)
        token_s = steps.base_s / batch + steps.sequence_s + steps.context_s * context
        prompt_s = steps.beside_s(request.prompt_tokens, cached)
        each.append((prompt_s, (request.output_tokens - 1) * token_s))
    each.sort(key=sum)
    kept = each[: len(each) - demand.misses_allowed]
    length_s = demand.trace.requests[-1].at_s - demand.counted_from_s
    return Work(sum(prompt for prompt, _ in kept) / length_s, sum(answer for _, answer in kept) / length_s)


def _most_at_once(device: Device, context: float, tpot_s: float) -> float:
    """Answers that share a step of at most `tpot_s`, at least one."""
    steps = device.steps
    in_time = (tpot_s - steps.base_s) / (steps.sequence_s + steps.context_s * context)
    return max(1.0, min(in_time, device.sequences, device.kv_tokens / context))


def hopeless(demand: Demand, device: Device) -> int:
    """The number of requests that miss their objectives on such a device even if it has nothing else to do."""
    steps, misses = device.steps, 0
    for request, cached in uncached(demand):
        objectives = class_of(demand.classes, request.prompt_tokens)
        ttft_s = steps.prefill_s(request.prompt_tokens, cached, PROMPT_CHUNK)
        tpot_s = steps.step_s(0, 0, 1, request.prompt_tokens) if request.output_tokens > 1 else 0.0
        misses += ttft_s > objectives.ttft_s or tpot_s > objectives.tpot_s
    return misses


@dataclass(frozen=True, slots=True)
class Room:
    """What may be searched of a kind. `least`: fewer replicas in all do not suffice. `guess`: of each pool."""

    kind: Kind
    least: int
    guess: Counts


def room(demand: Demand, kind: Kind) -> Room:
    """The bounds of a kind. Any replica may do any work, so each part is taken from the device that does it best."""
    works = [least_work(demand, device) for device in kind.devices]
    work = min(each.prompts for each in works) + min(each.answers for each in works)
    least = max(len(works), int(SURE * work) + 1)
    shares = (works[0].prompts, works[1].answers) if len(works) == 2 else (works[0].whole,)
    return Room(kind, least, tuple(max(1, round(share / BUSY)) for share in shares))
