"""A prefill and a decode engine, and requests for them.

The contract is the same for the double and for the real engine: `engine_pair` has one of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import popen_fork
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch

from configs.schema import (
    BatonConfig,
    ChannelConfig,
    MockEngineConfig,
    ModelConfig,
    PoolConfig,
    VllmEngineConfig,
)
from deployments.engine.mock.engine import MockEngine
from deployments.engine.protocol import Engine, EngineError, EngineInfo, EngineLoad, Step
from deployments.messages import Bring, Pin, ReplicaInfo, Role

WAIT_S = 120.0
Encode = Callable[[str, Sequence[int], dict[str, Any]], tuple[bytes, ...]]
Outputs = Callable[[list[bytes]], list[tuple[str, list[int], int | None]]]


@dataclass
class Answer:
    """What one engine gave for one request. `reason`: vLLM's code of why it ended."""

    tokens: list[int] = field(default_factory=list)
    reason: int | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    grew: asyncio.Event = field(default_factory=asyncio.Event)


class Running:
    """A started engine, its steps taken by one task, as a replica does."""

    def __init__(self, engine: Engine, info: EngineInfo, encode: Encode, decode_outputs: Outputs) -> None:
        self.engine, self.info = engine, info
        self._encode, self._decode_outputs = encode, decode_outputs
        self.answers: dict[str, Answer] = {}
        self.load = EngineLoad()
        self.most_running = 0
        self.steps: list[Step] = []
        self._nudges = 0
        self._stepped = asyncio.Event()
        self._pump = asyncio.create_task(self._take_steps())

    async def _take_steps(self) -> None:
        while True:
            try:
                step = await self.engine.step()
            except EngineError:
                return
            self.load = step.load
            self.most_running = max(self.most_running, step.load.running)
            self.steps.append(step)
            self._stepped.set()
            if step.outputs:
                frames = self.engine.encode([output.payload for output in step.outputs])
                decoded = self._decode_outputs(frames)
                assert [o.request_id for o in step.outputs] == [request_id for request_id, *_ in decoded]
                for output, (request_id, tokens, reason) in zip(step.outputs, decoded, strict=True):
                    assert output.new_tokens == len(tokens)
                    assert output.finished == (reason is not None)
                    self._note(request_id, tokens, reason)

    def _note(self, request_id: str, tokens: list[int], reason: int | None) -> None:
        answer = self.answers[request_id]
        assert answer.reason is None, "an output after the last"
        answer.tokens += tokens
        answer.reason = reason
        answer.grew.set()
        if reason is not None:
            answer.done.set()

    async def send(self, request_id: str, prompt: Sequence[int], **sampling: Any) -> Answer:
        """Add a request; its answer grows as outputs come."""
        answer = self.answers[request_id] = Answer()
        await self.engine.add(self._encode(request_id, prompt, sampling))
        return answer

    async def generate(self, request_id: str, prompt: Sequence[int], **sampling: Any) -> Answer:
        """Add a request and wait for its end."""
        answer = await self.send(request_id, prompt, **sampling)
        await asyncio.wait_for(answer.done.wait(), WAIT_S)
        return answer

    async def pin(
        self, request_id: str, keep: Sequence[str], pin: Pin | None = None, source: ReplicaInfo | None = None
    ) -> EngineLoad:
        """Pin and unpin prefixes. The load once that is done."""
        answer = self.answers[request_id] = Answer()
        await self.engine.pin(request_id, keep, pin, source)
        await asyncio.wait_for(answer.done.wait(), WAIT_S)
        return self.load

    def frames(self, prompt: Sequence[int]) -> tuple[bytes, ...]:
        """A request with this prompt, encoded."""
        return self._encode("encoded", prompt, {"max_tokens": 9})

    async def bring(self, bring: Bring) -> Answer:
        """Have a prompt brought, and wait for the end."""
        answer = self.answers[bring.id] = Answer()
        await self.engine.bring(bring)
        await asyncio.wait_for(answer.done.wait(), WAIT_S)
        return answer

    def logprobs(self, request_id: str) -> list[float]:
        """Of each token that this engine gave for a request, where that asked for them."""
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder

        given = [output.payload for step in self.steps for output in step.outputs if output.request_id == request_id]
        decoder = MsgpackDecoder(EngineCoreOutputs)
        told = [decoder.decode(self.engine.encode([payload])).outputs[0].new_logprobs for payload in given]
        return [float(row[0]) for each in told if each is not None for row in each.logprobs]

    async def until(self, condition: Callable[[EngineLoad], bool]) -> None:
        """Wait for a step whose load satisfies a condition."""
        async with asyncio.timeout(WAIT_S):
            while not condition(self.load):
                self._stepped.clear()
                await self._stepped.wait()

    async def until_counter(self, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        async with asyncio.timeout(WAIT_S):
            while not condition(counters := await self.engine.counters()):
                await asyncio.sleep(0.002)
        return counters

    async def cached(self, expected: set[int]) -> set[int]:
        """What the engine says that it caches, once that has all that is expected."""
        async with asyncio.timeout(WAIT_S):
            while True:
                whole = self.engine.cache_change(whole=True)
                assert whole is not None
                if expected <= set(whole.stored):
                    return set(whole.stored)
                await asyncio.sleep(0.01)

    async def settle(self) -> None:
        """Wait until nothing runs, no handoff is open and no block is held.

        An idle engine need not report that blocks came free: a short request of our own makes it step.
        """
        async with asyncio.timeout(WAIT_S):
            while True:
                counters = await self.engine.counters()
                if not counters["open_receiving"] and not counters["open_writing"]:
                    self._nudges += 1
                    await self.generate(f"nudge-{self._nudges}", [1, 2, 3], max_tokens=1)
                    load = self.load
                    if (load.used_blocks, load.running, load.waiting) == (0, 0, 0):
                        return
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.engine.shutdown()
        await asyncio.wait_for(self._pump, WAIT_S)


@dataclass
class EnginePair:
    """`block_bytes`: bytes of one KV block in all layers. `kill_prefill` ends the prefill engine at once."""

    prefill: Running
    decode: Running
    block_bytes: int
    kill_prefill: Callable[[], Awaitable[None]]
    counts_tokens: bool = True
    caches_prefixes: bool = False
    _sessions: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(11))

    @property
    def block_size(self) -> int:
        return self.decode.info.block_size

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that was not there before."""
        return [self._random.randint(100, 40_000) for _ in range(tokens)]

    def part(self, role: Role, session: str, epoch: int = 1, answered: Sequence[int] = ()) -> dict[str, Any]:
        """The sampling parameters that give a request its part in a handoff."""
        peer = self.decode if role is Role.PREFILL else self.prefill
        baton = {"role": role.value, "session": session, "epoch": epoch, "peers": list(peer.info.endpoints)}
        return {"extra_args": {"kv_transfer_params": {"baton": baton}, "baton_answered": list(answered)}}

    async def begin(
        self, prompt: Sequence[int], max_tokens: int, answered: Sequence[int] = (), **sampling: Any
    ) -> tuple[str, Answer, Answer]:
        """Start a disaggregated request, decode first: its session, and both engines' answers.

        `answered`: tokens of its answer that came from elsewhere; `max_tokens` counts them.
        """
        self._sessions += 1
        session = f"session-{self._sessions}"
        whole = {**sampling, **self.part(Role.DECODE, session, answered=answered), "max_tokens": max_tokens}
        first = {**sampling, **self.part(Role.PREFILL, session, answered=answered), "max_tokens": len(answered) + 1}
        first["min_tokens"] = min(first["max_tokens"], first.get("min_tokens", 0))
        decoded = await self.decode.send(session, prompt, **whole)
        prefilled = await self.prefill.send(session, prompt, **first)
        return session, prefilled, decoded

    async def disaggregated(
        self, prompt: Sequence[int], max_tokens: int, answered: Sequence[int] = (), **sampling: Any
    ) -> list[int]:
        """The tokens of a disaggregated request."""
        _, prefilled, decoded = await self.begin(prompt, max_tokens, answered, **sampling)
        await asyncio.wait_for(decoded.done.wait(), WAIT_S)
        await asyncio.wait_for(prefilled.done.wait(), WAIT_S)
        assert (prefilled.reason, decoded.reason) == (1, 1)
        return prefilled.tokens + decoded.tokens


def encode_plain(request_id: str, prompt: Sequence[int], sampling: dict[str, Any]) -> tuple[bytes, ...]:
    """An EngineCoreRequest as vLLM encodes it; test_mock_wire.py proves that."""
    sampling = {"ignore_eos": True, "temperature": 0.0, **sampling}
    request = [request_id, list(prompt), None, sampling, None, 0.0, None, None, None]
    return (msgspec.msgpack.encode(request),)


def decode_plain(frames: list[bytes]) -> list[tuple[str, list[int], int | None]]:
    """Request id, tokens and finish reason of every output in an EngineCoreOutputs message."""
    outputs = msgspec.msgpack.decode(frames[0])[1]
    return [(output[0], output[1], output[5] if len(output) > 5 else None) for output in outputs]


MOCK = MockEngineConfig(
    block_size=4, num_blocks=256, max_num_seqs=32, max_num_batched_tokens=16, num_layers=3, step_s=0.001
)


def mock_engine(role: Role, config: MockEngineConfig = MOCK, **options: Any) -> MockEngine:
    settings = {
        "replica_id": f"{role}-0",
        "fingerprint": "mock",
        "secret": "a secret of the tests",
        "host": "127.0.0.1",
        "handoff_timeout_s": 20.0,
        "max_model_len": 512,
    }
    return MockEngine(config, **{**settings, **options})


async def start_plain(engine: MockEngine) -> Running:
    return Running(engine, await engine.start(), encode_plain, decode_plain)


@contextlib.asynccontextmanager
async def mock_pair(config: MockEngineConfig = MOCK, **options: Any) -> AsyncIterator[EnginePair]:
    prefill = await start_plain(mock_engine(Role.PREFILL, config, **options))
    decode = await start_plain(mock_engine(Role.DECODE, _for_decode(config), **options))
    block_bytes = config.num_layers * config.block_size * 8
    try:
        yield EnginePair(prefill, decode, block_bytes, prefill.engine.shutdown)
    finally:
        await decode.close()
        await prefill.close()


def _for_decode(config: MockEngineConfig) -> MockEngineConfig:
    """Decode has another number of blocks, as pools may differ in memory."""
    return config.model_copy(update={"num_blocks": config.num_blocks + 16})


VLLM = VllmEngineConfig(kv_cache_memory_bytes=256 << 20, max_num_seqs=32, max_num_batched_tokens=256)
LAYERS, HEADS, HEAD_DIM = 4, 3, 64
VLLM_BLOCK_BYTES = LAYERS * VLLM.block_size * HEADS * HEAD_DIM * 2 * 4  # keys and values, float32


def small_model(path: Path) -> Path:
    """A model of random weights with the real one's tokenizer: a tenth of its work, and any change of the KV cache
    changes the answer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from deployments.checkpoint.prepare import DEFAULT_CACHE_DIR, resolve

    real = Path(resolve("bundled:smollm2-135m-instruct", DEFAULT_CACHE_DIR))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        num_hidden_layers=LAYERS,
        intermediate_size=384,
        vocab_size=LlamaConfig.from_pretrained(real).vocab_size,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for file in real.glob("*token*.json"):
        shutil.copy(file, path)
    return path


