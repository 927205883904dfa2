"""app.cli: what the commands print, how they fail, and what their start imports."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from app.cli import client, doctor, machine, main, reference, tables
from app.cli.client import CliError, fetch_status

ROOT = Path(__file__).resolve().parents[3]
STATE: dict[str, Any] = {
    "ready": True,
    "pools": {
        "decode-a": {
            "ready": True,
            "replicas": {
                "d1": {
                    "phase": "ready",
                    "fresh": False,
                    "load": {"sessions": 2, "free_blocks": 5, "total_blocks": 9, "backlog_tokens": 40},
                }
            },
        },
        "prefill": {"ready": False, "replicas": {}},
    },
    "scaling": None,
    "sessions": {"open": 2, "queued": 3, "closed": {"finished": 7}},
    "modes": {"decode_local": 9},
    "rejects": {"predicted_ttft": 4},
    "promises": [
        {
            **{"session_id": name, "prefilling": name == "young", "mode": "decode_local", "prefill": None},
            **{"decode": "d1", "prompt_tokens": 11, "cached_tokens": 0, "age_s": age_s},
        }
        for name, age_s in (("young", 0.5), ("old", 20.0))
    ],
}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(STATE if self.path == "/prefix/baton/status" else {"error": {"message": "no route"}}).encode()
        self.send_response(200 if self.path == "/prefix/baton/status" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/prefix"
        server.shutdown()
        thread.join()


def answering(status: int, body: object) -> httpx.MockTransport:
    content = body if isinstance(body, str) else json.dumps(body)
    return httpx.MockTransport(lambda request: httpx.Response(status, text=content))


def test_status_and_sessions_ask_a_running_baton(url: str) -> None:
    runner = CliRunner()
    shown = runner.invoke(main.app, ["status", "--url", url])
    assert shown.exit_code == 0
    assert "d1" in shown.stdout
    assert "2 open, 3 queued\nclosed: 7 finished\nplaced: 9 decode_local\n" in shown.stdout
    assert json.loads(runner.invoke(main.app, ["status", "--url", url, "--json"]).stdout) == STATE
    rows = json.loads(runner.invoke(main.app, ["sessions", "--url", url, "--json"]).stdout)["sessions"]
    assert [(row["session"], row["state"]) for row in rows] == [("old", "decode"), ("young", "prefill")]


def test_an_error_is_one_line_and_exit_status_1(url: str) -> None:
    shown = CliRunner().invoke(main.app, ["status", "--url", url + "/elsewhere"])
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr == f"error: {url}/elsewhere answered 404: no route\n"
    assert CliRunner().invoke(main.app, ["status", "--colour"]).exit_code == 2


def test_status_shows_a_silent_replica_and_an_empty_pool() -> None:
    lines = [line.split() for line in tables.status_text(STATE).splitlines()]
    assert ["decode-a", "d1", "ready", "(silent)", "2", "5/9", "40"] in lines
    assert ["prefill", "-", "no", "replica", "-", "-", "-"] in lines


TIMELINES: dict[str, Any] = {
    "request_id": "a/b",
    "sessions": [
        {
            **{"session_id": "cmpl-a/b-0", "outcome": None, "error": None, "prompt_tokens": 11, "output_tokens": 3},
            "spans": [
                {"what": "placement", "where": "session manager", "from_s": 0.001, "to_s": 0.0035, "note": ""},
                {"what": "decode", "where": "d1", "from_s": 0.0035, "to_s": None, "note": ""},
            ],
        }
    ],
    "silent": ["p1"],
}


def test_the_timeline_of_a_request_is_asked_for_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path)
        return httpx.Response(200, json=TIMELINES)

    found = client.fetch_timelines("http://baton/prefix", "a/b", httpx.MockTransport(answer))
    assert asked == [b"/prefix/status/sessions/a%2Fb"]
    monkeypatch.setattr(client, "fetch_timelines", lambda url, name: found)
    runner = CliRunner()
    assert json.loads(runner.invoke(main.app, ["sessions", "a/b", "--json"]).stdout) == TIMELINES
    lines = runner.invoke(main.app, ["sessions", "a/b"]).stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["cmpl-a/b-0:", "runs;", "11", "prompt", "tokens,", "3", "given"],
        ["WHAT", "WHERE", "BEGAN", "MS", "TOOK", "MS", "NOTE"],
        ["placement", "session", "manager", "1.0", "2.5"],
        ["decode", "d1", "3.5", "goes", "on"],
        [],
        ["no", "word", "from", "p1,", "so", "their", "part", "is", "missing"],
    ]


def test_a_request_that_no_ingress_knows_is_a_plain_error() -> None:
    unknown = answering(404, {"error": {"message": "no ingress knows it"}})
    with pytest.raises(CliError, match="no ingress knows it"):
        client.fetch_timelines("http://baton", "x", unknown)


def test_no_session_is_said_in_words() -> None:
    assert tables.sessions_text(tables.session_rows({})) == "no session is placed"


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (503, {"error": {"message": "the manager is away"}}, "the manager is away"),
        (401, {}, "BATON_ADMIN_KEY"),
        (200, "<html>", "not a Baton"),
        (200, {"some": "thing"}, "not a Baton"),
        (200, [1], "without a reason"),
    ],
)
def test_what_is_not_a_state_is_refused(status: int, body: object, says: str) -> None:
    with pytest.raises(CliError, match=says):
        fetch_status("http://baton", answering(status, body))


@pytest.mark.parametrize("url", ["baton", "http://[", "ftp://baton", "http://127.0.0.1:1"])
def test_an_address_without_a_baton_is_a_plain_error(url: str) -> None:
    with pytest.raises(CliError, match="no Baton answers"):
        fetch_status(url)


def test_the_key_is_sent_in_the_header_that_the_ingress_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=STATE)

    monkeypatch.setenv(client.KEY_VARIABLE, "secret")
    fetch_status("http://baton/", httpx.MockTransport(answer))
    assert seen[0].headers["x-baton-admin-key"] == "secret"


def test_serve_hands_its_options_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    from app.launch.arguments import parse_arguments

    given: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(main, "_become", lambda module, arguments: given.append((module, arguments)))
    options = ["--port", "81", "--proxy", "serve", "--ray-port", "82", "--num-cpus", "3", "--timeout-s", "4"]
    options += ["--observe", "--prometheus-port", "83"]
    assert CliRunner().invoke(main.app, ["serve", "a.yaml", *options]).exit_code == 0
    module, arguments = given[0]
    assert module == "app.launch"
    assert parse_arguments(arguments) == parse_arguments(["--config", "a.yaml", *options])


def test_plan_and_tune_get_their_arguments_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(main, "_forward", lambda module, arguments: given.append((module, arguments)))
    CliRunner().invoke(main.app, ["plan", "a.jsonl", "--ttft", "1", "--help"])
    CliRunner().invoke(main.app, ["tune", "--config", "a.yaml"])
    assert given == [
        ("load_tests.plan", ["a.jsonl", "--ttft", "1", "--help"]),
        ("load_tests.tune", ["--config", "a.yaml"]),
    ]


def test_doctor_fails_only_on_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    for level, status in (("warn", 0), ("fail", 1)):
        line = doctor.Line("check", level, "found", "hint")  # type: ignore[arg-type]
        monkeypatch.setattr(machine, "examine", lambda line=line: [line])
        shown = CliRunner().invoke(main.app, ["doctor", "--json"])
        assert shown.exit_code == status
        assert json.loads(shown.stdout) == {
            "checks": [{"check": "check", "level": level, "found": "found", "hint": "hint"}]
        }


@pytest.mark.parametrize(
    ("line", "level"),
    [
        (doctor.python((3, 12)), "fail"),
        (doctor.package("ray", None, "1"), "fail"),
        (doctor.package("ray", "2", "1"), "warn"),
        (doctor.package("torch", "1+cpu", "1"), "ok"),
        (doctor.cores(1), "warn"),
        (doctor.memory(doctor.MIN_FREE_BYTES - 1), "warn"),
        (doctor.shared_memory(None), "fail"),
        (doctor.shared_memory(1), "warn"),
        (doctor.files(1024), "warn"),
        (doctor.files(-1), "ok"),
        (doctor.locked_memory(8192, rdma=True), "warn"),
        (doctor.locked_memory(8192, rdma=False), "ok"),
        (doctor.ports({1: False})[0], "warn"),
        (doctor.nixl_plugins(["POSIX"]), "fail"),
        (doctor.clock("hpet"), "warn"),
    ],
)
def test_a_line_has_its_level_and_a_hint_unless_all_is_well(line: doctor.Line, level: str) -> None:
    assert line.level == level
    assert bool(line.hint) == (level != "ok")


def test_doctor_knows_the_versions_that_the_project_pins() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"ray[serve]=={machine.PINS["ray"]}"' in text
    assert f'"nixl=={machine.PINS["nixl"]}"' in text
    assert f'"vllm=={machine.VLLM}"' in text


def test_this_machine_is_examined_whole() -> None:
    assert {"python", "vllm", "nixl plugins", "memory", "port 8000", "clock"} <= {
        each.check for each in machine.examine()
    }


def test_the_page_is_what_help_prints() -> None:
    assert reference.PAGE.read_text() == reference.page(), "run python -m app.cli.reference --write"
    nav = (ROOT / "mkdocs.yml").read_text()
    assert "reference/cli.md" in nav


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom app.cli.main import app\napp(['--help'], standalone_mode=False)\n"
        "print('HEAVY', sorted({'ray', 'vllm', 'torch', 'nixl', 'numpy', 'httpx'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"
