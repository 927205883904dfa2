"""An engine's adapters are loaded before the requests that need them, and those that are needed stay."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.checkpoint.adapter import CONFIG, adapter_id, digits
from deployments.engine.protocol import RequestRefused
from deployments.engine.vllm.adapters import Adapters


class Client:
    """Stands for the client of an engine core. `error`: what the next load raises. `may_load`: loads wait for it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.error: Exception | None = None
        self.asked, self.may_load = asyncio.Event(), asyncio.Event()
        self.may_load.set()

    async def add_lora_async(self, adapter: LoRARequest) -> bool:
        self.asked.set()
        await asyncio.shield(asyncio.ensure_future(self._load(adapter)))
        return True

    async def _load(self, adapter: LoRARequest) -> None:
        """The engine's part, which goes on though its caller is gone."""
        await self.may_load.wait()
        if self.error is not None:
            raise self.error
        self.calls.append(("load", adapter.lora_int_id))

    async def remove_lora_async(self, number: int) -> bool:
        self.calls.append(("unload", number))
        return True


class Bench:
    def __init__(self, folder: Path, capacity: int) -> None:
        self._folder, self.adapters, self.client = folder, Adapters(capacity), Client()

    def adapter(self, name: str) -> LoRARequest:
        path = self._folder / name
        path.mkdir(exist_ok=True)
        (path / CONFIG).write_text(name)
        (path / "adapter_model.safetensors").write_text(name)
        return LoRARequest(name, adapter_id(str(path)), str(path))

    async def begin(self, request_id: str, adapter: LoRARequest | None) -> None:
        params = SamplingParams(max_tokens=7)
        request = EngineCoreRequest(request_id, [1], None, params, None, 0.0, adapter, None, None)
        await self.adapters.load(cast(AsyncMPClient, cast(Any, self.client)), request)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, 2)


async def test_an_adapter_is_loaded_once_and_reported(bench: Bench) -> None:
    a = bench.adapter("a")
    await bench.begin("plain", None)
    assert not bench.adapters.held.ids
    await asyncio.gather(*(bench.begin(each, a) for each in "123"))
    assert bench.client.calls == [("load", a.lora_int_id)]
    assert bench.adapters.held.ids == (digits(a.lora_int_id),)
    assert bench.adapters.held.load_s > 0


async def test_what_no_request_needs_makes_room_the_oldest_first(bench: Bench) -> None:
    a, b, c, d = map(bench.adapter, "abcd")
    await bench.begin("1", a)
    await bench.begin("2", b)
    await bench.begin("3", a)
    bench.adapters.over(["2", "1"])
    await bench.begin("4", c)
    assert bench.client.calls[-2:] == [("unload", b.lora_int_id), ("load", c.lora_int_id)]
    bench.adapters.over(["3", "4"])
    await bench.begin("5", d)
    assert ("unload", a.lora_int_id) in bench.client.calls
    assert set(bench.adapters.held.ids) == {digits(c.lora_int_id), digits(d.lora_int_id)}


async def test_what_requests_need_is_not_unloaded(bench: Bench) -> None:
    for request_id in "abc":
        await bench.begin(request_id, bench.adapter(request_id))
    assert [what for what, _ in bench.client.calls] == ["load"] * 3
    assert len(bench.adapters.held.ids) == 2, "vLLM unloads one by itself"


async def test_an_adapter_that_cannot_be_loaded_refuses_its_request_alone(bench: Bench) -> None:
    a, b = map(bench.adapter, "ab")
    bench.client.error = Exception("Call to add_lora method failed: rank 512")
    with pytest.raises(RequestRefused, match="rank 512"):
        await bench.begin("1", a)
    bench.client.error = None
    shutil.rmtree(b.lora_path)
    with pytest.raises(RequestRefused, match="cannot be loaded"):
        await bench.begin("2", b)
    assert bench.adapters.held.ids == ()
    await bench.begin("3", a)


async def test_other_files_under_the_same_path_are_refused(bench: Bench) -> None:
    a = bench.adapter("a")
    (Path(a.lora_path) / CONFIG).write_text("changed")
    with pytest.raises(RequestRefused, match="others on this node"):
        await bench.begin("1", a)


async def test_a_dead_engine_is_no_fault_of_the_request(bench: Bench) -> None:
    bench.client.error = EngineDeadError()
    with pytest.raises(EngineDeadError):
        await bench.begin("1", bench.adapter("a"))


async def test_an_engine_without_adapters_refuses_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 0)
    with pytest.raises(RequestRefused, match="serves no LoRA"):
        await bench.begin("1", bench.adapter("a"))


@pytest.mark.parametrize("method", ["add_lora_async", "remove_lora_async"])
def test_vllms_client_has_these_calls(method: str) -> None:
    assert asyncio.iscoroutinefunction(getattr(AsyncMPClient, method))


@pytest.mark.parametrize("cancellations", [1, 2])
async def test_an_adapter_whose_request_is_cancelled_during_the_load_counts(bench: Bench, cancellations: int) -> None:
    a, b, c = map(bench.adapter, "abc")
    bench.client.may_load.clear()
    first = asyncio.ensure_future(bench.begin("1", a))
    await bench.client.asked.wait()
    for _ in range(cancellations):
        first.cancel()
        await asyncio.sleep(0)  # the cancellation reaches the task
    bench.client.may_load.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    for number, adapter in (("2", a), ("3", b), ("4", c)):
        await bench.begin(number, adapter)
        bench.adapters.over([number])
    loads, unloads = ([number for what, number in bench.client.calls if what == kind] for kind in ("load", "unload"))
    assert loads == [each.lora_int_id for each in (a, b, c)], "each once"
    assert unloads == [a.lora_int_id], "the third has no room beside the two"
    assert set(bench.adapters.held.ids) == {digits(b.lora_int_id), digits(c.lora_int_id)}


async def test_a_load_that_fails_after_its_request_was_cancelled_is_tried_again(bench: Bench) -> None:
    a = bench.adapter("a")
    bench.client.may_load.clear()
    bench.client.error = Exception("no memory")
    first = asyncio.ensure_future(bench.begin("1", a))
    await bench.client.asked.wait()
    first.cancel()
    await asyncio.sleep(0)
    bench.client.may_load.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    bench.client.error = None
    await bench.begin("2", a)
    assert bench.client.calls == [("load", a.lora_int_id)]
