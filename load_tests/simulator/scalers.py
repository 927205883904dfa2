"""Scalers for the elastic simulation: Baton's planner, a fixed fleet, and the published rules of others.

- `serve`: Ray Serve's default rule, as its source has it. Ongoing requests over `target_ongoing_requests`, their mean
  over 30 s. A larger size comes after 30 s in which it was wanted, a smaller one after 600 s.
- `dynamo`: NVIDIA Dynamo's throughput-based planner, as its design document has it. Every 60 s, the requests of the
  last 60 s times their mean lengths, over the throughput that one replica was profiled to have within the objectives,
  with the two correction factors (observed over expected TTFT and ITL). Its profile is the simulator's own truth.
- `keda`: llm-d's rules for KEDA, with the defaults of the autoscaler that carries them out. Every 15 s, outstanding
  prompt tokens over what a replica computes in half a second for prefill. For decode, KV occupancy over 0.8, or running
  requests over their target where that is more. What waits counts. Starting replicas count as capacity. A smaller size
  comes when all of 300 s wanted it, and no change within 10%.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from configs.schema import BatonConfig
from deployments.messages import Role
from deployments.policy.scaling.observe import observe
from deployments.policy.scaling.planner import Planner
from load_tests.simulator.elastic import Members, Scaler, Watched
from load_tests.simulator.metrics import Objectives
from load_tests.simulator.profiles import Pool

PROMPTS_ONGOING = 2.0
"""Serve's default of `target_ongoing_requests`, which suits prefill."""
FULL = 0.7


class Fixed:
    """The sizes stay as they are."""

    def targets(self, watched: Watched) -> Mapping[str, int]:
        return {}


class Baton:
    """The production planner, which reads what the session manager would give it."""

    def __init__(self, config: BatonConfig) -> None:
        self._planner = Planner(config)
        self.plans: list[object] = []

    def targets(self, watched: Watched) -> Mapping[str, int]:
        pools, at_s = watched.pools, watched.at_s
        targets = {name: members.target for name, members in pools.items()}
        starting = {name: [at_s - start.begun_s for start in members.starting] for name, members in pools.items()}
        plan = self._planner.plan(observe(watched.allocator, tuple(pools), at_s, targets, starting))
        self.plans.append(plan)
        return plan.targets


class Serve:
    """`ongoing`: `target_ongoing_requests` by deployment."""

    UP_S, DOWN_S, MEAN_S = 30.0, 600.0, 30.0

    def __init__(self, ongoing: Mapping[str, float]) -> None:
        self._ongoing = ongoing
        self._seen: dict[str, deque[tuple[float, int]]] = {name: deque() for name in ongoing}
        self._wanted: dict[str, tuple[int, float]] = {}

    def targets(self, watched: Watched) -> Mapping[str, int]:
        return {name: self._size(name, members, watched.at_s) for name, members in watched.pools.items()}

    def _size(self, name: str, members: Members, at_s: float) -> int:
        seen = self._seen[name]
        seen.append((at_s, sum(len(node.replica.sessions) for node in members.nodes)))
        while seen[0][0] < at_s - self.MEAN_S:
            seen.popleft()
        desired = math.ceil(sum(count for _, count in seen) / len(seen) / self._ongoing[name])
        sign = (desired > members.target) - (desired < members.target)
        before, since_s = self._wanted.get(name, (0, at_s))
        if sign != before:
            since_s = at_s
        self._wanted[name] = sign, since_s
        if sign == 0 or at_s - since_s < (self.UP_S if sign > 0 else self.DOWN_S):
            return members.target
        del self._wanted[name]
        return desired


@dataclass(frozen=True, slots=True)
class Profiled:
    """What one replica of each pool does within the objectives, as measured beforehand."""

    prefill: Pool
    decode: Pool
    objectives: Objectives
    context_tokens: float

    def prompt_tokens_per_s(self, tokens: float) -> float:
        """A prefill replica's throughput with prompts of this length."""
        return tokens / self.prompt_s(tokens)

    def prompt_s(self, tokens: float) -> float:
        """The time of a prompt alone."""
        return self.prefill.profile.steps.prefill_s(max(1, round(tokens)), 0, self.prefill.limits.batched_tokens)

    @property
    def answers_ongoing(self) -> float:
        """A sensible `target_ongoing_requests` for decode: `FULL` of the answers that one replica can write."""
        return max(1.0, FULL * self._most_answers(self.objectives.tpot_s))

    def answer_tokens_per_s(self, tpot_s: float) -> float:
        """A decode replica's throughput at the most answers with that TPOT, which its memory holds."""
        answers, context = self._most_answers(tpot_s), self.context_tokens
        return answers / self.decode.profile.steps.step_s(0, 0, answers, answers * context)

    def _most_answers(self, tpot_s: float) -> float:
        profile, context = self.decode.profile, self.context_tokens
        by_memory = profile.kv_bytes / profile.kv_bytes_per_token / context
        by_time = (tpot_s - profile.steps.base_s) / (profile.steps.sequence_s + context * profile.steps.context_s)
        return min(max(by_time, 1.0), by_memory, float(self.decode.limits.sequences))


