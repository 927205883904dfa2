"""A cluster with disk tiers that asks itself until it is killed: `python tier_child.py MODEL DIRECTORY`.

It prints `answer NUMBER TOKENS` for each prompt, and `stored` once those of the first prompts are on disk.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from load_tests.harness.control_plane import PREFILL, SMALL
from tests.deployments.engine.conftest import forking
from tests.deployments.engine.vllm.test_channel import cluster
from tests.deployments.engine.vllm.test_tiers import ANSWER, FIRST, STORED, are_stored, prompt_of, split, tiered


async def ask(model: Path, directory: Path) -> None:
    shape = tiered("disk", directory)
    async with cluster(model, shape, shape) as engines:
        for number in itertools.count():
            answer = await split(engines, prompt_of(number))
            print(ANSWER, number, *answer.tokens, flush=True)
            if number + 1 == FIRST:
                for replica_id in (PREFILL, SMALL):
                    await are_stored(engines, replica_id)
                print(STORED, flush=True)


if __name__ == "__main__":
    with forking():
        asyncio.run(ask(Path(sys.argv[1]), Path(sys.argv[2])))
