"""The session manager, as its callers know it: itself, its Serve handle, or who stands in for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from deployments.messages import Admit, ManagerView, Reject, SessionRequest


class Manager(Protocol):
    """The session manager. Every call may raise Unavailable."""

    async def open(self, request: SessionRequest) -> Admit | Reject: ...

    async def prefill_done(self, session_id: str, epoch: int) -> None: ...

    async def close(
        self, session_id: str, epoch: int, outcome: str, output_tokens: int | None = None, ended: bool = False
    ) -> None: ...

    async def lost(self, replica_id: str, gone: bool = False) -> None: ...

    async def silent(self, replica_ids: Sequence[str]) -> tuple[str, ...]: ...


class WholeManager(Manager, Protocol):
    """With what is asked of it beside sessions. Every call may raise Unavailable."""

    async def view(self, after_s: float) -> ManagerView: ...

    async def ready(self) -> dict[str, Any]: ...

    async def status(self) -> dict[str, Any]: ...
