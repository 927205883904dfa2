"""What the HTTP side and the cluster core tell each other about one HTTP request.

The middleware sets `current` before vLLM's server runs; the cluster core, called below that server in the same
context, notes how each of the request's sessions was placed, and why one failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from deployments.errors import SessionError
from deployments.messages import Allowance, Mode, Quota

if TYPE_CHECKING:
    from deployments.tracing.tracer import Span


class Part(Protocol):
    """One session of a request."""

    def fail(self, error: SessionError) -> None:
        """End it with an error, unless it is over."""


@dataclass
class RequestContext:
    """One HTTP request; it has several sessions when it asks for n > 1 or sends a batch of prompts.

    `priority`, `client`, `affinity` and `chat` go into each session's `SessionRequest`. `most_parts`: the most sessions
    that it may have open; 0: any number. `quota`: of its key. `allowance`: what that key has left, as the session
    manager said it last; None where it has no limits, or nothing is decided yet. `seed_moved`: a sampled answer with a
    seed went on in another engine than the one where it began. `parts`: its open sessions. `error`: why the first of
    them failed, which ends the others. `first_token_s`: when the first token came, by the monotonic clock.
    `when_begun`: what is called once, when the first session begins. `arrived_s`: when it had been read, by the
    monotonic clock. `left`: its client has gone. `namespace`: it shares cached KV only with requests of the same; None:
    with all. `explains`: it is not served, and its first session's `explanation` is the answer. `pins`: the same, and
    its prompt is pinned. `span`: its span; None where it is not traced.
    """

    request_id: str
    priority: str = ""
    client: str = ""
    affinity: str = ""
    chat: bool = False
    namespace: str | None = None
    most_parts: int = 0
    quota: Quota | None = None
    allowance: Allowance | None = None
    modes: set[Mode] = field(default_factory=set)
    rules: set[str] = field(default_factory=set)
    seed_moved: bool = False
    parts: dict[str, Part] = field(default_factory=dict)
    error: SessionError | None = None
    first_token_s: float | None = None
    when_begun: list[Callable[[], None]] = field(default_factory=list)
    arrived_s: float = field(default_factory=time.monotonic, compare=False)
    left: bool = False
    explains: bool = False
    pins: bool = False
    explanation: dict[str, Any] | None = None
    span: Span | None = field(default=None, compare=False)
    _prompts: dict[int, Sequence[int]] = field(default_factory=dict)
    _answers: list[Sequence[int]] = field(default_factory=list)

    def note_session(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """A session begins. `answer` grows with its tokens. With n > 1 sessions share one prompt, which counts once."""
        self._prompts[id(prompt)] = prompt
        self._answers.append(answer)
        while self.when_begun:
            self.when_begun.pop()()

    @property
    def is_served(self) -> bool:
        """Whether engines answer it. Otherwise the session manager does."""
        return not (self.explains or self.pins)

    def for_background(self) -> RequestContext:
        """The same request, for sessions that outlive its response."""
        return RequestContext(
            self.request_id,
            priority=self.priority,
            client=self.client,
            affinity=self.affinity,
            chat=self.chat,
            namespace=self.namespace,
            most_parts=self.most_parts,
            quota=self.quota,
            span=self.span,
        )

    def next_quota(self) -> Quota | None:
        """What the next placement is counted as: the first one as the whole request, the others as parts of it."""
        quota = self.quota
        if quota is not None and quota.answers:
            self.quota = replace(quota, answers=0)
        return quota

    @property
    def sessions(self) -> int:
        """The number of its sessions so far."""
        return len(self._answers)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self._prompts.values()))

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(map(len, self._answers))

    def fail(self, error: SessionError) -> bool:
        """One of its sessions has failed: the others end with the same error. False when one had failed before."""
        if self.error is not None:
            return False
        self.error = error
        for part in tuple(self.parts.values()):
            part.fail(error)
        return True


current: ContextVar[RequestContext | None] = ContextVar("baton_request", default=None)
