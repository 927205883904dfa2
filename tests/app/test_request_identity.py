"""A request's client, class and session, by its headers and body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors import HeaderTooLong, answer
from app.request_identity import client_of, request_context
from deployments.cluster.request_context import RequestContext


def of(
    body: Any = None,
    path: str = "/v1/chat/completions",
    root_path: str = "",
    address: str = "",
    client_header: str | None = None,
    **headers: str,
) -> RequestContext:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope: dict[str, Any] = {"path": path, "root_path": root_path, "headers": pairs}
    if address:
        scope["client"] = (address, 4711)
    return request_context("r", scope, json.dumps(body or {}).encode(), client_of(scope, client_header))


def test_of_a_bare_request_nothing_is_known() -> None:
    assert of({"messages": [{"role": "user", "content": "hello"}]}) == RequestContext("r", chat=True)


def test_the_headers_name_class_and_session() -> None:
    known = of(X_Session_Id=" s-1 ", x_baton_class="batch")
    assert (known.affinity, known.priority, known.client) == ("s-1", "batch", "")


def test_the_client_is_its_key_which_is_not_kept() -> None:
    one, again, other = (of({"user": "anna"}, Authorization=f"Bearer {key}") for key in ("k1", "k1", "k2"))
    assert one.client == again.client != other.client
    assert "k1" not in one.client
    assert of(x_api_key="k1").client
    assert one.affinity == "anna"


@pytest.mark.parametrize("user", ["anna", 'a "quoted" \\ one', "žofie"])
def test_without_a_session_the_user_stands_for_it(user: str) -> None:
    known = of({"messages": [{"role": "user", "content": '"user": "nobody"'}], "user": user})
    assert (known.client, known.affinity) == ("", user)
    assert of({"user": user}, x_session_id="s").affinity == "s"


def test_without_a_key_the_client_is_its_address_whatever_it_calls_itself() -> None:
    assert of({"user": "anna"}, address="10.0.0.1").client == "10.0.0.1"
    assert of({"user": "otto"}, address="10.0.0.1").client == "10.0.0.1"
    assert of(address="10.0.0.1", x_forwarded_for="6.6.6.6").client == "10.0.0.1"
    assert of(address="10.0.0.1", Authorization="Bearer k").client.startswith("key ")


def test_a_trusted_proxy_names_the_address_last() -> None:
    def through(**headers: str) -> str:
        return of(address="127.0.0.1", client_header="X-Forwarded-For", **headers).client

    assert through(x_forwarded_for="6.6.6.6, 10.0.0.7") == "10.0.0.7"
    assert through(X_Forwarded_For="10.0.0.8") == "10.0.0.8"
    assert through() == ""
    twice = [(b"x-forwarded-for", b"6.6.6.6"), (b"x-forwarded-for", b"10.0.0.9")]
    scope = {"path": "/v1/completions", "headers": twice, "client": ("127.0.0.1", 1)}
    assert client_of(scope, "x-forwarded-for") == "10.0.0.9"


@pytest.mark.parametrize("user", [None, 3, "", ["a"], "x" * 257])
def test_a_user_that_is_no_short_text_is_none(user: Any) -> None:
    assert of({"user": user}).affinity == ""


def test_what_is_no_json_is_not_ours_to_refuse() -> None:
    scope = {"path": "/v1/completions", "headers": []}
    assert request_context("r", scope, b'{"user": "\\x"', "").affinity == ""


@pytest.mark.parametrize("header", ["x_session_id", "x_baton_class"])
def test_a_header_may_be_256_bytes_long(header: str) -> None:
    assert of(**{header: "x" * 256})
    with pytest.raises(HeaderTooLong, match="256") as refused:
        of(**{header: "x" * 257})
    assert answer(refused.value).status == 400


@pytest.mark.parametrize(
    ("path", "root_path", "chat"),
    [
        ("/v1/chat/completions", "", True),
        ("/v1/completions", "", False),
        ("/baton/v1/messages", "/baton", True),
        ("/v1/responses", "", True),
    ],
)
def test_chat_is_known_by_the_path(path: str, root_path: str, chat: bool) -> None:
    assert of(path=path, root_path=root_path).chat is chat


def test_each_key_has_a_namespace_of_its_own_where_caches_are_apart() -> None:
    def namespace(separate_caches: bool, **headers: str) -> str | None:
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope: dict[str, Any] = {"path": "/v1/completions", "headers": pairs}
        return request_context("r", scope, b"{}", "", separate_caches).namespace

    assert namespace(False, authorization="Bearer a") is None
    one, other = (namespace(True, authorization=f"Bearer {key}") for key in "ab")
    assert namespace(True) == ""
    assert one != other
    assert one is not None
    assert "Bearer" not in one, "it is a hash of the key"
