"""Ray Serve's REST API on the dashboard: deploy, watch, shut down. Does not import ray.

The launcher speaks HTTP so that no driver of its own runs inside the cluster: a Ctrl-C interrupts nothing of Ray's,
and nothing prints over the launcher's progress.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

_APPLICATIONS = "/api/serve/applications/"
_FAILED = frozenset({"DEPLOY_FAILED", "UNHEALTHY"})

DEPLOY_TRIES = 3
"""How often a configuration is submitted to a Serve that fails. On a slow machine Serve kills a proxy of its own that
takes long to start, and answers 500."""


class ServeApiError(Exception):
    """Ray Serve refused a request or did not answer it in time."""


class ServeTrouble(ServeApiError):
    """Ray Serve answered that it failed itself. It may do better when it is asked again."""


@dataclass(frozen=True)
class Progress:
    """What Serve says about one application at one moment.

    `parts` maps "application" and each deployment's name to one line of state.
    """

    status: str
    message: str
    parts: Mapping[str, str]

    @property
    def failed(self) -> bool:
        """Whether Serve has given up, or calls the application unhealthy."""
        return self.status in _FAILED

    def changes(self, earlier: Progress | None) -> list[str]:
        """The lines that differ from an earlier look, each once."""
        before = earlier.parts if earlier else {}
        return [f"{name}: {line}" for name, line in self.parts.items() if before.get(name) != line]


def progress(details: Mapping[str, Any], application: str) -> Progress:
    """Read the answer of `GET /api/serve/applications/` for one application."""
    found = details.get("applications", {}).get(application)
    if found is None:
        return Progress("NOT_STARTED", "", {"application": "NOT_STARTED"})
    parts = {"application": _line(found["status"], found.get("message", ""))}
    for name, deployment in found.get("deployments", {}).items():
        states = [replica["state"] for replica in deployment.get("replicas", [])]
        wanted = deployment.get("target_num_replicas", len(states))
        state = f"{deployment['status']}, {states.count('RUNNING')} of {wanted} replicas running"
        parts[name] = _line(state, deployment.get("message", ""))
    return Progress(found["status"], _failure(found), parts)


class ServeApi:
    """A client of one dashboard. Every call has a deadline."""

    def __init__(self, dashboard_url: str, transport: httpx.BaseTransport | None = None) -> None:
        self._http = httpx.Client(
            base_url=dashboard_url, headers=_authorization(), transport=transport, trust_env=False
        )

    def answers(self) -> bool:
        """Whether the dashboard answers.

        Raises:
            ServeApiError: it asks for a token, so waiting longer would not help.
        """
        try:
            status = self._http.get("/api/ray/version", timeout=5.0).status_code
        except httpx.HTTPError:
            return False
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ServeApiError(f"Ray's dashboard answers {status}: Ray's token authentication is on here")
        return status == httpx.codes.OK

    def session(self) -> str:
        """The name of Ray's session, which is a folder of its temporary files."""
        return str(self._request("GET", "/api/ray/version", timeout_s=20.0).json()["session_name"])

    def serves(self) -> bool:
        """Whether the dashboard's Serve module answers as well, which it does once Ray has started."""
        try:
            self.details()
        except ServeApiError:
            return False
        return True

    def details(self) -> dict[str, Any]:
        """Everything Serve says about itself."""
        answer: dict[str, Any] = self._request("GET", timeout_s=20.0).json()
        return answer

    def details_within(self, timeout_s: float) -> dict[str, Any]:
        """`details`. A dashboard that refuses or is silent is asked again for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self.details()
            except ServeApiError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(1.0)

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Submit a Serve configuration. Returns when it is accepted, not when it runs."""
        for tries_left in reversed(range(DEPLOY_TRIES)):
            try:
                self._request("PUT", json=config, timeout_s=120.0)
            except ServeTrouble:
                if not tries_left:
                    raise
            else:
                return

    def remove(self, config: Mapping[str, Any], timeout_s: float) -> bool:
        """Take a configuration's applications away. True when their replicas are gone in time.

        Meanwhile answers end, because Serve's proxies go on. Serve's own shutdown would begin with the proxies.
        """
        deadline = time.monotonic() + timeout_s
        self._request("PUT", json={**config, "applications": []}, timeout_s=20.0)
        while self.details_within(20.0).get("applications"):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
        return True

    def shutdown(self, timeout_s: float) -> None:
        """Shut Serve down. Returns when its replicas are gone."""
        self._request("DELETE", timeout_s=timeout_s)

    def _request(
        self, method: str, path: str = _APPLICATIONS, *, timeout_s: float, json: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=json, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise ServeApiError(f"Ray's dashboard did not answer {method}: {error!r}") from error
        if response.is_error:
            kind = ServeTrouble if response.is_server_error else ServeApiError
            raise kind(f"Ray Serve answered {response.status_code}: {response.text.strip()[-2000:]}")
        return response


def _authorization() -> dict[str, str]:
    """Ray's token as an HTTP header, if this user has one: Ray asks for the token once it exists."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return {}
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    token = os.environ.get("RAY_AUTH_TOKEN") or (path.read_text().strip() if path.is_file() else "")
    return {"authorization": f"Bearer {token}"} if token else {}


def _line(state: str, message: str) -> str:
    """One line: the state, and the last line of its message, which is the reason in a traceback."""
    lines = message.strip().splitlines()
    return f"{state} ({lines[-1].strip()[:300]})" if lines else state


def _failure(application: Mapping[str, Any]) -> str:
    """The application's message and those of its deployments that are not healthy, in full."""
    messages = [application.get("message", "")]
    for name, deployment in application.get("deployments", {}).items():
        if deployment["status"] != "HEALTHY" and deployment.get("message"):
            messages.append(f"{name}: {deployment['message']}")
    return "\n".join(message.strip() for message in messages if message.strip())
