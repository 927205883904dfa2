"""What the ingress measures of each session: an answer counts once, whichever replicas it was on.

Times are by this process's clock. The time in an engine's queue and that of its prefill are by that engine's clock.
`metrics/catalogue.py` says what each metric means.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Protocol

from deployments.messages import Placement, Role
from deployments.metrics import catalogue as names
from deployments.metrics.registry import Histogram, Registry, Value

QUEUED, SCHEDULED = 1, 2
"""vLLM's numbers of an engine's events."""
REASONS = {"cancelled": "abort", "failed": "error", "stop": "stop", "length": "length"}


class Event(Protocol):
    """vLLM's EngineCoreEvent. `timestamp`: seconds of the engine's clock."""

    type: int
    timestamp: float


def engine_times(events: Sequence[Event], stamp_s: float) -> tuple[float, float] | None:
    """The seconds that a prompt waited in an engine, and those until its first output, of `stamp_s`; None: not told."""
    times = {int(event.type): event.timestamp for event in reversed(events)}
    if QUEUED not in times or SCHEDULED not in times:
        return None
    return max(0.0, times[SCHEDULED] - times[QUEUED]), max(0.0, stamp_s - times[SCHEDULED])


class PrefillStats(Protocol):
    """vLLM's, of one prompt. All in tokens."""

    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_local_cached_tokens: int
    num_external_cached_tokens: int


class _Pool:
    """The metrics of answers that one pool writes, as far as they are needed at every token."""

    __slots__ = ("gaps", "generated", "name", "registry")

    def __init__(self, registry: Registry, name: str) -> None:
        self.registry, self.name = registry, name
        self.gaps: Histogram = registry.histogram(names.ITL, pool=name)
        self.generated: Value = registry.value(names.GENERATED, pool=name)


