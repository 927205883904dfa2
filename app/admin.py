"""`POST /baton/replicas/REPLICA/drain` and `/resume`: an operator takes a replica out of service, and puts it back."""

from __future__ import annotations

import asyncio

from app.access.gate import ADMIN_KEY, is_admin, shows
from app.errors import AdminOnly, Answer, MethodNotAllowed, answer, error_body, type_of
from app.held_response import Scope
from deployments.errors import Unavailable
from deployments.manager.calls import Drain, Manager

_PREFIX, _ACTIONS = "/baton/replicas/", ("drain", "resume")


def drain_of(path: str) -> Drain | None:
    """What a path asks for; None where it is no such route."""
    replica_id, _, action = path.removeprefix(_PREFIX).rpartition("/")
    is_route = path.startswith(_PREFIX) and replica_id and action in _ACTIONS
    return Drain(replica_id, resume=action == "resume") if is_route else None


def check_admin(scope: Scope, admin_key: str | None) -> None:
    """Raises AdminOnly for a request that no administrator has made. `admin_key`: `ingress.admin_key`."""
    if is_admin(scope) or (admin_key is not None and shows(scope, admin_key)):
        return
    why = "no key opens it without `ingress.admin_key` or API keys" if admin_key is None else f"see {ADMIN_KEY}"
    raise AdminOnly(f"this route is for administrators: {why}")


async def drain(call: Drain, scope: Scope, admin_key: str | None, manager: Manager, within_s: float) -> Answer:
    """The answer to such a request. `within_s`: the longest wait for the session manager."""
    try:
        if scope["method"] != "POST":
            raise MethodNotAllowed(f"{scope['path']} answers POST only")
        check_admin(scope, admin_key)
        found = await asyncio.wait_for(manager.ask(call), within_s)
    except (MethodNotAllowed, AdminOnly) as error:
        return answer(error)
    except (Unavailable, TimeoutError):
        return answer(Unavailable("the session manager is away"))
    if "refused" not in found:
        return Answer(200, found)
    status = 409 if found["known"] else 404
    return Answer(status, error_body(f"{call.replica_id}: {found['refused']}", type_of(status), "not_drained"))
