"""The mock engine fills in for the real one by configuration only: configs/mock.yaml under Serve, over real NIXL."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.checkpoint.prepare import DEFAULT_CACHE_DIR, resolve
from deployments.serve.scaling import POLICY
from deployments.stored.store import LOST
from load_tests.simulator.traces import TraceRequest, load
from load_tests.traffic import vllm_bench
from tests.e2e.client import Load, answer_to, events, until
from tests.e2e.cluster import NAME, Cluster, processes, started, total
from tests.e2e.proxied import is_served

ADMIN_KEY = "secret"
DRAIN_S, BACK_WITHIN_S = 30.0, 300.0
LOOPBACK, EVERYWHERE = "0100007F", "00000000"  # as /proc writes addresses
PROMPT_TOKENS, ANSWER_TOKENS, BLOCK = 40, 400, 16
pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mock")


@pytest.fixture(scope="module")
def mock(folder: Path) -> Iterator[Cluster]:
    batches = {"database_url": f"sqlite:///{folder / 'batches.db'}", "files_url": str(folder / "files")}
    more: dict[str, Any] = {
        "ingress": {"stored_responses": {}, "admin_key": ADMIN_KEY, "batches": batches},
        "trace": {"path": str(folder / "traffic.jsonl")},
    }
    with started("mock.yaml", folder, more=more, drain_s=DRAIN_S) as cluster:
        yield cluster


def ask(prompt: list[int], **more: object) -> dict[str, Any]:
    fixed = {"model": "mock", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return fixed | {"return_token_ids": True} | more


async def test_split_answers_equal_unsplit_ones(mock: Cluster) -> None:
    """A mock's tokens are made from the KV it finds, so what NIXL carried between processes was right."""
    prompts = [[100 + 7 * i + j for j in range(9 + 31 * i)] for i in range(8)]
    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as client:
        split = await asyncio.gather(*(client.post("/v1/completions", json=ask(prompt)) for prompt in prompts))
        whole = await asyncio.gather(
            *(client.post("/v1/completions", json=ask(prompt, prompt_logprobs=0)) for prompt in prompts)
        )
    assert {response.headers["x-baton-mode"] for response in split} == {"disaggregated"}
    assert {response.headers["x-baton-mode"] for response in whole} == {"decode_local"}
    tokens = [[response.json()["choices"][0]["token_ids"] for response in kind] for kind in (split, whole)]
    assert tokens[0] == tokens[1]


async def test_the_session_manager_keeps_a_trace_that_the_simulator_reads(mock: Cluster, folder: Path) -> None:
    prompt = [3000 + number for number in range(5 * BLOCK + 1)]
    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as client:
        for max_tokens in (5, 6):
            answer = await client.post("/v1/completions", json=ask(prompt, max_tokens=max_tokens))
            assert answer.status_code == 200

    def written() -> list[TraceRequest]:
        file = folder / "traffic.jsonl"
        found = load(file).requests if file.exists() and file.stat().st_size else ()
        return [each for each in found if each.prompt_tokens == len(prompt)]

    await until(lambda: len(written()) == 2, 60.0, "two lines")
    one, two = written()
    assert [(each.output_tokens, each.max_tokens) for each in (one, two)] == [(5, 5), (6, 6)]
    assert one.hashes == two.hashes
    assert len(one.hashes) == 5
    assert 0 < two.at_s - one.at_s < BACK_WITHIN_S


async def test_vllms_own_benchmark_measures_it_too(mock: Cluster) -> None:
    """`vllm bench serve`, unmodified; what it counts is what the replicas counted."""
    before = total(await asyncio.to_thread(mock.settled), "decode", "generated_tokens")
    tokenizer = str(resolve("bundled:smollm2-135m-instruct", DEFAULT_CACHE_DIR))
    more = ["--num-prompts=8", "--random-input-len=20", "--random-output-len=6", "--max-concurrency=4"]
    found = await asyncio.to_thread(vllm_bench.run, mock.url, "mock", tokenizer, more, 180.0)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (8, 0, 48)
    assert found["median_ttft_ms"] > 0
    assert found["output_throughput"] > 0
    after = total(await asyncio.to_thread(mock.settled), "decode", "generated_tokens")
    assert after - before >= 8 * 5  # the first token of a split answer is prefill's


