"""`POST /baton/replicas/REPLICA/drain` and `/resume`: an operator takes a replica out of service, and puts it back."""

from __future__ import annotations

from typing import Any

from app.access.gate import check_admin
from app.errors import Answer, MethodNotAllowed, error_body, type_of
from app.held_response import Scope
from deployments.manager.calls import Drain

_PREFIX, _ACTIONS = "/baton/replicas/", ("drain", "resume")


def drain_of(path: str) -> Drain | None:
    """What a path asks for; None where it is no such route."""
    replica_id, _, action = path.removeprefix(_PREFIX).rpartition("/")
    is_route = path.startswith(_PREFIX) and replica_id and action in _ACTIONS
    return Drain(replica_id, resume=action == "resume") if is_route else None


def check_drain(scope: Scope, admin_key: str | None) -> None:
    """Raises MethodNotAllowed, and AdminOnly. `admin_key`: `ingress.admin_key`."""
    if scope["method"] != "POST":
        raise MethodNotAllowed(f"{scope['path']} answers POST only")
    check_admin(scope, admin_key)


def drained(found: dict[str, Any]) -> Answer:
    """The response for what the session manager has answered to a `Drain`."""
    if "refused" not in found:
        return Answer(200, found)
    status = 409 if found["known"] else 404
    return Answer(status, error_body(f"{found['replica']}: {found['refused']}", type_of(status), "not_drained"))
