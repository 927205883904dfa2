"""What requests ask for, counted when they come: also what is refused is demand. Pure."""

from __future__ import annotations

from deployments.messages import SessionRequest
from deployments.policy.scaling.inputs import NONE, Arrivals


class Demand:
    """Sums by class over all requests that have come. A session that is placed again is not new demand."""

    def __init__(self) -> None:
        self.arrived: dict[str, Arrivals] = {}

    def came(self, request: SessionRequest, cached_tokens: int, output_tokens: float) -> None:
        """A request has come. `cached_tokens`: what the best cache has of its prompt. `output_tokens`: expected; not
        known where it is the longest that was asked for."""
        if request.attempt > 1:
            return
        cached = min(cached_tokens, request.prompt_tokens - 1)
        new = float(request.prompt_tokens - cached)
        context = 0.5 * (request.prompt_tokens - 1 + cached) * new
        held = request.prompt_tokens + request.max_tokens
        output = output_tokens if output_tokens < request.max_tokens else 0.0  # the limit stands for an unknown length
        one = Arrivals(1.0, new, context, new * new, new * context, context * context, held, output)
        self.arrived[request.priority] = self.arrived.get(request.priority, NONE).plus(one)