async def test_the_ingress_writes_what_became_of_each_request_and_serve_writes_nothing_of_it(mock: Cluster) -> None:
    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as client:
        await client.post(
            "/v1/completions", json=ask(list(range(100, 140)), n=2, temperature=1), headers={"x-request-id": "seen"}
        )
    title = f"ray::ServeReplica:{NAME}:ingress"
    (pid,) = [pid for pid, line in processes(mock.marker).items() if line.startswith(title)]
    written = await asyncio.to_thread(Path(f"/proc/{pid}/fd/1").resolve)

    def found() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in written.read_text().splitlines() if line.startswith('{"time"')]
        return [line for line in lines if line["id"] == "seen"]

    await until(lambda: bool(found()), BACK_WITHIN_S, "the line is there")
    (line,) = found()
    assert (line["method"], line["path"], line["status"], line["outcome"]) == ("POST", "/v1/completions", 200, "ok")
    assert (line["mode"], line["prompt_tokens"], line["output_tokens"]) == ("disaggregated", 40, 16)
    assert 0 < line["ttft_s"] < line["total_s"]
    serves = [path.read_text() for path in (written.parent / "serve").glob(f"replica_{NAME}_ingress_*.log")]
    assert serves
    assert not any("POST" in text for text in serves)


async def test_many_at_once_leave_nothing(mock: Cluster) -> None:
    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=ask([i, i + 1, i + 2], max_tokens=20)) for i in range(100, 200))
        )
    assert [answer.status_code for answer in answers] == [200] * 100
    status = await asyncio.to_thread(mock.settled)
    assert mock.used_blocks() == 0
    assert total(status, "decode", "preemptions") == 0
    assert total(status, "decode", "handoffs_received") >= 100
    assert total(status, "decode", "open_receiving") == total(status, "prefill", "open_writing") == 0


def haproxy(cluster: Cluster) -> list[int]:
    return [pid for pid, line in processes(cluster.marker).items() if "/haproxy" in line.partition(" ")[0]]


async def test_clients_come_through_haproxy_and_nothing_of_it_listens_beyond_loopback(mock: Cluster) -> None:
    assert haproxy(mock), "it runs"
    assert {address for pid in haproxy(mock) for address in listening(pid)} == {LOOPBACK}
    title = f"ray::ServeReplica:{NAME}:ingress"
    (ingress,) = [pid for pid, line in processes(mock.marker).items() if line.startswith(title)]
    assert EVERYWHERE not in listening(ingress), "nor does what it sends requests to"
    await is_served(mock)


def listening(pid: int) -> set[str]:
    """The addresses at which a process listens for TCP, as /proc has them."""
    files = Path(f"/proc/{pid}/fd")
    sockets = {os.readlink(file) for file in files.iterdir()}  # noqa: PTH115 - a socket is no path
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


async def test_a_request_is_explained_and_not_served(mock: Cluster) -> None:
    before = (await asyncio.to_thread(mock.settled))["modes"]
    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as client:
        answer = await client.post("/baton/explain", json=ask(list(range(5000, 5040)), stream=True))
        wrong = await client.post("/baton/explain", json=ask([1], max_tokens=-1))
    assert answer.status_code == 200
    found = answer.json()
    assert found["request"]["prompt_tokens"] == 40
    assert found["decision"]["outcome"] == "placed"
    assert (await asyncio.to_thread(mock.settled))["modes"] == before
    assert wrong.status_code == 400, "as the request itself would be"


