"""Which weights an engine has loaded, so that KV of others on the disk is not taken for its own."""

from __future__ import annotations

import hashlib
import logging
import uuid
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

logger = logging.getLogger("baton.store")

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
CONFIG = "config.json"


def weights_of(model: str, revision: str | None = None) -> str:
    """A name that is another one when a file of the weights has another name, size or time of change.

    `model`: a folder, or a Hugging Face name whose files are in the local cache. Where neither is found, the name is a
    new one each time: nothing that was stored before is used then.
    """
    folder = Path(model)
    if not folder.is_dir():
        cached = try_to_load_from_cache(model, CONFIG, revision=revision)
        folder = Path(cached).parent if isinstance(cached, str) else folder
    files = sorted({file for pattern in WEIGHTS for file in folder.glob(pattern)}) if folder.is_dir() else []
    if not files:
        logger.warning("no files of the weights of %s are found: a KV tier on disk begins empty", model)
        return uuid.uuid4().hex
    told = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(told).encode()).hexdigest()