class Meter:
    """Makes the meters of sessions, which all count into one registry."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._pools: dict[str, _Pool] = {}

    def pool(self, name: str) -> _Pool:
        if name not in self._pools:
            self._pools[name] = _Pool(self.registry, name)
        return self._pools[name]


class SessionMeter:
    """One session. `arrived_s`: when its request was there; None: now."""

    __slots__ = (
        *("_arrived_s", "_began_s", "_computed", "_engine_s", "_first_s", "_landed", "_last_s", "_meter", "_placed_s"),
        *("_placement", "_pool", "_prefilled_s", "_prompt_tokens", "_rule", "_tokens"),
    )

    def __init__(self, meter: Meter, prompt_tokens: int, arrived_s: float | None = None) -> None:
        self._meter, self._prompt_tokens = meter, prompt_tokens
        self._began_s = monotonic()
        self._arrived_s = self._began_s if arrived_s is None else arrived_s
        self._placed_s = self._first_s = self._last_s = 0.0
        self._prefilled_s = 0.0
        self._engine_s: tuple[float, float] | None = None
        self._placement: Placement | None = None
        self._pool: _Pool | None = None
        self._rule, self._tokens, self._landed = "", 0, False
        self._computed: int | None = None

    def placed(self, placement: Placement, rule: str) -> None:
        """It has a place, the first one or another. `rule`: the rule that keeps it whole; "" for none."""
        self._placement, self._rule = placement, rule
        self._pool = self._meter.pool(placement.owner.pool)
        self._placed_s, self._engine_s, self._prefilled_s = monotonic(), None, 0.0
        self._landed = False

    def prefilled(self) -> None:
        """Prefill has its KV cache ready, and decode gives the first token."""
        self._prefilled_s = monotonic()

    def took(self, role: Role, events: Sequence[Event] | None, stamp_s: float) -> None:
        """An output came that is not merely the next one. `stamp_s`: when, by the clock of its engine.

        It may say how long the prompt took. Decode's first one of a split session says that the handoff is over.
        """
        is_split = self._placement is not None and self._placement.prefill is not None
        if is_split and role is Role.DECODE:
            self._handed_over()
        elif events and not self._first_s and self._engine_s is None:
            self._engine_s = engine_times(events, stamp_s)

    def _handed_over(self) -> None:
        """Count the gap of a placement's handoff. There is none where decode's first output overtook prefill's."""
        if not self._landed and self._last_s and self._pool is not None:
            registry, pool = self._meter.registry, self._pool.name
            registry.histogram(names.HANDOFF, pool=pool).observe(monotonic() - self._last_s)
        self._landed = True

    def gave(self, tokens: int, stats: PrefillStats | None) -> None:
        """The client was given so many tokens. `stats`: of the prompt, with the first of them. Costs 0.3 us."""
        if not tokens or (pool := self._pool) is None:
            return
        now_s = monotonic()
        if self._last_s:
            pool.gaps.observe(now_s - self._last_s)
        else:
            self._first(pool, now_s, stats)
        self._last_s = now_s
        self._tokens += tokens
        pool.generated.value += tokens

    def again(self, cause: str, error: Exception) -> None:
        """It is placed again. `cause`: `move` or `loss`. `error`: why."""
        pool = self._pool.name if self._pool else ""
        self._meter.registry.value(names.AGAIN, pool=pool, cause=cause, error=type(error).__name__).add()

    def ended(self, mode: str, outcome: str) -> None:
        """It is over. What never had a place counts among the refusals alone."""
        if (pool := self._pool) is None or self._placement is None:
            return
        registry, name, now_s = self._meter.registry, pool.name, monotonic()
        labels = {"pool": name, "mode": mode, "rule": self._rule, "outcome": outcome}
        registry.value(names.SESSIONS, **labels).add()
        registry.value(names.SUCCESS, pool=name, finished_reason=REASONS.get(outcome, "error")).add()
        registry.histogram(names.E2E, pool=name).observe(now_s - self._arrived_s)
        registry.histogram(names.PROMPT_LENGTH, pool=name).observe(self._prompt_tokens)
        if self._computed is not None:
            registry.histogram(names.COMPUTED_LENGTH, pool=name).observe(self._computed)
        registry.histogram(names.ANSWER_LENGTH, pool=name).observe(self._tokens)
        if self._tokens:
            registry.histogram(names.DECODE, pool=name).observe(self._last_s - self._first_s)
        if self._tokens > 1:
            tpot_s = (self._last_s - self._first_s) / (self._tokens - 1)
            registry.histogram(names.TPOT, pool=name).observe(tpot_s)
            if predicted_s := self._placement.forecast.tpot_s:
                registry.histogram(names.TPOT_RATIO, pool=name).observe(tpot_s / predicted_s)

    # ---- the first token

    def _first(self, pool: _Pool, now_s: float, stats: PrefillStats | None) -> None:
        registry, name = self._meter.registry, pool.name
        self._first_s = now_s
        registry.histogram(names.TTFT, pool=name).observe(now_s - self._arrived_s)
        for part, spent_s in self._parts(now_s).items():
            registry.value(names.TTFT_PART, pool=name, part=part).add(spent_s)
        if self._engine_s is not None:
            registry.histogram(names.QUEUE, pool=name).observe(self._engine_s[0])
            registry.histogram(names.PREFILL, pool=name).observe(self._engine_s[1])
        assert self._placement is not None, "it has a pool, so it is placed"
        if predicted_s := self._placement.forecast.ttft_s:
            registry.histogram(names.TTFT_RATIO, pool=name).observe((now_s - self._placed_s) / predicted_s)
        self._prompt(name, stats)

    def _parts(self, now_s: float) -> dict[str, float]:
        """The parts of the time to the first token. Without an engine's events, all of its time is `prefill`."""
        prefilled_s = self._prefilled_s or now_s
        queue_s, prefill_s = self._engine_s or (0.0, prefilled_s - self._placed_s)
        return {
            "frontend": self._began_s - self._arrived_s,
            "placement": self._placed_s - self._began_s,
            "queue": queue_s,
            "prefill": prefill_s,
            "handoff": now_s - prefilled_s,
            "delivery": max(0.0, prefilled_s - self._placed_s - queue_s - prefill_s),
        }

    def _prompt(self, pool: str, stats: PrefillStats | None) -> None:
        registry = self._meter.registry
        registry.value(names.PROMPT_TOKENS, pool=pool).add(self._prompt_tokens)
        if stats is None:
            return
        self._computed = stats.num_computed_tokens
        registry.value(names.CACHED, pool=pool).add(stats.num_cached_tokens)
        for source, tokens in (
            ("local_compute", stats.num_computed_tokens),
            ("local_cache_hit", stats.num_local_cached_tokens),
            ("external_kv_transfer", stats.num_external_cached_tokens),
        ):
            registry.value(names.BY_SOURCE, pool=pool, source=source).add(tokens)
