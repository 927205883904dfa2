"""`baton batch`: a file goes to a server that runs batches, and its answers come back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.cli import batch as commands
from app.cli.main import app
from tests.app.batches.toys import Clock, Ingress, ToyServer, jsonl, line, running, stores_in
from tests.load_tests.traffic.servers import serving

PATIENCE_S = 60.0


class Served:
    def __init__(self, url: str, server: ToyServer, loop: asyncio.AbstractEventLoop) -> None:
        self.url, self.server, self.loop = url, server, loop

    def call(self, *command: str) -> Result:
        return CliRunner().invoke(app, ["batch", *command, "--url", self.url])

    def json(self, *command: str) -> dict[str, Any]:
        called = self.call(*command, "--json")
        assert called.exit_code == 0, called.output
        found: dict[str, Any] = json.loads(called.stdout)
        return found


async def _serve(folder: Path, started: Future[tuple[Served, asyncio.Event]]) -> None:
    server, over = ToyServer(), asyncio.Event()
    stores = stores_in(folder, Clock())
    async with running(Ingress(stores, server)) as ingress, ingress.http, serving(ingress.routes) as url:
        started.set_result((Served(url, server, asyncio.get_running_loop()), over))
        await over.wait()
    await stores.close()


@pytest.fixture
def served(no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(commands, "LOOK_S", 0.01)
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    started: Future[tuple[Served, asyncio.Event]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(tmp_path / "server", started)))
    thread.start()
    made, over = started.result(PATIENCE_S)
    yield made
    made.loop.call_soon_threadsafe(over.set)
    thread.join(PATIENCE_S)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(jsonl(line(1), b"{", line(2)))
    return path


def test_run_fetches_what_the_batch_has_made(served: Served, file: Path, tmp_path: Path) -> None:
    shown = served.call("run", str(file))
    assert shown.exit_code == 0, shown.output
    assert "completed; of 3 lines 2 are answered, and 1 have failed" in shown.stdout
    output = [json.loads(each)["custom_id"] for each in (tmp_path / "lines.output.jsonl").read_text().splitlines()]
    assert output == ["id-1", "id-2"]
    (error,) = (tmp_path / "lines.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["error"]["code"] == "invalid_json_line"
    assert list(tmp_path.glob("*.part")) == []


def test_run_writes_where_it_is_told_and_says_where(served: Served, file: Path, tmp_path: Path) -> None:
    found = served.json("run", str(file), "--output", str(tmp_path / "o"), "--errors", str(tmp_path / "e"))
    assert (found["status"], found["files"]) == ("completed", {"output": f"{tmp_path}/o", "error": f"{tmp_path}/e"})
    assert len((tmp_path / "o").read_text().splitlines()) == 2


def test_status_and_cancel_of_a_batch_that_was_left_running(served: Served, file: Path) -> None:
    served.loop.call_soon_threadsafe(served.server.gate.clear)
    batch_id = served.json("run", str(file), "--detach")["id"]
    assert served.json("status", batch_id)["id"] == batch_id
    assert batch_id in served.call("status", batch_id).stdout
    assert served.json("cancel", batch_id)["status"] == "cancelling"
    served.loop.call_soon_threadsafe(served.server.gate.set)


def test_a_batch_that_is_not_completed_is_a_failure(served: Served, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    shown = served.call("run", str(empty), "--endpoint", "/v1/completions")
    assert shown.exit_code == 1
    assert "empty_file" in shown.stdout


def test_what_goes_wrong_is_one_line(served: Served, tmp_path: Path, file: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for command, said in (
        (("status", "batch_x"), "there is no batch 'batch_x'"),
        (("run", str(empty)), "give --endpoint"),
        (("run", str(file), "--window", "soon"), "completion_window must be a time"),
    ):
        called = served.call(*command)
        assert called.exit_code == 1
        assert said in called.stderr
        assert len(called.stderr.strip().splitlines()) == 1
    gone = CliRunner().invoke(app, ["batch", "status", "x", "--url", "http://127.0.0.1:9"])
    assert (gone.exit_code, "no Baton answers at" in gone.stderr) == (1, True)


def test_the_key_goes_with_every_request(served: Served, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "mine")
    batch_id = served.json("run", str(file))["id"]
    monkeypatch.setenv("BATON_API_KEY", "another")
    assert served.call("status", batch_id).exit_code == 1


def test_a_user_who_interrupts_leaves_the_batch_running(
    served: Served, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.loop.call_soon_threadsafe(served.server.gate.clear)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.cli.batch.time.sleep", interrupted)
    called = served.call("run", str(file))
    monkeypatch.undo()
    assert called.exit_code == commands.INTERRUPTED
    assert "goes on" in called.stderr
    served.loop.call_soon_threadsafe(served.server.gate.set)
