"""One engine core alone, and the time of its steps by their content."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

from configs.schema import BatonConfig
from deployments.engine.protocol import EngineInfo
from deployments.messages import StepSample
from load_tests.harness.engines.pair import Core
from load_tests.harness.engines.several import several
from load_tests.report.handoffs import median
from load_tests.traffic.workloads import prompt

STEPS_COUNTED, STEPS_SKIPPED = 12, 2
STEP_TIMEOUT_S = 600.0
POLL_S = 0.005
ID = "tune"


class SoloError(Exception):
    """The engine does not do what it is asked to do. The message says what it did."""


class Solo:
    """Asks one engine for steps with a known content. Prompts are random, so no cache has them.

    `step_timeout_s`: the longest wait for the steps that are asked for.
    """

    def __init__(self, core: Core, seed: int, step_timeout_s: float = STEP_TIMEOUT_S) -> None:
        self._core, self._rng, self._timeout_s = core, random.Random(seed), step_timeout_s
        self._running: list[str] = []
        self._asked = 0

    @property
    def info(self) -> EngineInfo:
        return self._core.info

    async def chunked(self, chunk: int, prompt_tokens: int) -> list[float]:
        """Seconds of each step in which a new prompt is computed `chunk` tokens at a time.

        The engine itself takes larger chunks. So it is asked for longer and longer beginnings of the prompt. Its prefix
        cache has all of each beginning except the last `chunk` tokens. `chunk` must be a whole number of blocks. Raises
        SoloError.
        """
        tokens, found = prompt(self._rng, prompt_tokens), []
        for end in range(chunk, prompt_tokens + 1, chunk):
            self._core.samples.clear()
            await self._core.answer(await self._ask(tokens[:end], 1))
            steps = [step for step in self._core.samples if step.prefill_tokens]
            if [step.prefill_tokens for step in steps] != [chunk]:
                raise SoloError(f"asked for one step of {chunk} prompt tokens, the engine made {steps}")
            found.append(steps[0].seconds)
        return found

    async def decoding(self, sequences: int, prompt_tokens: int) -> float:
        """Median seconds of a step in which `sequences` sequences decode. They continue afterwards."""
        while len(self._running) < sequences:
            limit = self.info.max_model_len - prompt_tokens
            self._running.append(await self._ask(prompt(self._rng, prompt_tokens), limit))
        self._core.samples.clear()
        steps = await self._until(lambda step: _is(step, sequences, 0), STEPS_SKIPPED + STEPS_COUNTED)
        return median([step.seconds for step in steps[STEPS_SKIPPED:]])

    async def beside(self, chunk: int) -> float:
        """Seconds of a step that computes `chunk` prompt tokens while all running sequences decode."""
        self._core.samples.clear()
        asked = await self._ask(prompt(self._rng, chunk), 1)
        steps = await self._until(lambda step: _is(step, len(self._running), chunk), 1)
        await self._core.answer(asked)
        return steps[0].seconds

    async def keep_decoding(self, sequences: int) -> None:
        """Keep `sequences` of the sequences that decode, and end the others."""
        self._running, ended = self._running[:sequences], self._running[sequences:]
        await self._core.engine.abort(ended)

    async def _ask(self, tokens: tuple[int, ...], max_tokens: int) -> str:
        self._asked += 1
        request_id = f"{ID}-{self._asked}"
        await self._core.add(request_id, tokens, max_tokens)
        return request_id

    async def _until(self, wanted: Callable[[StepSample], bool], count: int) -> list[StepSample]:
        """The first `count` steps of the wanted kind. Raises SoloError when they do not come."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while len(found := [step for step in self._core.samples if wanted(step)]) < count:
                    self._core.check()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise SoloError(f"the steps wanted did not come; the last ones: {list(self._core.samples)[-3:]}") from None
        return found[:count]


def _is(step: StepSample, sequences: int, prefill_tokens: int) -> bool:
    return step.decode_sequences == sequences and step.prefill_tokens == prefill_tokens


@contextlib.asynccontextmanager
async def solo(config: BatonConfig, pool: str, seed: int) -> AsyncIterator[Solo]:
    """Start the engine of one pool, and end it with all its processes. Raises EngineError."""
    async with several(config, {ID: pool}) as cores:
        yield Solo(cores[ID], seed)
