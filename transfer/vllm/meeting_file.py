"""Removes the file by which an engine's workers have found each other.

vLLM's workers meet at a file in the folder for temporary files (torch's `FileStore`). Each engine would leave it there,
however it ends. It is needed until all workers have met, which is before vLLM makes their KV caches.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed
from torch.distributed import distributed_c10d


def remove_meeting_file() -> None:
    """Remove it, if this process met others at a file. Call it once all of them have met.

    Groups that were made before go on without it, and torch makes no other one when they end.
    """
    if not torch.distributed.is_initialized():
        return
    store = distributed_c10d._get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    if isinstance(store, torch.distributed.FileStore):
        Path(store.path).unlink(missing_ok=True)