async def test_a_replica_is_drained_under_load_and_put_back(mock: Cluster) -> None:
    asked = questions(800)
    expected = await answers(mock, asked)
    (replica,) = mock.status()["pools"]["decode-large"]["replicas"]

    def phase() -> str:
        return str(mock.status()["pools"]["decode-large"]["replicas"][replica]["phase"])

    def left() -> int:
        return sum(replica in (each["prefill"], each["decode"]) for each in mock.status()["promises"])

    async with httpx.AsyncClient(base_url=mock.url, headers={"x-baton-admin-key": ADMIN_KEY}) as admin:
        async with Load(mock, asked, 8) as load:
            await until(lambda: left() > 0, BACK_WITHIN_S, "it has sessions")
            drained = await admin.post(f"/baton/replicas/{replica}/drain")
            assert (drained.status_code, drained.json()["draining"]) == (200, True)
            await until(lambda: phase() == "draining" and left() == 0, BACK_WITHIN_S, "it is empty")
        resumed = await admin.post(f"/baton/replicas/{replica}/resume")
        assert (resumed.status_code, resumed.json()["draining"]) == (200, False)
        await until(lambda: phase() == "ready", BACK_WITHIN_S, "it serves again")
        assert (await admin.post("/baton/replicas/none/drain")).status_code == 404
    assert [said for said in load.said if said.error or said.tokens != expected[said.asked]] == []


def questions(max_tokens: int) -> list[dict[str, Any]]:
    return [ask([200 + 11 * i + j for j in range(20 + 9 * i)], max_tokens=max_tokens) for i in range(8)]


async def answers(cluster: Cluster, asked: list[dict[str, Any]]) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=BACK_WITHIN_S) as client:
        return await asyncio.gather(*(answer_to(client, question, stream=False) for question in asked))


async def test_scaling_down_under_load_loses_nothing(mock: Cluster) -> None:
    """Answers that take longer than a replica that leaves has time go on elsewhere."""
    asked = questions(1600)
    expected = await answers(mock, asked)

    def scale(application: dict[str, Any], replicas: int) -> None:
        application["deployments"] = [{"name": "decode-large", "num_replicas": replicas}]

    await asyncio.to_thread(mock.deploy, lambda application: scale(application, 2))
    await until(lambda: len(mock.running().get("decode-large", ())) == 2, BACK_WITHIN_S, "there are two")
    before = mock.running()
    async with Load(mock, asked, 8) as load:
        await asyncio.sleep(4.0)
        await asyncio.to_thread(mock.deploy, lambda application: scale(application, 1))
        await until(lambda: len(mock.running().get("decode-large", ())) == 1, BACK_WITHIN_S, "there is one")
    after = mock.running()
    assert after.pop("decode-large") < before.pop("decode-large")
    assert after == before, "nothing else was restarted"
    assert [said for said in load.said if said.error or said.tokens != expected[said.asked]] == []


async def test_a_pool_that_scales_by_itself_grows_with_its_sessions(mock: Cluster) -> None:
    """Serve does not see sessions: its policy hears of them from the replicas."""
    large = {"name": "decode-large"}
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "policy": POLICY}
    soon = {"upscale_delay_s": 0, "metrics_interval_s": 0.2, "look_back_period_s": 1}
    fixed, scaled = {**large, "num_replicas": 1}, {**large, "autoscaling_config": {**scaling, **soon}}
    async with Load(mock, questions(800), 8):
        await asyncio.to_thread(mock.deploy, lambda application: application.update(deployments=[scaled]))
        await until(lambda: len(mock.running().get("decode-large", ())) == 2, BACK_WITHIN_S, "there are two")
    await asyncio.to_thread(mock.deploy, lambda application: application.update(deployments=[fixed]))
    await until(lambda: len(mock.running().get("decode-large", ())) == 1, BACK_WITHIN_S, "there is one")


async def test_an_update_to_another_engine_under_load_loses_nothing(mock: Cluster) -> None:
    """Every answer is the old engine's or the new one's: KV of the one is never used by the other."""
    asked = questions(60)
    old = await answers(mock, asked)
    before = mock.running()

    def change(application: dict[str, Any]) -> None:
        pools = application["args"]
        for pool in (pools["prefill"], *pools["decode"].values()):
            pool["engine"]["seed"] = 7

    def updated() -> bool:
        running = mock.running()
        return bool(running) and not any(running[name] & before[name] for name in before)

    async with Load(mock, asked, 8) as load:
        await asyncio.to_thread(mock.deploy, change)
        await until(updated, BACK_WITHIN_S, "everything is new")
    new = await answers(mock, asked)
    assert [said for said in load.said if said.error] == []
    kinds = {said.tokens == old[said.asked]: said.tokens == new[said.asked] for said in load.said}
    assert kinds == {True: False, False: True}
    await asyncio.to_thread(mock.settled)
    assert mock.used_blocks() == 0


