"""Which requests a pool takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.messages import SessionRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """The requests that a pool takes, by prompt length, class and adapter. An empty set allows all."""

    min_prompt_tokens: int = 0
    max_prompt_tokens: int | None = None
    classes: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()

    def take(self, request: SessionRequest) -> bool:
        """Whether the pool takes such a request."""
        within = self.min_prompt_tokens <= request.prompt_tokens
        within = within and (self.max_prompt_tokens is None or request.prompt_tokens <= self.max_prompt_tokens)
        of_class = not self.classes or request.priority in self.classes
        name = request.adapter.rsplit("@", 1)[0]  # without its id (`checkpoint.adapter`)
        adapter = not name or not self.adapters or name in self.adapters
        return within and of_class and adapter
