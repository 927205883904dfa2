"""Two engine cores, prefill and decode, and one handoff between them at a time."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deployments.engine.protocol import Engine, EngineInfo, Output
from deployments.messages import StepSample
from load_tests.harness.engines.nixl_engine import NixlEngine
from load_tests.harness.processes import cpu_s
from load_tests.report.handoffs import Event

ANSWER_TIMEOUT_S = 300.0
SAMPLES_KEPT = 1000
TRACE_DELAY_S = 0.05  # nothing waits for the other side, which may still have a line to write
HOST = "localhost"


@dataclass
class Answer:
    """An engine's answer to a request. Times are of `time.monotonic()`; the engine itself gives `scheduled_s`."""

    scheduled_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prefill_s(self) -> float:
        """Seconds from the scheduling of the first chunk to the arrival of the first token here."""
        return self.times_s[0] - self.scheduled_s

    @property
    def step_s(self) -> float:
        """Mean seconds between two tokens."""
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)


class Core:
    """A started engine core; one task takes its steps. `samples`: the engine's newest step samples."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self.engine, self.info = engine, info
        self.samples: deque[StepSample] = deque(maxlen=SAMPLES_KEPT)
        self._answers: dict[str, Answer] = {}
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self._steps = asyncio.create_task(self._take_steps())

    async def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        max_tokens: int,
        transfer: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a request. `transfer`: its kv_transfer_params. `extra`: more of its `extra_args`."""
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        sampling.extra_args = dict(extra or {}) | ({} if transfer is None else {"kv_transfer_params": transfer})
        request = EngineCoreRequest(request_id, list(tokens), None, sampling, None, time.time(), None, None, None)
        self._answers[request_id] = Answer()
        await self.engine.add(tuple(bytes(frame) for frame in self._encoder.encode(request)))

    async def answer(self, request_id: str) -> Answer:
        """Wait for the whole answer of the request. Raises EngineError or TimeoutError."""
        answer = self._answers[request_id]
        ended = asyncio.create_task(answer.ended.wait())
        try:
            await asyncio.wait({ended, self._steps}, timeout=ANSWER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            if not ended.done():
                raise TimeoutError(f"{request_id} had no answer in {ANSWER_TIMEOUT_S:.0f} s")
        finally:
            ended.cancel()
        return self._answers.pop(request_id)

    def check(self) -> None:
        """Raises EngineError when the engine is dead."""
        if self._steps.done():
            self._steps.result()

    async def close(self) -> None:
        """End the engine."""
        self._steps.cancel()
        await asyncio.gather(self._steps, return_exceptions=True)
        await self.engine.shutdown()

    async def _take_steps(self) -> None:
        while True:
            step = await self.engine.step()
            now = time.monotonic()
            self.samples += step.steps
            for output in self._decoded(step.outputs):
                if answer := self._answers.get(output.request_id):
                    _take(answer, output, now)

    def _decoded(self, outputs: Sequence[Output]) -> Sequence[EngineCoreOutput]:
        """As an ingress gets them."""
        if not outputs:
            return ()
        message = self._decoder.decode(self.engine.encode([output.payload for output in outputs]))
        decoded: Sequence[EngineCoreOutput] = message.outputs
        return decoded


def _take(answer: Answer, output: EngineCoreOutput, now: float) -> None:
    for event in output.events or ():
        if event.type == EngineCoreEventType.SCHEDULED and not answer.scheduled_s:
            answer.scheduled_s = event.timestamp
    answer.times_s += [now] * len(output.new_token_ids)
    answer.tokens += output.new_token_ids
    answer.kv_transfer_params = output.kv_transfer_params or answer.kv_transfer_params
    if output.finished:
        answer.ended.set()


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was served. Times are those at which tokens arrived here.

    `handoff_s`: from prefill's token to decode's first own token. `step_s`: the mean time between decode's tokens after
    that.
    """

    request_id: str
    tokens: list[int]
    prefill_s: float
    handoff_s: float
    step_s: float
    cpu_s: float
    events: list[Event]


class Pair(ABC):
    """A prefill and a decode core. `pids`: their processes. `trace_dir`: the folder of both timelines."""

    def __init__(self, name: str, prefill: Core, decode: Core, pids: set[int], trace_dir: Path) -> None:
        self.name, self.prefill, self.decode, self.pids = name, prefill, decode, pids
        self._trace_dir, self._read_to = trace_dir, dict[Path, int]()

    @abstractmethod
    async def _hand_over(self, request_id: str, prompt: Sequence[int], own_tokens: int) -> tuple[Answer, Answer]:
        """Prefill on one core, and `own_tokens` more tokens on the other. Returns both answers."""

    async def serve(self, request_id: str, prompt: Sequence[int], own_tokens: int) -> Served:
        """Serve one request split, and return its times."""
        self._new_events()
        before_s = cpu_s(self.pids)
        first, rest = await self._hand_over(request_id, prompt, own_tokens)
        used_s = cpu_s(self.pids) - before_s
        await asyncio.sleep(TRACE_DELAY_S)
        return Served(
            request_id,
            first.tokens + rest.tokens,
            first.prefill_s,
            rest.times_s[0] - first.times_s[0],
            rest.step_s,
            used_s,
            [*self._new_events()],
        )

    async def serve_alone(self, request_id: str, prompt: Sequence[int], own_tokens: int) -> Served:
        """Serve one request on the prefill core alone: the cost of the same work without a transfer."""
        before_s = cpu_s(self.pids)
        await self.prefill.add(request_id, prompt, own_tokens + 1)
        answer = await self.prefill.answer(request_id)
        used_s = cpu_s(self.pids) - before_s
        return Served(request_id, answer.tokens, answer.prefill_s, 0.0, answer.step_s, used_s, [])

    async def close(self) -> None:
        """End both engines."""
        await asyncio.gather(self.prefill.close(), self.decode.close())

    def _new_events(self) -> Iterator[Event]:
        for path in self._trace_dir.glob("*.jsonl"):
            with path.open() as file:
                file.seek(self._read_to.get(path, 0))
                text = file.read()
                whole = text[: text.rfind("\n") + 1]
                self._read_to[path] = self._read_to.get(path, 0) + len(whole.encode())
            yield from (json.loads(line) for line in whole.splitlines())


class BatonPair(Pair):
    """Baton's connector. The calls come in the cluster core's order: decode, then prefill."""

    async def _hand_over(self, request_id: str, prompt: Sequence[int], own_tokens: int) -> tuple[Answer, Answer]:
        part = {"session": request_id, "epoch": 1}
        decode = part | {"role": "decode", "peers": list(self.prefill.info.endpoints)}
        prefill = part | {"role": "prefill", "peers": list(self.decode.info.endpoints)}
        await self.decode.add(request_id, prompt, 1 + own_tokens, {"baton": decode})
        await self.prefill.add(request_id, prompt, 1, {"baton": prefill})
        return await self.prefill.answer(request_id), await self.decode.answer(request_id)


class PullPair(Pair):
    """vLLM's NixlPullConnector, called as vLLM's proxies call it: decode's request carries prefill's answer."""

    async def _hand_over(self, request_id: str, prompt: Sequence[int], own_tokens: int) -> tuple[Answer, Answer]:
        await self.prefill.add(request_id, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        first = await self.prefill.answer(request_id)
        await self.decode.add(request_id, prompt, own_tokens, first.kv_transfer_params)
        return first, await self.decode.answer(request_id)


class PushPair(Pair):
    """vLLM's NixlPushConnector in its fastest order: decode registers its blocks before the prefill is over."""

    async def _hand_over(self, request_id: str, prompt: Sequence[int], own_tokens: int) -> tuple[Answer, Answer]:
        engine = self.prefill.engine
        assert isinstance(engine, NixlEngine)
        source = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engine.name,
            "remote_request_id": request_id,
            "remote_host": HOST,
            "remote_port": engine.port,
            "tp_size": 1,
        }
        await self.decode.add(request_id, prompt, own_tokens, source)
        await self.prefill.add(request_id, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        return await self.prefill.answer(request_id), await self.decode.answer(request_id)