async def stream(client: httpx.AsyncClient, first: int, tokens: int = ANSWER_TOKENS) -> tuple[int, int, str | None]:
    """Status, tokens and finish reason of a streamed answer."""
    asked = ask([first] * PROMPT_TOKENS, max_tokens=tokens, stream=True)
    count, finish = 0, None
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        async for event in events(response):
            (choice,) = event["choices"]
            count, finish = count + len(choice["token_ids"] or ()), choice["finish_reason"] or finish
    return response.status_code, count, finish


async def body(client: httpx.AsyncClient, route: str) -> dict[str, Any]:
    """A route's answer with any status; {} while there is no answer."""
    try:
        answer: dict[str, Any] = (await client.get(route)).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return answer


async def test_the_session_manager_is_killed_and_no_client_notices(mock: Cluster) -> None:
    """Answers go on, new ones begin, and the next manager's ledger is exact."""
    ready: list[dict[str, Any]] = []
    answers: list[tuple[int, int, str | None]] = []
    is_over = asyncio.Event()

    async def client(first: int) -> None:
        while not is_over.is_set():
            answers.append(await stream(http, first))

    async def look() -> bool:
        """Until the manager was away and is back."""
        ready.append(await body(http, "/ready"))
        return "manager" not in ready[-1] and any(state.get("manager") == "away" for state in ready)

    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as http:
        crowd = [asyncio.create_task(client(100 + n)) for n in range(6)]
        await asyncio.sleep(1.0)
        mock.kill("session-manager")
        async with asyncio.timeout(BACK_WITHIN_S):
            while not await look():
                await asyncio.sleep(0.1)
        async with asyncio.timeout(BACK_WITHIN_S):
            while not ((now := await body(http, "/baton/status")) and is_exact(now) and now["sessions"]["open"]):
                await asyncio.sleep(0.05)
        is_over.set()
        await asyncio.gather(*crowd)
    assert set(answers) == {(200, ANSWER_TOKENS, "length")}
    assert any(state["ready"] for state in ready if state.get("manager") == "away")
    status = await asyncio.to_thread(mock.settled)
    assert is_exact(status)
    assert mock.used_blocks() == 0
    assert status["ingress"]["without_manager"]["absences"] >= 1, "more where a busy machine keeps it from answering"
    assert status["ingress"]["without_manager"]["placed"] > 0


