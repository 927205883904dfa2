"""Requests with and without API keys, at the gateway: routes, classes, limits, logs and pages of other origins."""

from __future__ import annotations

import base64
import json
import logging
from typing import Any

import httpx
import pytest

from app.access.cors import with_cors
from app.access.gate import BASIC, Gate
from app.access.keys import Keys, parse
from app.access.rate_limit import NAMES
from app.api import Gateway
from app.held_response import Receive
from app.request_identity import owner_of
from configs.schema import IngressConfig
from deployments.cluster.request_context import RequestContext
from deployments.messages import Quota
from tests.app.access.test_keys import entry
from tests.app.toys import OK, Control, Toy

KEYS = parse(
    "keys:\n"
    + entry("plain", "secret-plain")
    + entry("bulk", "secret-bulk", classes="[batch, night]", requests_per_minute=5, tokens_per_minute=900)
    + entry("root", "secret-root", admin="true"),
    ("default", "batch", "night"),
)
PLAIN, BULK, ROOT = ({"authorization": f"Bearer secret-{name}"} for name in ("plain", "bulk", "root"))
ADMIN_ROUTES = (
    "/baton/status",
    "/baton/anything",
    "/metrics",
    "/metrics/",
    "/status",
    "/status/events",
    "/status/sessions/a",
)


class Inner(Toy):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(*OK, act=self._look)
        self.contexts: list[RequestContext] = []
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        await super().__call__(scope, receive, send)

    async def _look(self, context: RequestContext, receive: Receive) -> None:
        self.contexts.append(context)


def client(inner: Inner, keys: Keys = KEYS, origins: tuple[str, ...] = (), **config: Any) -> httpx.AsyncClient:
    settings = IngressConfig(admin_key="the-admin-key", **config)
    gateway = Gateway(inner, settings, Control(), gate=Gate(lambda: keys, settings.admin_key))
    transport = httpx.ASGITransport(with_cors(gateway, origins))
    return httpx.AsyncClient(transport=transport, base_url="http://baton")


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
async def test_probes_need_no_key(path: str) -> None:
    async with client(Inner()) as http:
        assert (await http.get(path)).status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer no"}, {"x-api-key": "no"}, {"authorization": "Bearer"}]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize", "/docs", "/new", "//", *ADMIN_ROUTES])
async def test_everything_else_asks_for_one(path: str, headers: dict[str, str]) -> None:
    async with client(inner := Inner()) as http:
        response = await http.post(path, content=b"{}", headers=headers)
    assert (response.status_code, response.headers["www-authenticate"], inner.calls) == (401, "Bearer", 0)
    error = response.json()["error"]
    assert error["type"] == "authentication_error"
    assert error.get("code", "invalid_api_key") == "invalid_api_key"
    assert ("code" in error) == (path != "/v1/messages")


@pytest.mark.parametrize(
    "headers",
    [
        PLAIN,
        {"authorization": "bearer  secret-plain"},
        {"x-api-key": "secret-plain"},
        {"authorization": "", "x-api-key": "secret-plain"},
    ],
)
async def test_a_key_is_shown_as_openais_clients_do_or_as_anthropics(headers: dict[str, str]) -> None:
    async with client(inner := Inner()) as http:
        assert (await http.post("/v1/completions", content=b"{}", headers=headers)).status_code == 200
    assert inner.contexts[0].client == "key plain"
    assert owner_of(inner.scopes[0]) == "key plain", "however it is shown"


@pytest.mark.parametrize("path", ADMIN_ROUTES)
async def test_routes_for_administrators(path: str) -> None:
    async with client(inner := Inner()) as http:
        refused = await http.get(path, headers=PLAIN)
        for headers in (ROOT, {"x-baton-admin-key": "the-admin-key"}, {"x-baton-admin-key": "secret-root"}):
            assert (await http.get(path, headers=headers)).status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")
    assert inner.calls in (0, 3)


async def test_a_browser_shows_the_key_as_a_password_to_read_and_for_nothing_else() -> None:
    def shown(key: str, name: str = "anyone") -> dict[str, str]:
        return {"authorization": f"Basic {base64.b64encode(f'{name}:{key}'.encode()).decode()}"}

    async with client(inner := Inner()) as http:
        asked = await http.get("/status")
        assert (asked.status_code, asked.headers["www-authenticate"]) == (401, BASIC)
        assert (await http.get("/status", headers=shown("secret-root"))).status_code == 200
        assert (await http.get("/status", headers=shown("secret-plain"))).status_code == 403
        for headers in (shown("secret-other"), shown("", "secret-root"), {"authorization": "Basic ?"}):
            assert (await http.get("/status", headers=headers)).status_code == 401
        for path in ("/status", "/v1/completions"):
            refused = await http.post(path, content=b"{}", headers=shown("secret-root"))
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert inner.calls == 1


