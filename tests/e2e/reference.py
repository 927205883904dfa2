"""One plain vLLM engine, without Baton: reads {"name": [prompt token ids, max tokens, folder of a LoRA adapter or ""]},
writes {"name": token ids}.

Run as a process of its own, so that it is gone before the cluster starts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(model: str, questions: Path, answers: Path) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=2048,
        block_size=128,
        enforce_eager=True,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=805306368,
        enable_lora=True,
        max_loras=2,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
    )
    asked = json.loads(questions.read_text())
    told: dict[str, list[int]] = {}
    # Each adapter is asked alone: vLLM's CPU operations confuse them (`deployments/engine/vllm/cpu_adapters.py`).
    for number, folder in enumerate(sorted({folder for *_, folder in asked.values()})):
        these = {name: each for name, each in asked.items() if each[2] == folder}
        prompts = [{"prompt_token_ids": prompt} for prompt, *_ in these.values()]
        params = [SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True) for _, limit, _ in these.values()]
        adapter = LoRARequest(folder, number, folder) if folder else None
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
        told |= {name: list(output.outputs[0].token_ids) for name, output in zip(these, outputs, strict=True)}
    answers.write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
