"""Early refusal: whether a request's predicted times can meet its class. Pure."""

from __future__ import annotations

import math

from deployments.messages import Forecast, Reject
from deployments.policy.admission.classes import PriorityClass


def verdict(
    forecast: Forecast,
    priority: PriorityClass,
    waited_s: float,
    *,
    slack: float = 1.0,
    max_retry_after_s: float = 30.0,
) -> Reject | None:
    """The refusal of a request that could be placed now but would miss its class; None: it may be placed.

    A predicted time may be up to `slack` times its objective. A forecast that is not trusted yet, as after a cold
    start, refuses no request. Such a request does not wait for the load to fall, because that time cannot be predicted.
    """
    if not forecast.trusted:
        return None
    ttft_s = waited_s + forecast.ttft_s
    if priority.ttft_s is not None and ttft_s > slack * priority.ttft_s:
        parts = {"waited": waited_s, "queue": forecast.queue_s, "prefill": forecast.prefill_s}
        named = ", ".join(f"{name} {_time(part)}" for name, part in (parts | {"transfer": forecast.transfer_s}).items())
        reason = f"predicted TTFT {_over(ttft_s, priority.ttft_s, slack)} of class {priority.name} ({named})"
        code, retry_s = "predicted_ttft", _until_ttft_fits(forecast, slack * priority.ttft_s)
    elif priority.tpot_s is not None and forecast.tpot_s > slack * priority.tpot_s:
        reason = f"predicted TPOT {_over(forecast.tpot_s, priority.tpot_s, slack)} of class {priority.name}"
        # After the time that such an answer takes, most sessions that run now are over.
        code, retry_s = "predicted_tpot", forecast.output_tokens * forecast.tpot_s
    else:
        return None
    return Reject(reason, min(max(retry_s, 1.0), max_retry_after_s), code=code)


def _until_ttft_fits(forecast: Forecast, limit_s: float) -> float:
    """The seconds until the same request, asked anew, would meet `limit_s`; infinite if it misses it without a
    queue."""
    if forecast.ttft_s - forecast.queue_s > limit_s:
        return math.inf
    return forecast.ttft_s - limit_s


def _over(predicted_s: float, objective_s: float, slack: float) -> str:
    return f"{_time(predicted_s)} over {times(slack)}the {_time(objective_s)}"


def times(slack: float) -> str:
    """The words for an objective that may be exceeded `slack` times; empty for 1."""
    return "" if slack == 1.0 else f"{slack:g} times "


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{1000 * seconds:.0f} ms"