class Dynamo:
    """See the module."""

    EVERY_S = 60.0

    def __init__(self, profiled: Profiled, prefill: str, decode: str) -> None:
        self._profiled, self._prefill, self._decode = profiled, prefill, decode
        self._next_s = self.EVERY_S
        self._requests, self._prompt, self._answer = 0, 0, 0
        self._ttft: list[float] = []
        self._itl: list[float] = []

    def targets(self, watched: Watched) -> Mapping[str, int]:
        self._requests += len(watched.arrived)
        self._prompt += sum(each.prompt_tokens for each in watched.arrived)
        self._answer += sum(each.output_tokens for each in watched.arrived)
        served = [record for record in watched.ended if not record.refused]
        self._ttft += [record.ttft_s for record in served]
        self._itl += [record.tpot_s for record in served if record.output_tokens > 1]
        if watched.at_s < self._next_s:
            return {}
        self._next_s = watched.at_s + self.EVERY_S
        found = self._sizes(watched) if self._requests and self._ttft and self._itl else {}
        self._requests, self._prompt, self._answer, self._ttft, self._itl = 0, 0, 0, [], []
        return found

    def _sizes(self, watched: Watched) -> Mapping[str, int]:
        profiled = self._profiled
        isl = self._prompt / self._requests
        expected_ttft_s = profiled.prompt_s(isl)
        prefill_factor = sum(self._ttft) / len(self._ttft) / expected_ttft_s
        per_s = self._prompt / self.EVERY_S * min(1.0, prefill_factor)
        prefill = math.ceil(per_s / profiled.prompt_tokens_per_s(isl))
        itl_s = sum(self._itl) / len(self._itl)
        running = sum(len(node.replica.batch) for node in watched.pools[self._decode].nodes)
        each = running / max(1, len(watched.pools[self._decode].nodes))
        steps = profiled.decode.profile.steps
        factor = itl_s / steps.step_s(0, 0, each, each * profiled.context_tokens)
        throughput = profiled.answer_tokens_per_s(profiled.objectives.tpot_s / max(factor, 0.1))
        return {
            self._prefill: max(1, prefill),
            self._decode: max(1, math.ceil(self._answer / self.EVERY_S / throughput)),
        }


class Keda:
    """See the module. `tokens_per_s`: what a prefill replica computes. `ongoing`: the answers that one shall write."""

    EVERY_S, DOWN_S, FILL, TOLERANCE, QUEUED_S = 15.0, 300.0, 0.8, 0.1, 0.5

    def __init__(self, tokens_per_s: float, ongoing: float) -> None:
        self._tokens_per_s, self._ongoing = tokens_per_s, ongoing
        self._next_s = 0.0
        self._wanted: dict[str, deque[tuple[float, int]]] = {}

    def targets(self, watched: Watched) -> Mapping[str, int]:
        if watched.at_s < self._next_s:
            return {}
        self._next_s = watched.at_s + self.EVERY_S
        return {
            name: self._stable(name, self._size(members, watched), members.target, watched.at_s)
            for name, members in watched.pools.items()
        }

    def _size(self, members: Members, watched: Watched) -> int:
        queued = tuple(watched.allocator.room.requests())
        if members.pool.role is Role.PREFILL:
            tokens = sum(node.replica.backlog_tokens for node in members.nodes)
            tokens += sum(request.prompt_tokens for request in queued)
            return self._tolerant(tokens / self._tokens_per_s / self.QUEUED_S, members.target)
        fill = sum(node.replica.memory.used / node.replica.memory.total for node in members.nodes)
        held = sum(node.replica.memory.used for node in members.nodes)
        sessions = sum(len(node.replica.sessions) for node in members.nodes)
        waiting = (
            len(queued)
            * held
            / max(1, sessions)
            / max(1, members.nodes[0].replica.memory.total if members.nodes else 1)
        )
        running = (sessions + len(queued)) / self._ongoing
        return self._tolerant(max((fill + waiting) / self.FILL, running), members.target)

    def _tolerant(self, wanted: float, target: int) -> int:
        return target if target and abs(wanted / target - 1.0) <= self.TOLERANCE else math.ceil(wanted)

    def _stable(self, name: str, wanted: int, target: int, at_s: float) -> int:
        seen = self._wanted.setdefault(name, deque([(at_s, target)]))
        seen.append((at_s, wanted))
        while seen[0][0] < at_s - self.DOWN_S:
            seen.popleft()
        most = max(size for _, size in seen)
        return max(wanted, min(most, target))


def scaler(policy: str, config: BatonConfig, profiled: Profiled, names: tuple[str, str]) -> Scaler:
    """The scaler of that name. `names`: of the prefill and the decode deployment."""
    tokens = profiled.context_tokens
    match policy:
        case "baton":
            return Baton(config)
        case "serve":
            return Serve(dict(zip(names, (PROMPTS_ONGOING, profiled.answers_ongoing), strict=True)))
        case "dynamo":
            return Dynamo(profiled, *names)
        case "keda":
            return Keda(profiled.prompt_tokens_per_s(tokens), profiled.answers_ongoing)
        case "fixed":
            return Fixed()
    raise ValueError(f"no scaler {policy!r}")
