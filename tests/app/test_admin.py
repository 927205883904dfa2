"""Draining a replica over HTTP: for administrators, in time, and with the status that fits."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.admin import drain_of
from app.api import Gateway
from app.timings import Timings
from configs.schema import IngressConfig
from deployments.errors import Unavailable
from deployments.manager.calls import Drain
from tests.app.toys import OK, Manager, Toy

QUICK = Timings(control_s=0.05)
DONE = {"replica": "a#1", "draining": True, "sessions": 2}


async def post(
    manager: Manager, path: str = "/baton/replicas/a%231/drain", method: str = "POST", given: str = "secret"
) -> httpx.Response:
    gateway = Gateway(Toy(*OK), IngressConfig(admin_key="secret"), manager, timings=QUICK)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton") as http:
        return await http.request(method, path, headers={"x-baton-admin-key": given})


@pytest.mark.parametrize(("action", "resume"), [("drain", False), ("resume", True)])
async def test_the_manager_is_asked_for_the_replica_of_the_path(action: str, resume: bool) -> None:
    manager = Manager(DONE)
    answer = await post(manager, f"/baton/replicas/a%231/{action}")
    assert (answer.status_code, answer.json()) == (200, DONE)
    assert manager.asked == [Drain("a#1", resume)]


@pytest.mark.parametrize(("known", "status"), [(True, 409), (False, 404)])
async def test_a_refusal_has_a_status_and_its_reason(known: bool, status: int) -> None:
    answer = await post(Manager({"replica": "a#1", "refused": "it is the last", "known": known}))
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, "a#1: it is the last")


@pytest.mark.parametrize("answer", [None, Unavailable("gone")])
async def test_a_manager_that_is_away_is_a_503_in_time(answer: Any) -> None:
    said = await post(Manager(answer))
    assert (said.status_code, said.json()["error"]["code"]) == (503, "manager_away")


async def test_others_than_administrators_are_refused_and_the_manager_is_not_asked() -> None:
    manager = Manager(DONE)
    assert (await post(manager, given="wrong")).status_code == 403
    assert (await post(manager, method="GET")).status_code == 405
    gateway = Gateway(Toy(*OK), IngressConfig(), manager)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton") as http:
        answer = await http.post("/baton/replicas/a/drain")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_only")
    assert manager.asked == []


@pytest.mark.parametrize(
    "path", ["/baton/replicas//drain", "/baton/replicas/a", "/baton/replicas/a/stop", "/v1/a/drain"]
)
def test_other_paths_are_no_such_route(path: str) -> None:
    assert drain_of(path) is None
