"""The file at which an engine's workers meet: it is gone once they have, and nothing needs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch.distributed

from transfer.vllm.meeting_file import remove_meeting_file

WORKER = """
import sys
from pathlib import Path
import torch
import torch.distributed as workers
from transfer.vllm.meeting_file import remove_meeting_file
file, rank = Path(sys.argv[1]), int(sys.argv[2])
workers.init_process_group("gloo", store=workers.FileStore(str(file), 2), world_size=2, rank=rank)
group = workers.new_group([0, 1])
workers.barrier()
assert file.exists()
workers.barrier()
remove_meeting_file()
workers.barrier()
assert not file.exists()
total = torch.ones(1)
workers.all_reduce(total, group=group)
assert total.item() == 2
workers.destroy_process_group()
"""


def test_workers_work_together_when_it_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path / "met")]
    workers = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    try:
        assert [worker.wait(120) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert not list(tmp_path.iterdir())


def test_a_process_that_met_none_has_nothing_to_remove() -> None:
    assert not torch.distributed.is_initialized()
    remove_meeting_file()