@contextlib.asynccontextmanager
async def vllm_pair(model: Path) -> AsyncIterator[EnginePair]:
    """Two real engine cores, prefill and decode, each in a process of its own; no Ray."""
    prefill, decode = await asyncio.gather(*(_start_vllm(role, model) for role in (Role.PREFILL, Role.DECODE)))
    try:
        yield EnginePair(prefill, decode, VLLM_BLOCK_BYTES, prefill.engine.shutdown, caches_prefixes=True)
    finally:
        await decode.close()
        await prefill.close()


async def _start_vllm(role: Role, path: Path, config: VllmEngineConfig = VLLM) -> Running:
    from deployments.engine.build import environment
    from tests.deployments.engine.vllm.vllm_wire import decode_outputs, encode

    pool, model = PoolConfig(engine=VLLM), ModelConfig(source=str(path), dtype="float32")
    os.environ.update(environment(BatonConfig(model=model, prefill=pool, decode={"main": pool}), "prefill"))
    from deployments.engine.vllm.engine import VllmEngine

    engine = VllmEngine(
        config,
        model,
        ChannelConfig(handoff_timeout_s=60),
        model_path=str(path),
        role=role,
        replica_id=f"{role}-0",
        secret="a secret of the tests",
        host="127.0.0.1",
    )
    return Running(engine, await engine.start(), encode, decode_outputs)


