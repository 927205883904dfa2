"""The client of Serve's API, and the progress of a deployment."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.launch.serve_api import DEPLOY_TRIES, ServeApi, ServeApiError, ServeTrouble, progress


def details(status: str, deployment: str, replicas: list[str], message: str = "") -> dict[str, Any]:
    states = [{"state": state} for state in replicas]
    found = {"status": deployment, "message": message, "target_num_replicas": 2, "replicas": states}
    return {"applications": {"baton": {"status": status, "message": "", "deployments": {"prefill": found}}}}


def test_progress_shows_each_change_once() -> None:
    starting = progress(details("DEPLOYING", "UPDATING", ["RUNNING", "STARTING"]), "baton")
    assert starting.changes(None) == [
        "application: DEPLOYING",
        "prefill: UPDATING, 1 of 2 replicas running",
    ]
    assert starting.changes(starting) == []
    running = progress(details("RUNNING", "HEALTHY", ["RUNNING", "RUNNING"]), "baton")
    assert running.changes(starting) == [
        "application: RUNNING",
        "prefill: HEALTHY, 2 of 2 replicas running",
    ]
    assert not running.failed


def test_progress_of_a_failure_holds_the_whole_message_and_shows_its_last_line() -> None:
    failed = progress(details("DEPLOY_FAILED", "DEPLOY_FAILED", [], "Traceback\nValueError: no"), "baton")
    assert failed.failed
    assert failed.parts["prefill"] == "DEPLOY_FAILED, 0 of 2 replicas running (ValueError: no)"
    assert failed.message == "prefill: Traceback\nValueError: no"


def test_the_session_is_named_by_the_dashboard() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/api/ray/version"
        return httpx.Response(200, json={"session_name": "session_1"})

    assert ServeApi("http://dashboard", transport=httpx.MockTransport(answer)).session() == "session_1"


def test_progress_before_anything_is_deployed() -> None:
    assert progress({"applications": {}}, "baton").status == "NOT_STARTED"


def test_the_serve_client_reports_refusals_and_silence() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            return httpx.Response(400, text="wrong")
        if request.url.path == "/api/ray/version":
            return httpx.Response(200)
        raise httpx.ConnectError("gone")

    api = ServeApi("http://dashboard", transport=httpx.MockTransport(answer))
    assert api.answers()
    with pytest.raises(ServeApiError, match="400: wrong"):
        api.deploy({})
    with pytest.raises(ServeApiError, match="did not answer GET"):
        api.details()


def test_an_application_is_taken_away_before_serve_is_shut_down() -> None:
    applications: list[dict[str, Any]] = [{"baton": {}}, {"baton": {}}, {}]
    looks = iter(applications)
    asked: list[tuple[str, bytes]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.content))
        return httpx.Response(200, json={"applications": next(looks)} if request.method == "GET" else {})

    api = ServeApi("http://dashboard", transport=httpx.MockTransport(answer))
    assert api.remove({"http_options": {"port": 1}, "applications": [{"name": "baton"}]}, 30.0)
    assert json.loads(asked[0][1]) == {"http_options": {"port": 1}, "applications": []}
    assert [method for method, _ in asked] == ["PUT", "GET", "GET", "GET"]
    looks = iter([{"baton": {}}])
    assert not api.remove({}, -1.0)


def test_a_dashboard_that_wants_a_token_is_not_waited_for() -> None:
    api = ServeApi("http://dashboard", transport=httpx.MockTransport(lambda request: httpx.Response(401)))
    with pytest.raises(ServeApiError, match="token authentication"):
        api.answers()


def test_a_dashboard_that_is_busy_for_a_moment_is_asked_again() -> None:
    answers = iter([httpx.Response(500, text="in trouble"), httpx.Response(200, json={"applications": {}})])
    api = ServeApi("http://dashboard", transport=httpx.MockTransport(lambda request: next(answers)))
    assert api.details_within(30.0) == {"applications": {}}
    answers = iter([httpx.Response(500, text="in trouble")])
    with pytest.raises(ServeApiError, match="500"):
        api.details_within(-1.0)


def test_a_configuration_is_submitted_again_to_a_serve_that_fails_and_not_to_one_that_refuses() -> None:
    statuses: list[int] = []
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        return httpx.Response(statuses[len(asked) - 1], text="why")

    api = ServeApi("http://dashboard", transport=httpx.MockTransport(answer))
    statuses[:] = [500, 200]
    api.deploy({})
    assert asked == ["PUT", "PUT"]
    asked.clear()
    statuses[:] = [500] * DEPLOY_TRIES
    with pytest.raises(ServeTrouble, match="500: why"):
        api.deploy({})
    assert len(asked) == DEPLOY_TRIES
    asked.clear()
    statuses[:] = [400]
    with pytest.raises(ServeApiError, match="400: why"):
        api.deploy({})
    assert len(asked) == 1
