"""Logs as JSON: every line is an object, says where it comes from, and which session or request it is about."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from configs.schema import ChannelConfig, ModelConfig, VllmEngineConfig
from deployments import logs
from deployments.messages import Mode, Role
from load_tests.harness.control_plane import InProcess

WRITE = """
import logging, sys
from deployments import logs
logs.start(sys.argv[1], "decode-a", "r1", sys.argv[2])
logging.getLogger("baton.core").warning("session %s failed: %s", "s-1", "lost\\nhere", extra=logs.of_session("s-1"))
logging.getLogger("app.api").error("request %s", "abc", extra=logs.of_request("abc"))
logging.getLogger("baton.core").info("of a session")
logging.getLogger("baton.transfer").info("not said")
logging.getLogger("baton.access").info("not said either")
try:
    raise ValueError("why\\nso")
except ValueError as error:
    logging.getLogger("other").error("it ended", exc_info=error)
"""


def written(log_format: str, level: str = "warning") -> str:
    ran = subprocess.run(
        [sys.executable, "-c", WRITE, log_format, level], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout == ""
    return ran.stderr


def test_each_line_is_an_object_and_has_its_session() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in written("json").splitlines()]
    assert [(line["levelname"], line["name"], line["message"]) for line in lines] == [
        ("WARNING", "baton.core", "session s-1 failed: lost\nhere"),
        ("ERROR", "app.api", "request abc"),
        ("ERROR", "other", "it ended"),
    ]
    assert [line.get("session_id") for line in lines] == ["s-1", None, None]
    assert [line.get("request_id") for line in lines] == [None, "abc", None]
    assert {(line["deployment"], line["replica"]) for line in lines} == {("decode-a", "r1")}
    assert "ValueError: why\nso" in lines[2]["exc_info"]
    assert all(line["asctime"] for line in lines)


def test_text_stays_as_python_writes_it() -> None:
    assert written("text").startswith("session s-1 failed: lost\nhere\nrequest abc\nit ended\nTraceback")


def test_with_the_level_info_sessions_have_lines_and_nothing_else_has_more() -> None:
    ended = [json.loads(line) for line in written("json", "info").splitlines()]
    assert [line["message"] for line in ended if line["levelname"] == "INFO"] == ["of a session"]
    assert len(ended) == 4
    assert written("text", "info").startswith("session s-1 failed: lost\nhere\nrequest abc\nof a session\nit ended\n")


async def test_a_session_has_a_line_from_its_ingress_and_from_each_replica(
    cluster: InProcess, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = list(range(1000, 1040))
    await cluster.answer(prompt, max_tokens=5, request_id="not-told")
    assert not caplog.records
    for name in logs.OF_SESSIONS:
        caplog.set_level(logging.INFO, name)
    answer = await cluster.answer(prompt, max_tokens=5, request_id="told")
    assert set(answer.context.modes) == {Mode.DISAGGREGATED}
    await cluster.settle()
    told = [record for record in caplog.records if getattr(record, "session_id", "") == "told"]
    assert len(told) == len(caplog.records)
    lines = sorted((record.name, record.getMessage()) for record in told)
    assert lines == [
        ("baton.core", "session told: length after 5 tokens"),
        ("baton.replica", "session told, placement 2: finished here after 1 tokens"),
        ("baton.replica", "session told, placement 2: finished here after 4 tokens"),
    ]


def test_engines_are_told_the_format() -> None:
    from deployments.engine.vllm.arguments import EngineArguments

    where = {"model_path": "", "role": Role.DECODE, "replica_id": "r", "secret": "", "host": ""}
    plain = EngineArguments(VllmEngineConfig(), ModelConfig(), ChannelConfig(), **where)  # type: ignore[arg-type]
    assert "logging_config" not in plain._optional(), "what vLLM's environment says counts"
    assert replace(plain, log_format="json")._optional()["logging_config"].formatter == "json"


JOIN = """
import logging, sys
from types import SimpleNamespace
from vllm.config import LoggingConfig
from vllm.logger import configure_logging
from transfer.vllm import logs
logging_config = LoggingConfig(formatter=sys.argv[1])
configure_logging(logging_config)
logs.join(SimpleNamespace(logging_config=logging_config))
logging.getLogger("baton.transfer").warning("session %s: it broke", "s-1", extra={"session_id": "s-1"})
"""


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["json", "text"])
def test_in_an_engines_process_baton_writes_as_vllm_does(log_format: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", JOIN, log_format], capture_output=True, text=True, check=True, timeout=240
    )
    line = next(line for line in (ran.stdout + ran.stderr).splitlines() if "it broke" in line)
    if log_format == "text":
        assert line == "session s-1: it broke"
        return
    told = json.loads(line)
    assert (told["levelname"], told["name"], told["session_id"]) == ("WARNING", "baton.transfer", "s-1")