def one_at_a_time(launch: Callable[..., None]) -> Callable[..., None]:
    """Of two processes that are forked at once, one would hold the pipe that tells of the other one's end."""
    locks = [threading.Lock()]
    os.register_at_fork(after_in_child=lambda: locks.__setitem__(0, threading.Lock()))

    def alone(popen: object, process: object) -> None:
        with locks[0]:
            launch(popen, process)

    return alone


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Engines are forked: on CPU vLLM spawns, and each process then imports vLLM anew, 12 s of a core.

    They inherit torch's threads, which a new process takes from OMP_NUM_THREADS: one, as engines share the cores.
    """
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(popen_fork.Popen, "_launch", one_at_a_time(vars(popen_fork.Popen)["_launch"]))
        for module in (utils, multiproc_executor):
            patch.setattr(module, "get_mp_context", lambda: multiprocessing.get_context("fork"))
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def forked() -> Iterator[None]:
    """See `forking`."""
    with forking():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real_pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Callable[[], Awaitable[EnginePair]]]:
    """The pair that is too dear to start for every test: started at the first call, one for the module."""
    async with contextlib.AsyncExitStack() as stack:
        pairs: list[EnginePair] = []

        async def get() -> EnginePair:
            if not pairs:
                model = small_model(tmp_path_factory.mktemp("model"))
                pairs.append(await stack.enter_async_context(vllm_pair(model)))
            return pairs[0]

        yield get


@pytest.fixture
def make_mock() -> Callable[..., MockEngine]:
    """`make_mock(role, config, **options)`: an engine that is not started."""
    return mock_engine


@pytest.fixture
def make_pair() -> Callable[..., contextlib.AbstractAsyncContextManager[EnginePair]]:
    """`make_pair(config, **options)`: a pair of mock engines other than the contract's."""
    return mock_pair


@pytest.fixture
def start() -> Callable[[MockEngine], Awaitable[Running]]:
    return start_plain


@pytest.fixture
def start_vllm() -> Callable[..., Awaitable[Running]]:
    """`start_vllm(role, path, config)`: a real engine core, which the test closes."""
    return _start_vllm


KINDS = [
    pytest.param("mock", id="mock"),
    pytest.param("vllm", id="vllm", marks=[pytest.mark.engine, pytest.mark.timeout(600)]),
]


@pytest_asyncio.fixture(params=KINDS, loop_scope="module")
async def engine_pair(
    request: pytest.FixtureRequest, real_pair: Callable[[], Awaitable[EnginePair]]
) -> AsyncIterator[EnginePair]:
    """A started pair of every kind: a mock pair of the test's own, which must leave nothing, or the real one."""
    if request.param == "mock":
        request.getfixturevalue("no_leaks")
        async with mock_pair() as pair:
            yield pair
    else:
        yield await real_pair()