def is_exact(status: dict[str, Any]) -> bool:
    """Whether each decode replica's ledger holds what its sessions were promised, all alike, and nothing else."""
    if "replicas" not in status:
        return False
    loads = {name: each["load"] for pool in status["pools"].values() for name, each in pool["replicas"].items()}
    blocks = -(-(PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK)
    return all(
        loads[name]["total_blocks"] - loads[name]["free_blocks"] == blocks * replica["sessions"]
        for name, replica in status["replicas"].items()
        if replica["role"] == "decode"
    )


async def test_the_sessions_of_an_ingress_that_is_killed_are_ended(mock: Cluster) -> None:
    await until(lambda: bool(mock.running()), BACK_WITHIN_S, "no update is under way")
    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as http:
        running = [asyncio.create_task(stream(http, 200 + n, tokens=1900)) for n in range(4)]
        await until(lambda: mock.decoding(4), BACK_WITHIN_S, "they are being answered")
        mock.kill("ingress")
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert not [each for each in ended if each == (200, 1900, "length")], "they were over before"
        async with asyncio.timeout(BACK_WITHIN_S):
            while not (await body(http, "/ready")).get("ready"):
                await asyncio.sleep(0.5)
        status = await asyncio.to_thread(mock.settled)
        assert status["sessions"]["closed"]["orphaned"] == 4
        assert mock.used_blocks() == 0
        assert await stream(http, 300) == (200, ANSWER_TOKENS, "length")


async def test_the_background_responses_of_a_killed_ingress_have_failed(mock: Cluster) -> None:
    asked = {"model": "mock", "input": "Hi", "max_output_tokens": 1900, "ignore_eos": True, "background": True}
    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as http:
        made = (await http.post("/v1/responses", json=asked)).json()
        path = f"/v1/responses/{made['id']}"
        await reaches(http, path, "in_progress")
        mock.kill("ingress")
        found = await reaches(http, path, "failed")
        assert found["error"]["message"] == LOST
        await asyncio.to_thread(mock.settled)
        assert mock.used_blocks() == 0


async def test_a_batch_goes_on_when_its_ingress_is_killed(mock: Cluster) -> None:
    body_of = {"model": "mock", "prompt": [7, 8, 9], "max_tokens": 60, "ignore_eos": True}
    asked = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body_of} for n in range(300)]
    content = "\n".join(map(json.dumps, asked)).encode()
    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as http:
        sent = await http.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"})
        wish = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
        path = f"/v1/batches/{(await http.post('/v1/batches', json=wish)).json()['id']}"
        async with asyncio.timeout(BACK_WITHIN_S):
            while not (await body(http, path)).get("request_counts", {}).get("completed"):
                await asyncio.sleep(0.02)
        mock.kill("ingress")
        done = await reaches(http, path, "completed")
        assert done["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
        output = (await http.get(f"/v1/files/{done['output_file_id']}/content")).text.splitlines()
        assert [json.loads(each)["custom_id"] for each in output] == [each["custom_id"] for each in asked]
        await asyncio.to_thread(mock.settled)
        assert mock.used_blocks() == 0


async def test_a_killed_store_is_replaced_and_has_forgotten(mock: Cluster) -> None:
    asked = {"model": "mock", "input": "Hi", "max_output_tokens": 8, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as http:
        made = (await http.post("/v1/responses", json=asked)).json()
        running = (
            await http.post("/v1/responses", json=asked | {"max_output_tokens": 1900, "background": True})
        ).json()
        assert (await body(http, f"/v1/responses/{made['id']}"))["status"] == "incomplete"
        mock.kill("stored-responses")
        codes: set[str] = set()
        async with asyncio.timeout(BACK_WITHIN_S):
            while "response_not_found" not in codes:
                codes.add((await body(http, f"/v1/responses/{made['id']}")).get("error", {}).get("code", "no answer"))
        assert codes <= {"response_not_found", "store_unavailable"}
        found = await reaches(http, f"/v1/responses/{running['id']}", "incomplete")
        assert found["usage"]["output_tokens"] == 1900


async def reaches(http: httpx.AsyncClient, path: str, status: str) -> dict[str, Any]:
    """Wait until a stored response has a status. Errors on the way there do not count."""
    async with asyncio.timeout(BACK_WITHIN_S):
        while (found := await body(http, path)).get("status") != status:
            await asyncio.sleep(0.2)
    return found


async def test_haproxy_is_killed_and_serves_again(mock: Cluster) -> None:
    """What streams through it breaks off and is ended; the next request is served by another one."""
    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as client:
        running = asyncio.create_task(stream(client, 400, tokens=1900))
        await until(lambda: mock.status()["sessions"]["open"] == 1, BACK_WITHIN_S, "it is being answered")
        killed = haproxy(mock)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            await running
        async with asyncio.timeout(BACK_WITHIN_S):
            while not (await body(client, "/ready")).get("ready"):
                await asyncio.sleep(0.2)
        assert haproxy(mock)
        assert not set(haproxy(mock)) & set(killed)
        assert await stream(client, 500) == (200, ANSWER_TOKENS, "length")
    await asyncio.to_thread(mock.settled)
    assert mock.used_blocks() == 0


async def test_ctrl_c_lets_answers_end(mock: Cluster) -> None:
    """The last test: it stops the application."""
    (question,) = questions(900)[:1]
    (whole,) = await answers(mock, [question])
    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as client:
        answer = asyncio.create_task(answer_to(client, question, stream=True))
        await until(lambda: mock.status()["sessions"]["open"] == 1, BACK_WITHIN_S, "it is being answered")
        await asyncio.to_thread(mock.application.stop)
        assert await answer == whole