async def test_the_class_of_a_request_is_one_of_its_keys() -> None:
    async with client(inner := Inner()) as http:

        async def ask(key: dict[str, str], **more: str) -> httpx.Response:
            return await http.post("/v1/completions", content=b"{}", headers={**key, **more})

        for key, asked in ((BULK, {}), (BULK, {"x-baton-class": "night"}), (PLAIN, {}), (ROOT, {"x-baton-class": "x"})):
            assert (await ask(key, **asked)).status_code == 200
        refused = await ask(BULK, **{"x-baton-class": "default"})
    assert [context.priority for context in inner.contexts] == ["batch", "night", "", "x"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "class_not_allowed")


async def test_the_manager_is_told_the_limits_of_the_key_once_for_a_request() -> None:
    async with client(inner := Inner()) as http:
        await http.post("/v1/completions", content=b'{"n": 3, "prompt": ["a", "b"]}', headers=BULK)
        await http.post("/v1/completions", content=b"{}", headers=PLAIN)
    limited, free = inner.contexts
    assert limited.next_quota() == Quota("bulk", 5, 900, answers=6)
    assert limited.next_quota() == limited.next_quota() == Quota("bulk", 5, 900, answers=0)
    assert free.next_quota() is None


async def test_logs_have_the_keys_name_and_never_the_key(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("baton.access")
    caplog.set_level(logging.INFO, "baton.access")
    logger.addHandler(caplog.handler)
    try:
        async with client(inner := Inner()) as http:
            for headers in (PLAIN, {"authorization": "Bearer secret-wrong"}, {**PLAIN, "x-baton-class": "x" * 300}):
                await http.post("/v1/completions", content=b"{}", headers=headers)
            shown = await http.get("/baton/status", headers=ROOT)
    finally:
        logger.removeHandler(caplog.handler)
    lines = [json.loads(record.message) for record in caplog.records if record.name == "baton.access"]
    assert {line.get("key") for line in lines} == {"plain", "root", None}
    assert shown.json()["ingress"]["errors"] == {"401": 1, "400": 1}
    for text in (caplog.text, shown.text, repr(inner.contexts)):
        assert "secret" not in text
        assert not any(each.sha256[:16] in text for each in KEYS.entries)


async def test_wrong_keys_are_refused_at_the_pace_of_their_address(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(delay_s: float) -> None:
        waited.append(delay_s)

    monkeypatch.setattr("app.pace.asyncio.sleep", sleep)
    async with client(Inner(), refusals_per_s=1.0) as http:
        for number in range(9):
            await http.get("/v1/models", headers={"authorization": f"Bearer {number}"})
    assert len(waited) >= 3


ORIGIN = {"origin": "https://chat.example.com"}
PREFLIGHT = {**ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


async def test_pages_of_other_origins_are_not_let_in_by_default() -> None:
    async with client(Inner()) as http:
        for response in (
            await http.options("/v1/completions", headers=PREFLIGHT),
            await http.post("/v1/completions", content=b"{}", headers={**PLAIN, **ORIGIN}),
        ):
            assert not [name for name in response.headers if name.startswith("access-control")]


async def test_pages_of_allowed_origins_see_answers_and_errors() -> None:
    async with client(Inner(), origins=(ORIGIN["origin"],)) as http:
        asked = await http.options("/v1/completions", headers=PREFLIGHT)
        answered = await http.post("/v1/completions", content=b"{}", headers={**PLAIN, **ORIGIN})
        refused = await http.post("/v1/completions", content=b"{}", headers=ORIGIN)
        other = await http.post("/v1/completions", content=b"{}", headers={**PLAIN, "origin": "https://evil.example"})
    assert [each.status_code for each in (asked, answered, refused, other)] == [200, 200, 401, 200]
    for response in (asked, answered, refused):
        assert response.headers["access-control-allow-origin"] == ORIGIN["origin"]
    assert {"retry-after", *NAMES} <= set(refused.headers["access-control-expose-headers"].lower().split(", "))
    assert "access-control-allow-origin" not in other.headers
