"""A handoff through both sides of the connector of a prefill and a decode engine, without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus

from transfer.memory.in_process_plane import InProcessPlane
from transfer.vllm import worker_side
from transfer.vllm.scheduler_side import SchedulerSide
from transfer.vllm.worker_side import WorkerSide

BLOCK_SIZE, BLOCKS, LAYERS = 4, 16, 2
PROMPT = [11, 12, 13, 14, 15, 16]
SOURCE, TARGET = [3, 5], [9, 2]
EXTRA: dict[str, Any] = {
    "facts": {},
    "replica_id": "r",
    "backend": "",
    "transports": None,
    "secret": "secret",
    "host": "127.0.0.1",
    "handoff_timeout_s": 60.0,
    "trace_dir": None,
    "limits": {},
    "tiers": None,
}
CONFIG: Any = SimpleNamespace(
    use_v2_model_runner=True,
    cache_config=SimpleNamespace(block_size=BLOCK_SIZE),
    parallel_config=SimpleNamespace(world_size=1, pipeline_parallel_size=1),
    model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 1, get_total_num_hidden_layers=lambda: LAYERS),
)


class MadeBy(Scheduler):
    """The connector looks for the scheduler that makes it."""

    def __init__(self) -> None:
        self.side = SchedulerSide("secret", BLOCK_SIZE, lambda: None)
        self.structured_output_manager: Any = SimpleNamespace(accept_tokens=lambda *_: True)


class Engine:
    """What vLLM would call of a connector's two sides. `blocks`: those of its only request."""

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.scheduler, self.worker = MadeBy().side, WorkerSide(CONFIG, EXTRA)
        self.caches = {f"layer {layer}": torch.zeros(BLOCKS, 1, BLOCK_SIZE, 8) for layer in range(LAYERS)}
        self.worker.register(self.caches)
        manager: Any = SimpleNamespace(
            block_pool=BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=BLOCK_SIZE),
            coordinator=SimpleNamespace(single_type_managers=[None]),
            get_computed_blocks=None,
            allocate_slots=None,
            get_block_ids=lambda request_id: (self.blocks,),
        )
        self.scheduler.bind(manager)

    @property
    def address(self) -> str:
        return self.worker.channel.address

    def allocate(self, request: Request, external_tokens: int) -> None:
        blocks: Any = SimpleNamespace(get_block_ids=lambda: (self.blocks,))
        self.scheduler.allocated(request, blocks, external_tokens)

    def step(self, computes: dict[str, int]) -> None:
        """One engine step: `computes` tokens by request id."""
        scheduled: Any = SimpleNamespace(
            preempted_req_ids=None,
            num_scheduled_tokens=computes,
            total_num_scheduled_tokens=sum(computes.values()),
            finished_req_ids=set(),
            scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0) for name in computes],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        )
        self.worker.begin_step(self.scheduler.metadata(scheduled))
        for name, cache in self.caches.items():
            self.worker.layer_saved(name, cache)
        self.worker.channel.end_step()

    def until(self, reported: Callable[[Any], bool]) -> Any:
        """Take results until they are what is waited for, and bring what the workers say to the scheduler."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            results = self.worker.results()
            output: Any = SimpleNamespace(
                kv_connector_worker_meta=self.worker.metadata(), finished_recving=results.finished_recving
            )
            self.scheduler.take(output)
            if reported(results):
                return results
            time.sleep(0.001)
        raise AssertionError("it was not reported")

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Engine]]:
    monkeypatch.setattr(worker_side, "NixlPlane", lambda name, *_: InProcessPlane(name))
    monkeypatch.setattr(worker_side, "_rank", lambda: 0)
    pair = Engine(SOURCE), Engine(TARGET)
    yield pair
    for engine in pair:
        engine.close()


def a_request(role: str, peer: Engine) -> Request:
    baton = {"role": role, "session": "s", "epoch": 1, "peers": [peer.address]}
    params = SamplingParams(max_tokens=9, extra_args={"kv_transfer_params": {"baton": baton}})
    return Request.from_engine_core_request(
        EngineCoreRequest(role, PROMPT, None, params, None, 0.0, None, None, None), None
    )


def test_kv_and_first_token_reach_decode_and_prefills_blocks_are_released(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    here, there = a_request("prefill", decode), a_request("decode", prefill)
    assert decode.scheduler.matched_tokens(there, 0) == (len(PROMPT), True), "all of its KV comes later"
    decode.allocate(there, len(PROMPT))
    decode.step({})

    for layer, cache in enumerate(prefill.caches.values()):
        cache[SOURCE] = torch.randn(len(SOURCE), 1, BLOCK_SIZE, 8, generator=torch.Generator().manual_seed(layer))
    assert prefill.scheduler.matched_tokens(here, 0) == (0, False)
    prefill.allocate(here, 0)
    prefill.step({"prefill": len(PROMPT)})
    here.append_output_token_ids(77)
    here.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert prefill.scheduler.finished(here), "its blocks are read until it is reported"
    prefill.step({"another": 1})

    assert not decode.until(lambda results: "decode" in results.finished_recving).failed_recving
    assert list(there.output_token_ids) == [77]
    for mine, theirs in zip(prefill.caches.values(), decode.caches.values(), strict=True):
        assert torch.equal(mine[SOURCE], theirs[TARGET])
    prefill.until(lambda results: "prefill" in results.finished_sending)


def test_an_aborted_decode_request_is_reported_as_failed(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    there = a_request("decode", prefill)
    decode.allocate(there, len(PROMPT))
    decode.step({})
    there.status = RequestStatus.FINISHED_ABORTED
    assert not decode.scheduler.finished(there)
    decode.step({"another": 1})
    results = decode.until(lambda results: "decode" in results.finished_recving)
    assert results.failed_recving == {"decode"}
