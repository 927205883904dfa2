"""What `make tune` finds, on an engine whose steps take what a formula says."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.serial_utils import MsgpackEncoder

from configs.schema import BatonConfig, VllmEngineConfig
from deployments.engine.mock.wire import decode_request
from deployments.engine.protocol import Engine, EngineError, EngineInfo, EngineLoad, Output, Step
from deployments.messages import StepSample
from load_tests.harness.engines import several
from load_tests.harness.engines import solo as solo_module
from load_tests.harness.engines.pair import Core
from load_tests.harness.engines.solo import Solo, SoloError
from load_tests.tune import tune
from load_tests.tune.choices import Chunk, Load, chunk_of, decode_chunk, most_sequences, prefill_chunk

ROOT = Path(__file__).resolve().parents[3]
BLOCK, BUDGET = 128, 2048
ENDLESS = 1 << 40  # tokens of a sequence: steps take no time here, so many pass between two looks


class FormulaEngine:
    """Takes 20 ms a step, 5 ms a sequence and 0.5 ms a prompt token, by its own account; has a prefix cache."""

    def __init__(self, threads: int = 1, total_blocks: int = 200, caches: bool = True) -> None:
        self._threads, self._caches = threads, caches
        self.info = EngineInfo("f", BLOCK, total_blocks, 64, ENDLESS, (), BUDGET, 1000)
        self._requests: dict[str, list[int]] = {}  # tokens, computed, answered, limit
        self._cached: set[tuple[int, ...]] = set()
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._has_work = asyncio.Event()
        self.is_dead = False

    async def start(self) -> EngineInfo:
        return self.info

    async def add(self, frames: tuple[bytes, ...]) -> None:
        request = decode_request(frames)
        prompt = tuple(request.prompt_token_ids)
        cached = [end for end in range(BLOCK, len(prompt), BLOCK) if prompt[:end] in self._cached]
        self._prompts[request.request_id] = prompt
        limit = request.sampling_params.max_tokens
        assert limit is not None
        self._requests[request.request_id] = [len(prompt), max(cached, default=0), 0, limit]
        self._has_work.set()

    async def abort(self, request_ids: list[str]) -> None:
        for each in request_ids:
            self._requests.pop(each, None)

    async def step(self) -> Step:
        while not self._requests:
            self._has_work.clear()
            await self._has_work.wait()
        await asyncio.sleep(0.0005)
        if self.is_dead:
            raise EngineError("the engine died")
        decoding = [each for each, (tokens, computed, *_) in self._requests.items() if computed == tokens]
        room, prefilled, outputs = BUDGET - len(decoding), 0, list[Output]()
        for name, state in list(self._requests.items()):
            computed = min(room, state[0] - state[1])
            state[1], room, prefilled = state[1] + computed, room - computed, prefilled + computed
            if state[1] == state[0]:
                outputs.append(self._token(name, state))
        seconds = (0.02 + 0.005 * len(decoding) + 0.0005 * prefilled) / self._threads
        return Step(tuple(outputs), EngineLoad(), (StepSample(seconds, prefilled, 0, len(decoding), 0),))

    def _token(self, name: str, state: list[int]) -> Output:
        state[2] += 1
        if self._caches:
            prompt = self._prompts[name]
            self._cached |= {prompt[:end] for end in range(BLOCK, len(prompt) + 1, BLOCK)}
        ended = state[2] == state[3]
        if ended:
            del self._requests[name]
        payload = EngineCoreOutput(name, [7], finish_reason=FinishReason.LENGTH if ended else None)
        return Output(name, 1, ended, payload)

    def encode(self, payloads: list[Any]) -> list[bytes]:
        return [bytes(frame) for frame in MsgpackEncoder().encode(EngineCoreOutputs(outputs=payloads))]

    async def shutdown(self) -> None:
        self._requests.clear()


@contextlib.asynccontextmanager
async def alone(engine: FormulaEngine, **options: Any) -> AsyncIterator[Solo]:
    core = Core(cast(Engine, engine), await engine.start())
    try:
        yield Solo(core, seed=1, **options)
    finally:
        await core.close()


async def test_a_prompt_is_computed_in_chunks_of_the_size_asked_for(no_leaks: None) -> None:
    async with alone(FormulaEngine()) as engine:
        assert await engine.chunked(256, 1024) == pytest.approx([0.148] * 4)
        assert await engine.chunked(1024, 1024) == pytest.approx([0.532])


async def test_an_engine_that_computes_something_else_is_told_of() -> None:
    async with alone(FormulaEngine(caches=False)) as engine:
        with pytest.raises(SoloError, match="asked for one step of 256 prompt tokens"):
            await engine.chunked(256, 512)


async def test_steps_are_those_of_so_many_sequences_and_no_others() -> None:
    async with alone(FormulaEngine()) as engine:
        assert await engine.decoding(1, 256) == pytest.approx(0.025)
        assert await engine.decoding(8, 256) == pytest.approx(0.06)
        assert await engine.beside(512) == pytest.approx(0.06 + 0.256)
        await engine.keep_decoding(2)
        assert await engine.beside(128) == pytest.approx(0.03 + 0.064)
        await engine.keep_decoding(0)


async def test_steps_that_do_not_come_are_not_waited_for_without_end() -> None:
    async with alone(FormulaEngine(), step_timeout_s=0.1) as engine:
        with pytest.raises(SoloError, match="did not come"):
            await engine.beside(BUDGET + 1)


async def test_a_dead_engine_is_an_error() -> None:
    scripted = FormulaEngine()
    async with alone(scripted) as engine:
        await engine.decoding(1, 256)
        scripted.is_dead = True
        with pytest.raises(EngineError, match="died"):
            await engine.decoding(2, 256)


def config_of(**engine: Any) -> BatonConfig:
    pool = {"engine": {"kind": "vllm", **engine}, "env": {"OF_THE_POOL": "1"}}
    return BatonConfig.model_validate({"prefill": pool, "decode": {"main": pool}})


async def test_an_engine_has_its_variables_and_the_next_one_has_them_not(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    """An eager engine compiles nothing, by a variable; a compiled one that is measured after it must not have that."""
    monkeypatch.setattr(several, "build_engine", lambda *_, **__: FormulaEngine())
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    seen = []
    for eager in (True, False):
        async with solo_module.solo(config_of(enforce_eager=eager), "prefill", 1):
            seen.append((os.environ.get("TORCH_COMPILE_DISABLE"), os.environ.get("OF_THE_POOL")))
    assert seen == [("1", "1"), (None, "1")]
    assert "OF_THE_POOL" not in os.environ


async def test_an_engine_that_does_not_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> None:
    class Broken(FormulaEngine):
        async def start(self) -> EngineInfo:
            self.child = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 - as vLLM's launch would
            raise EngineError("no memory")

    broken = Broken()
    monkeypatch.setattr(several, "build_engine", lambda *_, **__: broken)
    with pytest.raises(EngineError, match="no memory"):
        async with solo_module.solo(config_of(), "prefill", 1):
            pass
    assert broken.child.wait(60) == -signal.SIGKILL
    assert "OF_THE_POOL" not in os.environ


def test_the_smallest_chunk_that_costs_little_throughput() -> None:
    assert chunk_of(256, [0.5, 1.0]) == Chunk(256, cast(float, pytest.approx(512 / 1.5)), 1.0)
    chunks = [Chunk(128, 900.0, 0.2), Chunk(256, 960.0, 0.3), Chunk(512, 1000.0, 0.6)]
    assert [prefill_chunk(chunks, loss).tokens for loss in (0.0, 0.05, 0.2)] == [512, 256, 128]


def test_the_most_sequences_and_prompt_tokens_that_are_in_time() -> None:
    loads = [Load(1, 0.03), Load(8, 0.05), Load(16, 0.09)]
    assert [most_sequences(loads, limit).sequences for limit in (0.01, 0.05, 1.0)] == [1, 8, 16]
    beside_s = {128: 0.1, 256: 0.2, 512: 0.4}
    assert [decode_chunk(beside_s, limit) for limit in (0.05, 0.2, 1.0)] == [128, 256, 512]


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Every engine is one of the formula, faster by its threads; which were made."""
    made: list[tuple[str, Any]] = []

    @contextlib.asynccontextmanager
    async def started(config: BatonConfig, pool: str, seed: int) -> AsyncIterator[Solo]:
        engine = config.pools[pool].engine
        assert isinstance(engine, VllmEngineConfig)
        made.append((pool, engine))
        async with alone(FormulaEngine(engine.omp_threads, 60)) as found:
            yield found

    monkeypatch.setattr(tune, "solo", started)
    return made


