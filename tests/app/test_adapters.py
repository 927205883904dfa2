"""Adapters by configuration and by HTTP: which routes answer whom, and that all ingresses serve the same ones."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.config import LoRAConfig
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

from app.access.gate import ADMIN_KEY
from app.adapters import ServedAdapters, serve_adapters
from configs.schema import BatonConfig
from deployments.checkpoint.adapter import CONFIG
from deployments.checkpoint.errors import AdapterError
from deployments.errors import Unavailable
from deployments.manager.adapters import LoadedAdapters
from deployments.manager.calls import Call, ShareAdapters

MODEL, KEY = "base", "a key of the tests"
SOON_S = 10.0


class Control:
    """The session manager, as far as adapters go."""

    def __init__(self) -> None:
        self.shared = LoadedAdapters()
        self.is_away = False

    async def ask(self, call: Call[Any]) -> Any:
        assert isinstance(call, ShareAdapters)
        if self.is_away:
            raise Unavailable("away")
        return await self.shared.share(call)


class Models(OpenAIServingModels):
    """vLLM's registry, without an engine beneath it."""

    def __init__(self) -> None:
        self.base_model_paths = [BaseModelPath(MODEL, MODEL)]
        self.lora_requests: dict[str, LoRARequest] = {}
        self.input_processor: Any = type("Processor", (), {"lora_config": LoRAConfig(max_lora_rank=8)})

    def is_base_model(self, model_name: str) -> bool:
        return model_name == MODEL


class Ingress:
    def __init__(self, app: FastAPI, served: ServedAdapters) -> None:
        self.models: Models = app.state.openai_serving_models
        self._served = served
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton")

    async def ask(self, what: str, key: str | None = KEY, **body: Any) -> int:
        headers = {} if key is None else {ADMIN_KEY: key}
        answer = await self._http.post(f"/v1/{what}_lora_adapter", json=body, headers=headers)
        if answer.status_code != 200:
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        return answer.status_code

    async def until(self, *names: str) -> None:
        """Wait until the ingress serves these adapters, and no others."""
        async with asyncio.timeout(SOON_S):
            while self.models.lora_requests.keys() != set(names):
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        self._served.shutdown()
        await self._http.aclose()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    (made / CONFIG).write_text(json.dumps({"r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}))
    (made / "adapter_model.safetensors").write_bytes(b"weights")
    return made


Start = Callable[..., Any]


@pytest.fixture
def control() -> Control:
    return Control()


@pytest.fixture
async def start(control: Control, folder: Path) -> AsyncIterator[Start]:
    begun: list[Ingress] = []

    async def begin(admin_key: str | None = KEY, path: Path = folder) -> Ingress:
        app = FastAPI()
        app.state.openai_serving_models = Models()
        lora = {"adapters": [{"name": "fixed", "path": str(path)}]}
        pools: dict[str, Any] = {"prefill": {}, "decode": {"main": {}}}
        config = BatonConfig.model_validate({**pools, "lora": lora, "ingress": {"admin_key": admin_key}})
        served = await serve_adapters(app, config, control)
        assert served is not None
        begun.append(Ingress(app, served))
        return begun[-1]

    yield begin
    for ingress in begun:
        await ingress.close()


async def test_what_one_ingress_loads_all_serve_and_unload_together(start: Start, folder: Path) -> None:
    first, second = await start(), await start()
    await second.until("fixed")
    assert await first.ask("load", lora_name="tuned", lora_path=str(folder)) == 200
    await second.until("fixed", "tuned")
    ids = {each.models.lora_requests["tuned"].lora_int_id for each in (first, second)}
    assert ids == {first.models.lora_requests["fixed"].lora_int_id}, "the same files"
    third = await start()
    await third.until("fixed", "tuned")
    assert await second.ask("unload", lora_name="tuned") == 200
    await first.until("fixed")


async def test_a_manager_that_has_restarted_hears_of_the_adapters(start: Start, control: Control, folder: Path) -> None:
    ingress = await start()
    assert await ingress.ask("load", lora_name="tuned", lora_path=str(folder)) == 200
    control.shared = LoadedAdapters()
    later = await start()
    await later.until("fixed", "tuned")


async def test_while_the_manager_is_away_adapters_are_served_and_changes_are_refused(
    start: Start, control: Control, folder: Path
) -> None:
    ingress = await start()
    control.is_away = True
    assert await ingress.ask("load", lora_name="tuned", lora_path=str(folder)) == 503
    await ingress.until("fixed")


@pytest.mark.parametrize(("admin_key", "given"), [(None, KEY), (KEY, None), (KEY, "another")])
async def test_only_the_administrator_loads_and_unloads(
    start: Start, folder: Path, admin_key: str | None, given: str | None
) -> None:
    ingress = await start(admin_key)
    assert await ingress.ask("load", given, lora_name="tuned", lora_path=str(folder)) == 403
    assert await ingress.ask("unload", given, lora_name="fixed") == 403
    await ingress.until("fixed")


async def test_a_name_that_is_taken_is_refused_unless_it_is_to_be_replaced(start: Start, folder: Path) -> None:
    ingress, other = await start(), Path(shutil.copytree(folder, folder.parent / "other"))
    (other / "adapter_model.safetensors").write_bytes(b"other weights")
    asked = {"lora_name": "tuned", "lora_path": str(folder)}
    assert await ingress.ask("load", **asked) == 200
    before = ingress.models.lora_requests["tuned"]
    assert await ingress.ask("load", **asked) == 400
    assert await ingress.ask("load", **{**asked, "lora_path": str(other), "load_inplace": True}) == 200
    assert ingress.models.lora_requests["tuned"].lora_int_id != before.lora_int_id
    for taken in (MODEL, "fixed", ""):
        assert await ingress.ask("load", lora_name=taken, lora_path=str(folder), load_inplace=True) == 400


async def test_what_cannot_be_unloaded_says_so(start: Start) -> None:
    ingress = await start()
    assert await ingress.ask("unload", lora_name="nothing") == 404
    assert await ingress.ask("unload", lora_name="fixed") == 400


@pytest.mark.parametrize("change", [{"r": 64}, {"bias": "all"}, {"r": None}, {"modules_to_save": ["lm_head"]}])
async def test_an_adapter_that_engines_would_refuse_is_refused(
    start: Start, folder: Path, change: dict[str, Any]
) -> None:
    wrong = Path(shutil.copytree(folder, folder.parent / "wrong"))
    (wrong / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | change))
    ingress = await start()
    assert await ingress.ask("load", lora_name="wrong", lora_path=str(wrong)) == 400
    assert await ingress.ask("load", lora_name="wrong", lora_path=str(folder / "nowhere")) == 400
    with pytest.raises(AdapterError, match="fixed"):
        await start(path=wrong)
