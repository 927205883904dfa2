"""LoRA adapters by their contents: the same files have the same id in every process and on every node."""

from __future__ import annotations

import hashlib
from pathlib import Path

from deployments.checkpoint.errors import AdapterError

CONFIG, WEIGHTS = "adapter_config.json", "*.safetensors"
_DIGITS = 8


def adapter_id(path: str) -> int:
    """An adapter's id, from 1 to 2^31 - 1: a digest of its configuration and its weights. Reads all of its files.

    Raises AdapterError when the folder holds no adapter, or cannot be read.
    """
    digest = hashlib.sha256()
    try:
        weights = sorted(Path(path).glob(WEIGHTS))
        if not weights:
            raise AdapterError(f"{path} holds no {WEIGHTS}")
        for file in (Path(path) / CONFIG, *weights):
            with file.open("rb") as opened:
                contents = hashlib.file_digest(opened, "sha256").digest()
            digest.update(hashlib.sha256(file.name.encode()).digest() + contents)
    except OSError as error:
        raise AdapterError(f"{path} cannot be read as an adapter: {error}") from error
    return int.from_bytes(digest.digest()[:4], "big") % (2**31 - 1) + 1


def engine_name(name: str, number: int) -> str:
    """What engines call an adapter: its name and its id. Block hashes contain it, so equal names do not share KV."""
    return f"{name}@{digits(number)}"


def digits(number: int) -> str:
    """An adapter's id in hexadecimal digits."""
    return f"{number:0{_DIGITS}x}"