def test_both_roles_from_end_to_end(formula: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    tune.main(["--tpot-s", "0.06", "--gap-s", "0.2"])
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert [pool for pool, _ in formula] == ["prefill", "decode-main"]
    assert (formula[0][1].max_num_batched_tokens, formula[0][1].max_num_seqs) == (1024 + 65, 65)
    prefill, decode = result["pools"]["prefill"], result["pools"]["decode-main"]
    # 1,561, 1,730, 1,855 and 1,925 tokens/s
    assert prefill["settings"] == {"engine": {"max_num_batched_tokens": 512}}
    assert decode["settings"] == {"engine": {"max_num_seqs": 8, "max_num_batched_tokens": 256}}
    figures = decode["variants"][0]
    # 60 blocks hold 12 sequences of 4 blocks beside a chunk of 8, so 16 are not tried
    assert [each["sequences"] for each in figures["sequences"]] == [1, 2, 4, 8]
    assert figures["met"] == {"tpot": True, "gap": True}
    assert result["conditions"]["goals"] == {"tpot_s": 0.06, "gap_s": 0.2, "loss": 0.05}
    fragment = printed.err[printed.err.index("prefill:\n") :]
    assert yaml.safe_load(fragment) == {"prefill": prefill["settings"], "decode": {"main": decode["settings"]}}


@pytest.mark.parametrize("json_only", [False, True])
def test_a_bar_counts_the_measurements_of_all_pools_and_variants(
    formula: list[tuple[str, Any]], on_terminal: Callable[[], io.StringIO], json_only: bool
) -> None:
    terminal = on_terminal()
    variant = ["--variant", '{"engine": {"omp_threads": 2}}']
    few = ["--chunks", "256,512", "--sequences", "1,8,16,32", "--repeats", "1", *variant]
    tune.main([*few, "--tpot-s", "0.06", *(["--json"] if json_only else [])])
    shown = terminal.getvalue()
    assert len(formula) == 4
    counts = [int(done) for done in re.findall(r"(\d+)/16\b", shown)]
    assert counts == sorted(counts)
    # 2 chunks of prefill; for decode 4 numbers of sequences and 2 chunks; 16 and 32 sequences are left out
    assert set(counts) == (set() if json_only else {*range(4), *range(4, 7), *range(8, 13), *range(14, 17)})
    assert "    chunks of 256: " in shown
    assert ("\x1b" in shown) == (not json_only)


def test_the_best_variant_is_chosen_with_its_own_settings(
    formula: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    variant = {"engine": {"omp_threads": 2}, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}}
    tune.main(["--pools", "decode-main", "--variant", json.dumps(variant), "--tpot-s", "0.02", "--gap-s", "0.03"])
    found = json.loads(capsys.readouterr().out)["pools"]["decode-main"]
    assert [each["settings"]["max_num_seqs"] for each in found["variants"]] == [1, 4]
    assert found["variants"][0]["met"] == {"tpot": False, "gap": False}
    engine = {"omp_threads": 2, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    assert found["settings"] == {"engine": engine, "env": variant["env"]}


def test_goals_are_those_of_the_default_class() -> None:
    serve = yaml.safe_load((ROOT / "configs" / "cpu-1p1d.yaml").read_text())["applications"][0]["args"]
    plain = BatonConfig.model_validate(serve)
    serve["placement"] = {"classes": {"chat": {"tpot_s": 0.04}}, "default_class": "chat"}
    of_class = BatonConfig.model_validate(serve)
    asked = tune.parse(["--gap-s", "0.5"])
    assert tune.goals_of(of_class, asked).tpot_s == 0.04
    assert (tune.goals_of(plain, asked).tpot_s, tune.goals_of(plain, asked).gap_s) == (0.1, 0.5)
    assert tune.goals_of(of_class, tune.parse([])).gap_s == pytest.approx(0.16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pools", "decode-small"], "no pool"),
        (["--chunks", "100"], "whole blocks of 128 tokens"),
        (["--chunks", "384"], "whole parts of --prompt"),
        (["--prompt", "2048"], "takes 2048 tokens at most"),
        (["--variant", "[1]"], "a JSON object"),
        (["--variant", "{"], "a JSON object"),
        (["--config", "configs/mock.yaml"], "only vLLM's engines"),
        (["--config", "README.md"], "no configuration of Baton"),
    ],
)
def test_a_wrong_command_line_says_so(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        tune.parse(arguments)
    assert message in f"{ended.value} {capsys.readouterr().err}"


def test_a_variant_that_is_no_configuration_says_so(
    formula: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        tune.main(["--pools", "prefill", "--variant", '{"engine": {"threads": 2}}'])
    assert "threads" in str(ended.value)
    assert not formula, "it is said before anything is measured"


def test_a_chunk_is_measured_in_one_step_though_a_prompt_on_decode_gets_half_of_one() -> None:
    options = tune.parse(["--chunks", "256", "--sequences", "1,8"])
    made = tune.measured(config_of(engine_args={"seed": 3}), "decode-main", {}, options)
    engine = made.decode["main"].engine
    assert isinstance(engine, VllmEngineConfig)
    assert engine.max_num_batched_tokens is not None
    assert engine.engine_args == {"seed": 3, "long_prefill_token_threshold": 0}
    assert engine.max_num_batched_tokens >= 256 + 8
