"""LoRA adapters with prefill and decode on separate replicas: the same answers as one plain engine with them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.adapters import ADMIN_KEY, NAMES
from tests.e2e.client import MODEL, client_of, complete
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import ANSWER_TOKENS, TUNED_QUESTIONS, questions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


async def change(client: httpx.AsyncClient, what: str, key: str = ADMIN_KEY, **body: Any) -> httpx.Response:
    return await client.post(f"/v1/{what}_lora_adapter", json=body, headers={"x-baton-admin-key": key})


def of(name: str, question: str) -> str:
    return question if name == MODEL else f"{name} {question}"


async def test_answers_with_adapters_are_split_and_equal_one_plain_engines(
    baton: Cluster, reference: dict[str, list[int]], adapters: dict[str, str]
) -> None:
    """One adapter is of the configuration, the other is loaded now. All three are asked at once, the shortest twice."""
    loaded = NAMES[1]
    async with client_of(baton) as client:
        assert (await complete(client, "hi", 1, model=loaded)).status_code == 404
        assert (await change(client, "load", lora_name=loaded, lora_path=adapters[loaded])).status_code == 200
        try:
            shown = {each["id"]: each["parent"] for each in (await client.get("/v1/models")).json()["data"]}
            assert shown == {MODEL: None, NAMES[0]: MODEL, loaded: MODEL}
            asked = [(model, each) for each in (*TUNED_QUESTIONS, TUNED_QUESTIONS[0]) for model in (MODEL, *NAMES)]
            answers = await asyncio.gather(*(complete(client, *questions()[q], model=m) for m, q in asked))
        finally:
            assert (await change(client, "unload", lora_name=loaded)).status_code == 200
        for (model, question), answer in zip(asked, answers, strict=True):
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-baton-mode"] == "disaggregated"
            assert answer.json()["model"] == model
            assert answer.json()["choices"][0]["token_ids"] == reference[of(model, question)], (model, question)
        for question in TUNED_QUESTIONS:
            assert len({tuple(reference[of(model, question)]) for model in (MODEL, *NAMES)}) == 3, "they differ"
        assert (await complete(client, "hi", 1, model=loaded)).status_code == 404


async def test_an_adapter_that_cannot_be_loaded_fails_its_requests_alone(
    baton: Cluster, reference: dict[str, list[int]], adapters: dict[str, str], tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(adapters[NAMES[0]], tmp_path / "broken"))
    (broken / "adapter_model.safetensors").write_bytes(b"nothing")
    async with client_of(baton) as client:
        assert (await change(client, "load", key="wrong", lora_name="x", lora_path=str(broken))).status_code == 403
        assert (await change(client, "load", lora_name="x", lora_path=str(tmp_path / "none"))).status_code == 400
        assert (await change(client, "load", lora_name="broken", lora_path=str(broken))).status_code == 200
        failed, whole = await asyncio.gather(
            complete(client, questions()["tuned-129"][0], ANSWER_TOKENS, model="broken"),
            complete(client, questions()["tuned-129"][0], ANSWER_TOKENS, model=NAMES[0]),
        )
        await change(client, "unload", lora_name="broken")
    assert failed.status_code == 400, failed.text
    assert "the adapter cannot be loaded" in failed.json()["error"]["message"]
    assert whole.json()["choices"][0]["token_ids"] == reference[f"{NAMES[0]} tuned-129"]
    await asyncio.to_thread(baton.settled)
