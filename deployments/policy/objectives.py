"""Early refusal: whether a request's predicted times can meet its class, and if not whether waiting helps. Pure."""

from __future__ import annotations

import math

from deployments.messages import Forecast, Queue, Reject
from deployments.policy.classes import PriorityClass


def verdict(
    forecast: Forecast,
    priority: PriorityClass,
    waited_s: float,
    *,
    relief_s: float | None = None,
    slack: float = 1.0,
    max_retry_after_s: float = 30.0,
) -> Queue | Reject | None:
    """What keeps a request that could be placed now from being placed; none: nothing does.

    A predicted time may be `slack` times its objective. A forecast that is not trusted keeps nothing: a cold start
    refuses nobody. The request waits if it could still meet its class when the load has fallen, `relief_s` seconds
    from now (none: nobody can say when), and is refused otherwise.
    """
    if not forecast.trusted:
        return None
    ttft_s = waited_s + forecast.ttft_s
    if priority.ttft_s is not None and ttft_s > slack * priority.ttft_s:
        parts = {"waited": waited_s, "queue": forecast.queue_s, "prefill": forecast.prefill_s}
        named = ", ".join(f"{name} {_time(part)}" for name, part in (parts | {"transfer": forecast.transfer_s}).items())
        reason = f"predicted TTFT {_over(ttft_s, priority.ttft_s, slack)} of class {priority.name} ({named})"
        code, retry_s = "predicted_ttft", _until_ttft_fits(forecast, slack * priority.ttft_s, relief_s)
    elif priority.tpot_s is not None and forecast.tpot_s > slack * priority.tpot_s:
        reason = f"predicted TPOT {_over(forecast.tpot_s, priority.tpot_s, slack)} of class {priority.name}"
        # By the time such an answer takes, most of what runs now is over.
        busy_s = forecast.output_tokens * forecast.tpot_s
        code, retry_s = "predicted_tpot", busy_s if relief_s is None else relief_s
    else:
        return None
    if relief_s is not None and relief_s <= _left_s(forecast, priority, waited_s, slack):
        return Queue(reason)
    return Reject(reason, min(max(retry_s, 1.0), max_retry_after_s), code=code)


def _left_s(forecast: Forecast, priority: PriorityClass, waited_s: float, slack: float) -> float:
    """How long the request can wait yet and meet its TTFT, if nothing is queued before it then."""
    if priority.ttft_s is None:
        return math.inf
    return slack * priority.ttft_s - waited_s - (forecast.ttft_s - forecast.queue_s)


def _until_ttft_fits(forecast: Forecast, limit_s: float, relief_s: float | None) -> float:
    """In how many seconds the same request, new, would meet `limit_s`; infinite if not even without a queue."""
    if forecast.ttft_s - forecast.queue_s > limit_s:
        return math.inf
    return forecast.ttft_s - limit_s if relief_s is None else relief_s


def _over(predicted_s: float, objective_s: float, slack: float) -> str:
    return f"{_time(predicted_s)} over {times(slack)}the {_time(objective_s)}"


def times(slack: float) -> str:
    """How a reason names an objective that counts only so many times."""
    return "" if slack == 1.0 else f"{slack:g} times "


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{1000 * seconds:.0f} ms"
