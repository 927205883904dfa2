"""The replicas, as the cluster core knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from deployments.link.ingress_side import Part, Take
from deployments.messages import ReplicaInfo, SessionTask


class Replicas(Protocol):
    """What begins parts of sessions on replicas; see `link.ingress_side.Links`."""

    def listen(self, take: Take) -> None:
        """Give all outputs to `take`."""

    def begin(self, replica: ReplicaInfo, task: SessionTask, part: Part) -> Callable[[], None]:
        """Begin a part, and return at once a function that cancels it; idempotent, also after its end."""

    def close(self) -> None:
        """Let all replicas go; idempotent."""
